"""The inside of a reward process: find the function, then grade what arrives until the driver is gone.

The function runs in the main thread, where `signal.alarm` works. Time limits are the driver's business: it kills this
process, whatever the function does. The limit on memory is the kernel's: a call that needs more raises `MemoryError`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from flowrl.rewards.function import Batched, Graded, described, graded, graded_batch, resolve, user_traceback

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


def main(file_descriptor: int, driver_pid: int, memory_bytes: int, function_name: str) -> None:
    """Serves one connection; `file_descriptor` is inherited from the driver, whose process id is `driver_pid`."""
    _end_with(driver_pid)
    _limit_memory(memory_bytes)
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
        connection.send(_answer(function, call, memory_bytes))


def _answer(function: Callable[..., Any], call: Call, memory_bytes: int) -> Answer:
    try:
        value = function(call.prompt, call.response, call.row)
    except MemoryError as error:
        limit = f"reward.memory_bytes={memory_bytes}" if memory_bytes else "no reward.memory_bytes"
        return Answer(None, f"ran out of memory ({limit} for each reward process)\n{user_traceback(error)}")
    except BaseException as error:  # a user's code may raise anything, SystemExit included; the driver decides
        return Answer(None, f"raised {described(error)}\n{user_traceback(error)}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left behind would go off in another row
    try:
        return Answer(graded_batch(value, len(call.row)) if isinstance(function, Batched) else [graded(value)])
    except ValueError as error:
        return Answer(None, str(error))
    except BaseException as error:  # reading what it returned runs the user's code too
        return Answer(None, f"returned a value that raises {described(error)} when it is read\n{user_traceback(error)}")


def _limit_memory(num_bytes: int) -> None:
    """Bounds private writable memory, which is what a runaway takes: libraries and reserved address space do not count.

    Processes that the function starts inherit the limit, each for itself; none of them can raise it.
    """
    if num_bytes:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _end_with(driver_pid: int) -> None:
    """Lets the kernel kill this process when the driver ends, even if it is busy in C code at that moment."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver_pid:
        sys.exit(1)
