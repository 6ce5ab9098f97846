"""SIGINT and SIGTERM as one exception, so that a stopped driver leaves its `with` blocks in order; a step may end first."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SWALLOWED_SECONDS = 0.5  # between two looks whether the interrupt is still on its way


class _Interrupt(KeyboardInterrupt):
    """One that a weak reference can follow. KeyboardInterrupt is what Ray's waiting functions let a signal raise."""


class Stopped(BaseException):
    """The user or the system asked this process to end. Not an Exception: nothing but the top is to catch it.

    `late`: what was to end first did not within its time of grace.
    """

    def __init__(self, signum: int, late: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum, self.late = signum, late

    @property
    def exit_code(self) -> int:
        """128 + signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.signum


class StopRequest:
    """What signals have asked of this process so far.

    The first ends the block of `stop_signals`, at once or, inside a block of `grace`, when its time is over. A second one
    ends it at once. Later ones are ignored, so that cleaning up is not cut short.

    Python raises wherever the main thread happens to be. What is raised in a destructor or a callback of the import
    system is dropped, and libraries have bare `except` clauses; so it is raised again if it is gone and the block is not.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._raised: weakref.ref[_Interrupt] | None = None
        self._grace_seconds = 0.0
        self._ending = self._late = False

    @property
    def requested(self) -> bool:
        """Whether the process is to end as soon as what is under way is done."""
        return self.signum is not None

    @contextmanager
    def grace(self, seconds: float) -> Iterator[None]:
        """Inside, the first signal is noted (`requested`) and the block may go on for `seconds`; 0 is no grace."""
        self._grace_seconds = seconds
        try:
            yield
        finally:
            self._grace_seconds = 0.0
            if not self._ending:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def stop(self) -> None:
        """Ends the block of `stop_signals` now, if a signal asked for it. Raises `Stopped`."""
        if self.signum is not None:
            self._ending = True
            raise Stopped(self.signum)

    def received(self, signum: int, frame: FrameType | None) -> None:
        """Handler of the stop signals, and of the alarm that ends the time of grace or looks after the interrupt."""
        if self._ending:
            if signum == signal.SIGALRM and self._raised is not None and self._raised() is None:
                raise self._interrupt()
            return
        if self.signum is None and signum in STOP_SIGNALS:
            self.signum = signum
            if self._grace_seconds > 0:
                signal.setitimer(signal.ITIMER_REAL, self._grace_seconds)
                # Not through a buffered stream: the signal may have come while one was being written to.
                os.write(
                    2,
                    f"{signal.Signals(signum).name}: stopping when this step is saved, in {self._grace_seconds:g} s at the "
                    "latest; once more to stop at once\n".encode(),
                )
                return
        self._ending, self._late = True, signum == signal.SIGALRM
        signal.setitimer(signal.ITIMER_REAL, _SWALLOWED_SECONDS, _SWALLOWED_SECONDS)
        raise self._interrupt()

    def _interrupt(self) -> _Interrupt:
        # Made here: in the frame that raises it, a variable would keep it alive.
        interrupt = _Interrupt()
        self._raised = weakref.ref(interrupt)
        return interrupt

    def exception(self) -> Stopped | None:
        """What the interrupt that ended the block stands for; None for one that no signal caused."""
        return None if self.signum is None else Stopped(self.signum, self._late)


@contextmanager
def stop_signals(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """SIGINT and SIGTERM end the block with ``Stopped``, as the `StopRequest` (a new one, if none is given) says.

    Inside the block it is a KeyboardInterrupt, the only exception that Ray's waiting functions let a signal raise.
    Must be entered on the main thread. The handlers of before come back at the end.
    """
    request = request or StopRequest()
    before = {each: signal.signal(each, request.received) for each in (*STOP_SIGNALS, signal.SIGALRM)}
    hook = sys.unraisablehook

    def quiet(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, _Interrupt):
            hook(dropped)

    sys.unraisablehook = quiet
    try:
        yield request
    except KeyboardInterrupt:
        stopped = request.exception()
        if stopped is not None:
            raise stopped from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)
        sys.unraisablehook = hook
