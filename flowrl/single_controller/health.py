"""Whether Ray itself lives: its store of control (GCS) and the daemon (raylet) of the driver's node.

Ray tells the loss of another node within some 15 s by the death of its processes. Of these two it tells late or never, or
it ends the driver.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping

_ANSWER_SECONDS = 2.0
_TRIES = 3
_PAUSE_SECONDS = 1.0


class OwnRay:
    """A Ray that this process started, so that the system tells of its processes' ends."""

    def __init__(self, ended: Callable[[], Mapping[str, int]]) -> None:
        """ended: exit codes of Ray's processes that are gone, by kind."""
        self._ended = ended

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
