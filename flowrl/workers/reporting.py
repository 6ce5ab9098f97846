"""Metrics of a training pass, in a form that merges over replicas and mini-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowrl.protocol import Metric

if TYPE_CHECKING:
    from flowrl.workers.engine import TokenStats, TrainResult


def step_metrics(prefix: str, result: TrainResult, *, first_replica: bool) -> dict[str, Metric]:
    """Loss, gradient norm, learning rate and step counters of one mini-batch.

    Replicas weigh by their share of the tokens, so a loss that is a sum over replicas comes out whole, and a mean over
    mini-batches counts each of them once. Counters are reported by the first replica alone. A gradient norm that is not
    finite is left out: the counter of skipped steps tells of it.
    """
    step = result.step
    metrics = {
        f"{prefix}/loss": Metric.mean(result.loss, result.share),
        f"{prefix}/skipped_steps": Metric.sum(float(first_replica and step is not None and step.skipped)),
        f"{prefix}/optimizer_steps": Metric.sum(float(first_replica and step is not None and step.taken)),
    }
    if step is not None:
        metrics[f"{prefix}/lr"] = Metric.mean(step.lr * result.share, result.share)
        if not step.skipped:
            metrics[f"{prefix}/grad_norm"] = Metric.mean(step.grad_norm * result.share, result.share)
    return metrics


def token_metrics(
    stats: Mapping[str, TokenStats], num_tokens: int, names: Mapping[str, str], prefix: str
) -> dict[str, Metric]:
    """Means over response tokens, under their metric names; a name of its own with a slash is kept as it is."""
    shown = {name: names.get(name, name if "/" in name else f"{prefix}/{name}") for name in stats}
    return {shown[name]: Metric.mean(value.total, num_tokens) for name, value in stats.items()}
