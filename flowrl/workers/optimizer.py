"""One optimizer step of a role: learning rate, clipping, and the decision, the same on all ranks, whether to take it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel  # type: ignore[import-untyped]
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # type: ignore[import-untyped]
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # type: ignore[import-untyped]
from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-untyped]

from flowrl.config.schema import OptimConfig
from flowrl.workers.megatron_private_optimizer import OptimizerShard, optimizer_shards

logger = logging.getLogger(__name__)


def learning_rate(step: int, config: OptimConfig, total_steps: int) -> float:
    """Rate of optimizer step 1, 2, ... `total_steps`.

    Linear warm-up: step s of `warmup_steps` has s / warmup_steps of the peak, so none is a silent no-op. After it the
    schedule starts at the peak and reaches `min_lr` after the last step.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - 1 - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.lr + (config.min_lr - config.lr) * progress
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class StepResult:
    """What became of a step. `grad_norm` is before clipping and not finite where the step was `skipped`; `taken` is
    False for a skipped step and for a gradient that is exactly zero."""

    grad_norm: float
    lr: float
    taken: bool
    skipped: bool


class Optimizer:
    """AdamW over a model's parameters, in Megatron-core's plain or distributed form."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        parameters: Mapping[str, Any],
        groups: ProcessGroupCollection,
        config: OptimConfig,
        *,
        dtype: torch.dtype,
        distributed: bool,
        total_steps: int,
    ) -> None:
        """Collective over the default group: every rank builds its optimizer at the same moment.

        `chunks`: the model on this rank; `parameters`: its parameters by the names that reports give them.
        """
        self._chunks = list(chunks)
        self._parameters = parameters
        self._groups = groups
        self._config = config
        self._total_steps = total_steps
        self._step = 0
        self._taken = 0
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed,
        )
        self._optimizer = get_megatron_optimizer(
            settings, self._chunks, use_gloo_process_groups=False, pg_collection=groups
        )

    def zero_grad(self) -> None:
        """Forget gradients before a mini-batch."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def states(self) -> Iterator[torch.Tensor]:
        """Moments and, where the model's weights are rounded ones, the exact weights; made with the first step."""
        for part in self._optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def num_steps(self) -> tuple[int, int]:
        """How many steps the schedule has gone, and how many of them moved the weights."""
        return self._step, self._taken

    def shards(self) -> list[OptimizerShard]:
        """What this rank steps of each parameter. Moments are made, at zero, where no step has made them yet."""
        return list(optimizer_shards(self._optimizer))

    def resume(self, num_steps: int, num_taken: int) -> None:
        """Go on after so many steps of the schedule and so many that moved the weights; moments are set by the caller."""
        self._step, self._taken = num_steps, num_taken
        for shard in self.shards():
            # A number of its own for each: torch's AdamW counts it up in place, once per parameter.
            shard.state["step"] = torch.full_like(shard.state["step"], num_taken)

    @torch.no_grad()
    def step(self) -> StepResult:
        """Take the step that the accumulated gradients ask for.

        A gradient norm that is not finite skips it on all ranks: weights and moments stay as they are, bit for bit. A
        gradient that is exactly zero says nothing, so moments of earlier steps do not move the weights either. The
        schedule goes on in every case.
        """
        self._step += 1
        lr = learning_rate(self._step, self._config, self._total_steps)
        # Megatron-core's own step() lets a non-finite norm through for fp32 weights; hence its parts, in its order.
        self._optimizer.prepare_grads()
        # Data-parallel ranks hold equal reduced gradients, model-parallel ranks sum their squares: one number for all.
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            self._report_bad_gradient(grad_norm)
            return StepResult(grad_norm, lr, taken=False, skipped=True)
        if grad_norm == 0.0:
            return StepResult(grad_norm, lr, taken=False, skipped=False)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        if self._config.clip_grad > 0:
            for part in self._optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self._config.clip_grad, grad_norm)
        self._optimizer.step_with_ready_grads()
        self._taken += 1
        return StepResult(grad_norm, lr, taken=True, skipped=False)

    def _report_bad_gradient(self, grad_norm: float) -> None:
        """Log the first parameter, over all ranks, whose gradient is not finite."""
        bad = [name for name, p in self._parameters.items() if not torch.isfinite(p.main_grad).all()]
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, bad[0] if bad else None)
        rank = next((rank for rank, name in enumerate(found) if name), None)
        where = "no single parameter" if rank is None else f"{found[rank]} on rank {rank}"
        if dist.get_rank() == 0:
            logger.warning(
                "optimizer step %d skipped on all ranks: gradient norm is %s; first bad gradient: %s",
                self._step, grad_norm, where,
            )  # fmt: skip
