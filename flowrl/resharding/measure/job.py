"""What the benchmark's command asks of its processes; nothing heavy is imported for it."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.ranks import ParallelSizes

PRELOAD = (
    "flowrl.workers.measured_moves",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader.utils",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3_moe",
)
"""Modules that the server imports before it forks the processes."""

RUN = "flowrl.workers.measured_moves:run_job"
"""What a process does with a `Job`."""


@dataclass(frozen=True)
class Job:
    """One pair of layouts. `folder` has the model's config; with `coded` its weights are coded by index, else read."""

    model: str
    shape: ModelShape
    folder: str
    coded: bool
    world: int
    train: ParallelSizes
    rollout: ParallelSizes
    train_text: str
    rollout_text: str
    engines: tuple[str, ...]
    repeat: int
    dtype: str
    device: str
