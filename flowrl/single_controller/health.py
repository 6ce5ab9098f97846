"""Whether Ray itself lives: its store of control (GCS) and the daemon (raylet) of the driver's node.

Ray tells the loss of another node within some 15 s by the death of its processes. Of these two it tells late or never, or
it ends the driver.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import ray

_ANSWER_SECONDS = 2.0
_TRIES = 3
_PAUSE_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_STUCK_SECONDS = 10.0


class OwnRay:
    """A Ray that this process started, so that the system tells of its processes' ends."""

    def __init__(self, ended: Callable[[], Mapping[str, int]], pids: Iterable[int] = ()) -> None:
        """ended: exit codes of Ray's processes that are gone, by kind. pids: those that live now."""
        self._ended = ended
        self._poll = select.poll()
        self._ends: dict[int, None] = {}
        for pid in pids:
            with suppress(ProcessLookupError):
                end = os.pidfd_open(pid)
                self._ends[end] = None
                self._poll.register(end, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """So long, or until one of the processes ends."""
        for end, _ in self._poll.poll(seconds * 1000):
            # An end is an end: its descriptor would be ready from now on.
            self._poll.unregister(end)
            del self._ends[end]
            os.close(end)

    def close(self) -> None:
        """Gives the descriptors back."""
        for end in self._ends:
            os.close(end)
        self._ends.clear()

    def problem(self) -> str | None:
        """What is gone, in words; None while all is well."""
        for kind, code in self._ended().items():
            if kind in ("raylet", "gcs_server"):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                return f"Ray's {kind} of this run {how}"
        return None


class JoinedRay:
    """A Ray that others started: its ports tell whether its processes live."""

    def __init__(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """addresses: host and port by kind of process."""
        self._addresses = addresses

    def wait(self, seconds: float) -> None:
        """So long."""
        time.sleep(seconds)

    def close(self) -> None:
        """Nothing is held."""

    def problem(self) -> str | None:
        """What does not answer, in words, tried several times; None while all is well."""
        for kind, address in self._addresses.items():
            for left in reversed(range(_TRIES)):
                try:
                    socket.create_connection(address, timeout=_ANSWER_SECONDS).close()
                    break
                except OSError as error:
                    if not left:
                        return f"Ray's {kind} at {address[0]}:{address[1]} is gone ({error})"
                    time.sleep(_PAUSE_SECONDS)
        return None


class RayWatch:
    """Looks every second, on a thread of its own, whether Ray lives. The driver asks with `problem`.

    When it is gone, others of Ray's calls end the driver at once and without a word, with exit code 1, and some
    (`ray.put`, ...) do not return. A driver whose main thread stays inside one of these is ended; the reaper cleans up.
    """

    def __init__(self, processes: OwnRay | JoinedRay, last_words: Callable[[str], None]) -> None:
        """last_words: is told, the last one counts, what is to be said should this process end without a word."""
        self._processes, self._last_words = processes, last_words
        self._found: str | None = None
        self._lock = threading.Lock()
        self._asked, self._closed = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="ray-watch", daemon=True).start()

    def problem(self, look: bool = False) -> str | None:
        """What is gone, in words; None while all is well. look: now, not as of the last second."""
        if look:
            self._look()
        if self._found is not None:
            self._asked.set()
        return self._found

    def close(self) -> None:
        """Ends the watch, before Ray is ended in good order."""
        with self._lock:
            self._closed.set()

    def _look(self) -> None:
        with self._lock:
            if self._found is None and not self._closed.is_set():
                self._found = self._processes.problem()
                if self._found is not None:
                    self._last_words(f"{self._found}; Ray ended the driver with it")

    def _watch(self) -> None:
        while self._found is None and not self._closed.is_set():
            self._processes.wait(_LOOK_SECONDS)
            self._look()
        self._processes.close()
        inside = 0
        while not self._asked.wait(_LOOK_SECONDS) and not self._closed.is_set():
            inside = inside + 1 if _main_thread_is_in_ray() else 0
            if inside * _LOOK_SECONDS >= _STUCK_SECONDS:
                self._last_words(f"{self._found}; the driver waited for Ray meanwhile and was ended")
                os._exit(1)


def _main_thread_is_in_ray() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(os.path.dirname(ray.__file__))
