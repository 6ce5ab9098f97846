"""Seconds of a step by phase, from what the workers report and what the driver does itself."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from flowrl.single_controller import Cluster, DeviceMemory, Span

PHASES: dict[tuple[str, str], str] = {
    ("rollout", "generate"): "generate", ("rollout", "receive_weights"): "reshard", ("rollout", "sleep"): "sleep",
    ("rollout", "wake"): "wake", ("actor", "log_probs"): "log_probs", ("actor", "update"): "update_actor",
    ("actor", "export"): "export", ("actor", "save_state"): "save", ("actor", "finish_save"): "save",
    ("critic", "save_state"): "save", ("critic", "finish_save"): "save", ("actor", "offload"): "offload", ("actor", "reload"): "reload",
    ("actor", "send_weights"): "reshard", ("critic", "offload"): "offload", ("critic", "reload"): "reload",
    ("reference", "offload"): "offload", ("reference", "reload"): "reload", ("critic", "values"): "values",
    ("critic", "update"): "update_critic", ("reference", "log_probs"): "reference",
}  # fmt: skip
"""Name of the phase that a call makes up; a call of a role that is not listed is its own phase, `role_method`."""


def phase_of(role: str, method: str) -> str:
    """The phase under which a call is timed and named in errors."""
    return PHASES.get((role, method), f"{role}_{method}")


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals: overlapping calls count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def memory_ledger(spans: Iterable[Span]) -> dict[str, float]:
    """`memory/<phase>/...` in bytes, of the worst rank and call of each phase, as `DeviceMemory` explains them."""
    by_phase: dict[str, list[DeviceMemory]] = defaultdict(list)
    for span in spans:
        if span.memory is not None:
            by_phase[span.phase or phase_of(span.role, span.method)].append(span.memory)
    ledger: dict[str, float] = {}
    for phase, found in by_phase.items():
        worst = DeviceMemory.worst(found)
        assert worst is not None
        sizes = {"peak_bytes_max": worst.peak, "allocated_bytes_max": worst.allocated, "free_bytes_min": worst.free}
        sizes |= {"reserved_bytes_max": worst.reserved, "pinned_bytes_max": worst.pinned}
        ledger |= {f"memory/{phase}/{name}": float(size) for name, size in sizes.items()}
    return ledger


class PhaseClock:
    """Times the phases of a step. Calls are asynchronous, so their seconds come from the workers, not from the driver."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._own: dict[str, float] = defaultdict(float)
        self._started = time.monotonic()

    def start(self) -> None:
        """A step begins: what was timed before is dropped."""
        self._cluster.spans()
        self._own.clear()
        self._started = time.monotonic()

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """A phase of the driver's own: calls made inside belong to it, and its seconds are the block's wall time."""
        begun = time.monotonic()
        with self._cluster.phase(name, step):
            yield
        self._own[name] += time.monotonic() - begun

    def finish(self) -> tuple[dict[str, float], Sequence[Span]]:
        """`seconds/<phase>` of the step since `start` with `seconds/total`, on GPUs the memory of its phases, and the spans
        they come from."""
        total = time.monotonic() - self._started
        spans = self._cluster.spans()
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in spans:
            if span.phase not in self._own:
                intervals[phase_of(span.role, span.method)].append((span.start, span.end))
        seconds = {f"seconds/{name}": covered_seconds(times) for name, times in intervals.items()}
        seconds |= {f"seconds/{name}": value for name, value in self._own.items()}
        return {**seconds, **memory_ledger(spans), "seconds/total": total}, spans
