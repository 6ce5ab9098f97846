"""Megatron-core's own move between two of its models, as a baseline. Read in Megatron-core 0.16.1."""

from __future__ import annotations

import importlib
import time
from typing import Any

import torch


class MegatronRefit:
    """`swap_model_weights` from the trainer's model to one of the generation layout; no vLLM is involved."""

    name = "megatron_refit"

    def __init__(self, source: Any, target: Any, device: torch.device) -> None:
        self._source, self._target = source, target
        self._method = "nccl" if device.type == "cuda" else "gloo"
        self._swap = importlib.import_module("megatron.core.resharding.refit").swap_model_weights

    def plan(self) -> None:
        """Make the plan that moves reuse. Collective."""
        resharding = importlib.import_module("megatron.core.resharding")
        self._target._cached_reshard_plan = resharding.build_centralized_reshard_plan(self._source, self._target)

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Seconds of the whole move on this rank. Collective."""
        start = time.perf_counter()
        self._swap(self._source, self._target, self._method)
        if self._method == "nccl":
            torch.cuda.synchronize()
        return {"refit": time.perf_counter() - start}
