"""The network interface of a process's gloo groups: where one is chosen badly, ranks of other nodes cannot connect."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence

import psutil  # type: ignore[import-untyped]

_GLOO = "GLOO_SOCKET_IFNAME"


def interface_of(address: str, addresses: Mapping[str, Sequence[str]]) -> str | None:
    """The interface that has this address, among the addresses of each; None where none has it (a translated one)."""
    # A link-local IPv6 address carries its interface behind a %.
    found = (name for name, own in addresses.items() if address in (text.partition("%")[0] for text in own))
    return next(found, None)


def own_addresses() -> dict[str, list[str]]:
    """The IP addresses of each interface of this node."""
    return {
        name: [each.address for each in found if each.family.name in ("AF_INET", "AF_INET6")]
        for name, found in psutil.net_if_addrs().items()
    }


class GlooInterface:
    """Gloo by itself takes the address that the node's own name leads to, which often is a loopback address.

    What the user has set in the environment of `ray start` stays.
    """

    def __init__(self, node_address: str) -> None:
        self._node_address = node_address
        self._given = _GLOO in os.environ

    def choose(self, meeting_host: str) -> None:
        """For groups made from now on, whose processes meet at this host: loopback when they are all on this node, which
        no other machine can connect to, else the interface with this node's address in Ray."""
        if self._given:
            return
        inside = ipaddress.ip_address(meeting_host).is_loopback
        name = interface_of(meeting_host if inside else self._node_address, own_addresses())
        if name is not None:
            os.environ[_GLOO] = name
