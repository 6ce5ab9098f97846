"""What is to happen to a run, where and when; and a reward function that carries it out. Imports little."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "FLOWRL_SABOTAGE"
PHASES: dict[str, tuple[str, str]] = {
    "generate": ("rollout", "generate"),
    "log_probs": ("actor", "log_probs"),
    "update": ("actor", "update"),
    "reshard": ("rollout", "receive_weights"),
    "save": ("actor", "save_state"),
}
"""Role and method in which each phase is met."""
SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class Order:
    """At call `call` (from 1) of the phase's method, rank `rank` of its role does `deed` to `victim`, and notes when.

    victim: `self`, or the process whose command line, among the driver's children, has that word (`driver` is itself).
    deed: the name of a signal, `crash` (a segmentation fault), `raise`, `exhaust` (memory) or `hang`. stamp: file for the
    time, seconds since the epoch.
    """

    phase: str
    call: int
    rank: int
    victim: str
    deed: str
    stamp: str
    driver: int = 0

    @classmethod
    def read(cls) -> Order:
        """The order of this run. Error: KeyError outside one."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def text(self) -> str:
        """As it stands in the environment."""
        return json.dumps(asdict(self))

    def carry_out(self) -> None:
        """Errors: what `raise` and `exhaust` raise."""
        Path(self.stamp).write_text(repr(time.time()))
        if self.deed == "hang":
            time.sleep(3600)
        elif self.deed == "raise":
            raise ArithmeticError("an error that this run was told to make")
        elif self.deed == "exhaust":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
            bytearray(4 * SPARE_BYTES)
        elif self.deed == "crash":
            ctypes.string_at(0)
        else:
            os.kill(self._target(), signal.Signals[self.deed])

    def _target(self) -> int:
        if self.victim in ("self", "driver"):
            return os.getpid() if self.victim == "self" else self.driver
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _parent(folder) == self.driver and self.victim in _command(folder):
                return int(folder.name)
        raise LookupError(f"the driver has no child {self.victim}")


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(folder: Path) -> str:
    try:
        return (folder / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """The length of the response. Carries out an order of phase `reward`, once, in the process that grades."""
    order = Order.read()
    if order.phase == "reward" and response and not Path(order.stamp).exists():
        order.carry_out()
    return float(len(response))
