"""Several "hosts" on one machine: Linux namespaces with networks, processes, names and local disks of their own.

Every host has an address on a common bridge, a name that no other host can resolve, a `/dev/shm` of its own and one
folder, `Hosts.local`, that is its own disk; everything else is shared storage. A host's first process ends when the
process that made it ends, and the kernel then ends all others of the host and removes its network: nothing can be left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent.parent
_NEW = ("--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
# Reaps what is left to it, says that it is there, and ends when the other end of its stdin is closed.
_FIRST = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdout.write("up\\n"); sys.stdout.flush()
sys.stdin.read()
"""


def why_not() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    missing = [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]
    if missing:
        return f"no program {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", *_NEW, "sh", "-c", "ip link add try0 type veth peer name try1 && ip link add try2 type bridge"],
        capture_output=True, text=True,
    )  # fmt: skip
    return "" if tried.returncode == 0 else f"network namespaces are not permitted: {tried.stderr.strip()[:200]}"


class Host:
    """One host. `address` is how the others reach it."""

    def __init__(self, name: str, address: str, local: Path) -> None:
        self.name, self.address = name, address
        self.lost = False
        # In a session of its own: a Ctrl-C is for the tests.
        self._first = subprocess.Popen(
            ["unshare", *_NEW, sys.executable, "-I", "-S", "-c", _FIRST],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._first.stdout is not None and self._first.stdout.readline() == "up\n"
        self.pid = int(Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text())
        # As Debian has it: a host knows its own name as a loopback address, and no other name.
        names = f"127.0.0.1 localhost\\n127.0.1.1 {name}\\n"
        for command in (
            f"hostname {name}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount -t tmpfs tmpfs {local}",
            f"printf '{names}' >{local}/hosts && mount --bind {local}/hosts /etc/hosts",
            "mount --bind /dev/null /etc/resolv.conf",
            "ip link set lo up",
        ):
            self.run(["sh", "-c", command], check=True)

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--all", f"--wd={ROOT}", *command]

    def run(self, command: Sequence[str], *, check: bool = False, timeout: float = 300, **env: str) -> tuple[int, str]:
        """Exit code and output of a command on this host."""
        done = subprocess.run(
            self._inside(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
            env={**os.environ, **env},
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stdout[-2000:]}"
        return done.returncode, done.stdout

    def start(self, command: Sequence[str], **env: str) -> subprocess.Popen[str]:
        """A command on this host, with its outputs as pipes."""
        return subprocess.Popen(
            self._inside(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )

    def processes(self) -> Mapping[int, str]:
        """Command lines of the living processes of this host but its first, by their pids outside of it."""
        found: dict[int, str] = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == self.pid:
                continue
            try:
                if os.readlink(folder / "ns" / "pid") == self._namespace():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command:
                        found[int(folder.name)] = command
            except OSError:
                continue
        return found

    def _namespace(self) -> str:
        return os.readlink(f"/proc/{self.pid}/ns/pid")

    def cut_off(self) -> None:
        """From now on nothing reaches this host or leaves it, and nobody is told."""
        self.lost = True
        self.run(["ip", "link", "set", "eth0", "down"], check=True)

    def kill(self) -> None:
        """Kill every process of this host at once, without waiting."""
        self.lost = True
        self._first.kill()

    def end(self) -> None:
        """Kill every process of this host. Idempotent."""
        self.kill()
        self._first.communicate()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self.pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


class Hosts:
    """Context manager: `count` hosts on one bridge. `local` is the folder that is each host's own disk."""

    def __init__(self, count: int) -> None:
        # Short: sockets lie below it, and their paths are limited to 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
        self.local = self._folder / "local"
        self.local.mkdir()
        self.hosts: list[Host] = []
        try:
            for number in range(1, count + 1):
                self.hosts.append(Host(f"host-{number}", f"10.77.0.{number}", self.local))
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """The bridge lies on the first host, so the machine's own network stays as it is."""
        first = self.hosts[0]
        first.run(["ip", "link", "add", "bridge0", "type", "bridge"], check=True)
        first.run(["ip", "link", "set", "bridge0", "up"], check=True)
        for number, host in enumerate(self.hosts, 1):
            ends = ["eth0", "netns", str(host.pid), "type", "veth", "peer", "name", f"port{number}"]
            subprocess.run(["ip", "link", "add", *ends, "netns", str(first.pid)], check=True)
            first.run(["ip", "link", "set", f"port{number}", "master", "bridge0", "up"], check=True)
            host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"], check=True)
            host.run(["ip", "link", "set", "eth0", "up"], check=True)

    def close(self) -> None:
        """End all hosts and remove their folder. Idempotent."""
        for host in self.hosts:
            host.kill()
        for host in self.hosts:
            host.end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
