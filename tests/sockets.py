"""Which addresses the processes of a run listen on."""

from __future__ import annotations

import ipaddress

import psutil

from flowrl.single_controller.reaper import marked_processes


def listening_beyond_loopback(mark: str, *pids: int) -> list[str]:
    """Sockets that hosts other than this one can reach, of `pids` and of all processes whose environment holds `mark`."""
    found = []
    for pid in (*pids, *marked_processes(mark)):
        try:
            process = psutil.Process(pid)
            name, sockets = process.name(), process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        for each in sockets:
            address = ipaddress.ip_address(each.laddr.ip)
            inside = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
            if each.status == psutil.CONN_LISTEN and not (inside or address).is_loopback:
                found.append(f"{name} ({pid}) listens on {each.laddr.ip} port {each.laddr.port}")
    return found
