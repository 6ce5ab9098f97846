"""The figures of one step: gathered while calls are still running, read once at the step's end."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.protocol import DataProto, Metric
from flowrl.protocol.metric import merge_metrics

SKIPPED = "/skipped_steps"


class TrainingFailed(RuntimeError):
    """The run cannot go on although every process is alive; the message says why and what to change."""


class StepReport:
    """Collects metrics of a step. Tables may be pending: nothing is waited for before `take`.

    `skipped_in_a_row`: optimizer steps without a finite gradient up to now, by metric.
    """

    def __init__(self, max_skipped_steps: int, skipped_in_a_row: Mapping[str, int] | None = None) -> None:
        self._max_skipped_steps = max_skipped_steps
        self.skipped_in_a_row = dict(skipped_in_a_row or {})
        self._tables: list[DataProto] = []
        self._values: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Finished figures, by name."""
        self._values.update(values)

    def note(self, table: DataProto) -> None:
        """A table, maybe pending, whose metrics belong to the step."""
        self._tables.append(table)

    def take(self, step: int) -> dict[str, float]:
        """Waits for the noted tables and returns every figure of the step; begins anew.

        Errors: `TrainingFailed` when optimizer steps with non-finite gradients came `trainer.max_skipped_steps` times
        in a row, across steps too.
        """
        tables, self._tables = self._tables, []
        values, self._values = self._values, {}
        for table in tables:
            self._count_skipped(table.metrics, step)
        merged = merge_metrics(table.metrics for table in tables)
        return {name: metric.value for name, metric in merged.items()} | values

    def _count_skipped(self, metrics: Mapping[str, Metric], step: int) -> None:
        for name, metric in metrics.items():
            if not name.endswith(SKIPPED):
                continue
            in_a_row = self.skipped_in_a_row.get(name, 0) + 1 if metric.value else 0
            self.skipped_in_a_row[name] = in_a_row
            if in_a_row >= self._max_skipped_steps:
                raise TrainingFailed(
                    f"step {step}: {in_a_row} optimizer steps in a row had non-finite gradients ({name}), the limit of "
                    f"trainer.max_skipped_steps={self._max_skipped_steps}; weights are those before the first of them. "
                    "Lower the learning rate, look at the rewards, or use float32; the worker logs name the tensor"
                )
