"""Memory of processes and of the node, and what the kernel did about it: for messages on failures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_GIB = 1 << 30
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|Unable to allocate|Cannot allocate memory", re.I)


def oom_kills() -> int:
    """How many processes the kernel killed for memory in this control group so far (0 where that is not told)."""
    try:
        found = re.search(r"^oom_kill (\d+)$", (_CONTROL_GROUP / "memory.events").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0


def resident_bytes(pid: int | str = "self", peak: bool = False) -> int | None:
    """What a process of this node holds, or held at most; None when there is none."""
    try:
        found = re.search(
            rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M
        )
    except OSError:
        return None
    return int(found.group(1)) << 10 if found else None


def node_bytes() -> tuple[int, int]:
    """Total and available bytes of this node, bounded by the control group's limit."""
    table = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M))
    total, available = int(table["MemTotal"]) << 10, int(table["MemAvailable"]) << 10
    try:
        limit, used = (int((_CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return total, available
    return min(total, limit), min(available, max(0, limit - used))


def node_figures() -> str:
    """The node's memory in words."""
    total, available = node_bytes()
    return f"the node has {total / _GIB:.2f} GiB, {available / _GIB:.2f} GiB of them available now"


@contextmanager
def allocation_failures_with_figures() -> Iterator[None]:
    """Adds this process's and the node's memory to an error of Python's, NumPy's or torch's allocators."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            now, most = resident_bytes() or 0, resident_bytes(peak=True) or 0
            first = str(error).strip().partition("\n")[0]
            error.add_note(
                f"out of memory: {type(error).__name__}{': ' if first else ''}{first[:300]}; the process holds "
                f"{now / _GIB:.2f} GiB, {most / _GIB:.2f} GiB at most; {node_figures()}"
            )
        raise


class ResidentSizes:
    """What processes of this node held when they were last looked at."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def look(self, pid: int) -> None:
        """Keeps the last figure of a process that is gone."""
        held = resident_bytes(pid)
        if held:
            self._seen[pid] = held

    def figures(self, pid: int) -> str:
        """In words; empty for a process that was never seen here."""
        if pid not in self._seen:
            return ""
        return f"last seen with {self._seen[pid] / _GIB:.2f} GiB; {node_figures()}"
