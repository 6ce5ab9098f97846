"""Cleans up after a driver that was killed: `python reaper.py DRIVER_PID MARK [PATH...]`, standard library only.

Ray's own processes follow a killed driver only in part: its agents stay for half a minute or more, with their files, and
workers of a Ray that was joined stay while they are busy in native code. This process watches the driver. When it is
gone, it kills exactly the processes of this node whose environment holds MARK (``NAME=value``) and removes the paths:
folders, and files that nobody holds a lock on. A driver that ends in order ends this process itself; what others have
left to say, a line each on the standard input, is said by this process: the last one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence

_POLL_SECONDS = 0.3
_GIVE_UP_SECONDS = 30


def marked_processes(mark: str) -> list[int]:
    """Pids of living processes whose environment holds exactly this entry."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:
            continue
        if mark.encode() in entries:
            found.append(int(name))
    return found


def agents_with_files_in(folder: str) -> list[int]:
    """Pids of Ray's own Python processes that hold a file open in this folder.

    They overwrite their command line and part of their environment with a title (`ray::...`), so a mark may be lost.
    """
    found = []
    for name in os.listdir("/proc"):
        try:
            if not name.isdigit() or not open(f"/proc/{name}/comm").read().startswith("ray::"):  # noqa: SIM115
                continue
            links = [os.readlink(f"/proc/{name}/fd/{each}") for each in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue
        if any(link.startswith(f"{folder}/") for link in links):
            found.append(int(name))
    return found


def reap(mark: str, paths: Sequence[str] = ()) -> None:
    """Kill until nobody is left (new ones may appear meanwhile), then remove the paths."""
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    folders = [path for path in paths if os.path.isdir(path)]
    while (
        pids := {*marked_processes(mark), *sum(map(agents_with_files_in, folders), [])}
    ) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL_SECONDS)
    for path in paths:
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.exists(path):
            _remove_if_free(path)


def _remove_if_free(path: str) -> None:
    """Remove a lock file unless another run has taken it already."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        os.unlink(path)


def main(driver: int, mark: str, paths: Sequence[str]) -> None:
    """Wait until this process is no longer the driver's child."""
    while os.getppid() == driver:
        time.sleep(_POLL_SECONDS)
    # Whoever else may hold the other end is not waited for.
    os.set_blocking(0, False)
    lines = (sys.stdin.buffer.read() or b"").splitlines(keepends=True)
    if lines:
        # Nobody may listen any more.
        with contextlib.suppress(OSError):
            os.write(2, lines[-1])
    reap(mark, paths)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
