"""How often a run may be begun again: rules without processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowrl.single_controller import WorkerError

SAME_FAILURES = 3
"""A failure that comes so many times in a row in the same way, at the same step, is no accident."""


@dataclass(frozen=True)
class Failure:
    """What makes two failures the same one: numbers in the cause, such as process ids and bytes, do not count."""

    step: int
    role: str
    rank: int
    method: str
    cause: str

    @staticmethod
    def of(error: WorkerError, step: int) -> Failure:
        return Failure(step, error.role, error.rank, error.method, re.sub(r"\d+", "#", error.cause))


class Restarts:
    """How often a run may be begun again, and whether it makes sense."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._failures: list[Failure] = []

    @property
    def number(self) -> int:
        """Of the restart that follows the last failure, from 1."""
        return len(self._failures)

    def refusal(self, failure: Failure) -> str | None:
        """Notes a failure; why the run ends with it, or None where it is begun again."""
        self._failures.append(failure)
        if self.number > self._most:
            return f"trainer.max_restarts={self._most} are used up"
        last = self._failures[-SAME_FAILURES:]
        if len(last) == SAME_FAILURES and len(set(last)) == 1:
            return f"it failed {SAME_FAILURES} times in the same way at step {failure.step}, so a restart does not help"
        return None
