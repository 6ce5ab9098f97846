"""One call of a method on the ranks of a pool, and what is left of it in the driver's timeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowrl.single_controller.device_memory import DeviceMemory
from flowrl.single_controller.process import Answer

if TYPE_CHECKING:
    from flowrl.single_controller.pool import ResourcePool

PROCESS = "process"
"""Stands for the role in calls that belong to a pool itself."""


@dataclass(frozen=True)
class Span:
    """One finished call as the driver's timeline shows it: times of the slowest rank, seconds since the epoch, and on
    GPUs the worst of all ranks' memory."""

    phase: str | None
    step: int | None
    role: str
    method: str
    start: float
    end: float
    memory: DeviceMemory | None = None


@dataclass(eq=False)
class Call:
    """One method running on some ranks of a pool. `linked`: names of the pools whose ranks it meets in collectives, where
    it is half of a paired call."""

    pool: ResourcePool
    role: str
    method: str
    phase: str | None
    step: int | None
    refs: dict[int, Any]
    linked: frozenset[str] = frozenset()
    answers: dict[int, Answer] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self.refs)

    @property
    def starts(self) -> bool:
        """Whether processes start or a role is made."""
        return self.role == PROCESS or self.method == "__init__"

    @property
    def pending(self) -> list[int]:
        """Ranks that have not answered."""
        return [rank for rank in self.refs if rank not in self.answers]

    def span(self) -> Span:
        slowest = max(self.answers.values(), key=lambda answer: answer.end - answer.start)
        memory = DeviceMemory.worst(answer.memory for answer in self.answers.values() if answer.memory is not None)
        return Span(self.phase, self.step, self.role, self.method, slowest.start, slowest.end, memory)
