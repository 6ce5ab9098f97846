"""SIGINT and SIGTERM as one exception, so that a stopped driver leaves its `with` blocks in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The user or the system asked this process to end. Not an Exception: nothing but the top is to catch it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


@contextmanager
def stop_signals() -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the block with ``Stopped``; later ones are ignored, so clean-up is not cut short.

    Inside the block it is a KeyboardInterrupt, the only exception that Ray's waiting functions let a signal raise.
    Must be entered on the main thread. The handlers of before come back at the end.
    """
    received: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signum)
            raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in STOP_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        if received:
            raise Stopped(received[0]) from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
