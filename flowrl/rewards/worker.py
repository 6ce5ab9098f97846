"""The outside of a reward process: start it, give it a call, see what came of it, kill it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO

from flowrl.rewards.process import Answer, Call, Ready, Unusable

LOAD_SECONDS = 120.0
"""Limit on importing the module of a reward function."""

# The driver's own search path, so that whatever it could import, a reward function can too.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from flowrl.rewards.process import main; main(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])"
)


@dataclass(frozen=True)
class Ended:
    """The process is of no further use: it overran its time, or it died."""

    reason: str


class RewardProcess:
    """One process that grades one call at a time; it is its own process group, so what it starts dies with it."""

    def __init__(self, function: str, memory_bytes: int, log: IO[bytes] | None) -> None:
        ours, theirs = socket.socketpair()
        path = list(dict.fromkeys([*(entry or os.getcwd() for entry in sys.path), os.getcwd()]))
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-c", _BOOT, json.dumps(path), str(theirs.fileno()), str(os.getpid()),
                    str(memory_bytes), function,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1"} | os.environ,
            )  # fmt: skip
        self.connection = Connection(ours.detach())
        self.exit_descriptor = os.pidfd_open(self._process.pid)
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + LOAD_SECONDS
        self._limit_seconds = LOAD_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    def give(self, task: int, call: Call, limit_seconds: float) -> bool:
        """Starts a call; its clock starts now. False where the process has died meanwhile and never saw the call."""
        try:
            self.connection.send(call)
        except OSError:
            return False
        self.task = task
        self._limit_seconds = limit_seconds
        self.deadline = time.monotonic() + limit_seconds
        return True

    def event(self) -> Ready | Unusable | Answer | Ended | None:
        """What happened since the last look; None where nothing did. Never waits."""
        try:
            if self.connection.poll():
                message: Ready | Unusable | Answer = self.connection.recv()
                self.ready = self.ready or isinstance(message, Ready)
                self.task = None
                return message
        except (EOFError, OSError):
            return Ended(self._how_it_died())
        if self._process.poll() is not None:
            return Ended(self._how_it_died())
        if (self.task is not None or not self.ready) and time.monotonic() >= self.deadline:
            doing = "did not finish" if self.ready else "did not finish importing its module"
            return Ended(f"{doing} within {self._limit_seconds:g} s and was killed")
        return None

    def kill(self) -> None:
        """Ends the process and all it started, now, and releases what belongs to it. May be called again."""
        if self.connection.closed:
            return
        with suppress(ProcessLookupError):  # the group may be gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        os.close(self.exit_descriptor)

    def _how_it_died(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed the connection to the driver"
        if code < 0:
            return f"was killed by signal {signal.Signals(-code).name}"
        return f"ended its process with exit code {code}"
