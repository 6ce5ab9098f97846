"""Ends a local Ray whose driver was killed: `python reaper.py DRIVER_PID MARK TEMP_DIR`, standard library only.

Ray's own processes follow a killed driver only in part: its agents stay for half a minute or more, with their files.
This process watches the driver. When it is gone, it kills exactly the processes whose environment holds MARK
(``NAME=value``, set while Ray was started) and removes the folder. A driver that ends in order ends this process itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

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


def reap(mark: str, folder: str) -> None:
    """Kill until nobody is left (new ones may appear meanwhile), then remove the folder."""
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while (pids := marked_processes(mark)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_POLL_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def main(driver: int, mark: str, folder: str) -> None:
    """Wait until this process is no longer the driver's child."""
    while os.getppid() == driver:
        time.sleep(_POLL_SECONDS)
    reap(mark, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
