"""The inside of a reward process: find the function, then grade what arrives until the driver is gone.

The function runs in the main thread, where `signal.alarm` works. Time limits are the driver's business: it kills this
process, whatever the function does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from flowrl.rewards.function import Batched, Graded, graded, graded_batch, resolve, user_traceback

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Call:
    """Arguments of one call: of one row, or lists of them for a `@batched` function."""

    prompt: Any
    response: Any
    row: Any


@dataclass(frozen=True)
class Ready:
    """The function was found."""

    batched: bool


@dataclass(frozen=True)
class Unusable:
    """The function was not found or cannot be called."""

    reason: str


@dataclass(frozen=True)
class Answer:
    """What came of a call: for each row a grade or what is wrong with it, or one reason for the whole call."""

    rows: list[Graded | str] | None
    failure: str = ""


def main(file_descriptor: int, driver_pid: int, function_name: str) -> None:
    """Serves one connection; `file_descriptor` is inherited from the driver, whose process id is `driver_pid`."""
    _end_with(driver_pid)
    os.set_inheritable(file_descriptor, False)
    connection = Connection(file_descriptor)
    try:
        function = resolve(function_name)
    except ValueError as error:
        connection.send(Unusable(str(error)))
        return
    connection.send(Ready(isinstance(function, Batched)))
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send(_answer(function, call))


def _answer(function: Callable[..., Any], call: Call) -> Answer:
    try:
        value = function(call.prompt, call.response, call.row)
    except BaseException as error:  # a user's code may raise anything, SystemExit included; the driver decides
        return Answer(None, f"raised {type(error).__name__}: {error}\n{user_traceback(error)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would go off in another row
    try:
        return Answer(graded_batch(value, len(call.row)) if isinstance(function, Batched) else [graded(value)])
    except ValueError as error:
        return Answer(None, str(error))


def _end_with(driver_pid: int) -> None:
    """Lets the kernel kill this process when the driver ends, even if it is busy in C code at that moment."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver_pid:
        sys.exit(1)
