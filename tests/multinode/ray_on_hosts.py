"""A Ray cluster over `Hosts`, started as a user starts one on several machines, and flowrl's commands on its head."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from pathlib import Path

from tests.end_to_end.conftest import Finished
from tests.multinode.hosts import Host, Hosts

_PORT = 6379
_RAY = [str(Path(sys.executable).with_name("ray")), "start", "--disable-usage-stats"]
_LEFT_SECONDS = 60
_ATTEMPTS = 3


class RayOnHosts:
    """The first host is the head; commands run there."""

    def __init__(self, hosts: Hosts, **env: str) -> None:
        """env: further environment of `ray start`. Every host has one CPU."""
        self._hosts, self.local = hosts, hosts.local
        self.head, self.others = hosts.hosts[0], hosts.hosts[1:]
        self.address = f"{self.head.address}:{_PORT}"
        # As docs/cluster.md has it, with a token of this cluster's own.
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ADDRESS": ""}
        self._ray_environment = {**self.environment, **env}
        self._start_ray(self.head, "--head", f"--port={_PORT}", "--include-dashboard=false")
        for host in self.others:
            self._start_ray(host, f"--address={self.address}")

    def _start_ray(self, host: Host, *options: str) -> None:
        """Ray gives its own processes half a minute to come up, which is little for a machine with much to do."""
        own = [f"--node-ip-address={host.address}", "--num-cpus=1", f"--temp-dir={self._hosts.local}"]
        command = [*_RAY, *own, "--object-store-memory=100000000", *options]
        for attempts_left in reversed(range(_ATTEMPTS)):
            process = host.start(command, **self._ray_environment)
            out, err = process.communicate(timeout=200)
            if process.returncode == 0:
                return
            assert attempts_left, (out + err)[-3000:]

    def _command(self, overrides: tuple[str, ...], module: str) -> list[str]:
        return [sys.executable, "-m", module, f"cluster.address={self.address}", *overrides]

    def start(self, *overrides: str, module: str = "flowrl.main_ppo") -> subprocess.Popen[str]:
        """A command on the head, in the background."""
        return self.head.start(self._command(overrides, module), **self.environment)

    def finish(self, process: subprocess.Popen[str], folder: Path, timeout: float = 300) -> Finished:
        """Waits for a command, and then for its processes on every host to be gone."""
        started = time.monotonic()
        out, err = process.communicate(timeout=timeout)
        seconds = time.monotonic() - started
        deadline = time.monotonic() + _LEFT_SECONDS
        while (left := self.processes_of_runs()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return Finished(process.returncode, out, err, folder, seconds, tuple(left))

    def run(self, folder: Path, *overrides: str, module: str = "flowrl.main_ppo", timeout: float = 300) -> Finished:
        """A command on the head with `run.dir`."""
        return self.finish(self.start(*overrides, f"run.dir={folder}", module=module), folder, timeout)

    def processes_of_runs(self) -> list[str]:
        """Drivers, workers and what they started, on hosts that are not lost."""
        return [
            f"{host.name} {pid} {command[:100]}"
            for host in self._hosts.hosts
            if not host.lost
            for pid, command in host.processes().items()
            if "flowrl" in command or command.startswith("ray::Process")
        ]

    def control_store(self) -> int:
        """Pid of Ray's GCS, as this machine has it."""
        return next(pid for pid, command in self.head.processes().items() if "gcs_server" in command.split()[0])

    def workers(self) -> dict[str, list[int]]:
        """Pids of worker processes by host, as this machine has them."""
        found = {
            host.name: [p for p, c in host.processes().items() if c.startswith("ray::Process")]
            for host in self._hosts.hosts
        }
        return {name: sorted(pids) for name, pids in found.items() if pids}
