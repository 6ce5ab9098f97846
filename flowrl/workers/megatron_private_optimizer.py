"""What Megatron-core's optimizers hold of each parameter on this rank. Read against Megatron-core 0.16.1.

Their own checkpoints are passed by: those know the layout of the optimizer that wrote them (mixtures cannot change the
number of expert groups, plain and distributed ones cannot be exchanged), and on torch's AdamW reading them counts the
steps of all parameters on one shared number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # type: ignore[import-untyped]
from megatron.core.optimizer.optimizer import (  # type: ignore[import-untyped]
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerShard:
    """Elements [start, stop) of a flattened parameter, which this rank's optimizer steps.

    `values`: [stop - start] or of the parameter's shape: the parameter itself or a view of it, or its exact copy in
    float32. `state`: torch's, of these elements. `is_cut`: replicas of this rank step the other elements, or all where
    this rank has no shard of the parameter; otherwise every replica steps all.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    is_cut: bool
    values: torch.Tensor
    state: dict[str, torch.Tensor]

    @property
    def is_exact_copy(self) -> bool:
        """Whether the values are more precise than the parameter."""
        return self.values.dtype != self.parameter.dtype


def optimizer_shards(chained: Any) -> Iterator[OptimizerShard]:
    """Of all parameters; moments that no step has made yet are made, at zero.

    Error: `ValueError` for an optimizer whose state is not that of torch's AdamW.
    """
    for part in chained.chained_optimizers:
        for parameter, start, stop, values in _steps(part):
            state = part.optimizer.state[values]
            if not state:
                state["step"] = torch.tensor(0.0)
                state |= {name: torch.zeros_like(values) for name in MOMENTS}
            if set(state) != {"step", *MOMENTS}:
                raise ValueError(
                    f"{type(part.optimizer).__name__} keeps {', '.join(sorted(state))} of a parameter; checkpoints are "
                    f"written of torch's AdamW, which keeps step, {' and '.join(MOMENTS)}"
                )
            cut = isinstance(part, DistributedOptimizer)
            yield OptimizerShard(parameter, start, stop, cut, values.detach(), state)


def _steps(part: Any) -> Iterator[tuple[torch.nn.Parameter, int, int, torch.Tensor]]:
    """(parameter of the model, the elements of it that this rank steps, what is stepped in their place)."""
    if isinstance(part, DistributedOptimizer):
        for models, shards in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for parameter, shard in _pairs(models, shards):
                span = part._get_model_param_range_map(parameter)["param"]
                yield parameter, span.start, span.end, shard
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameter, exact in _pairs(part.float16_groups, part.fp32_from_float16_groups):
            yield parameter, 0, parameter.numel(), exact
        for parameter, same in _pairs(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups):
            yield parameter, 0, parameter.numel(), same
    elif isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter.numel(), parameter
    else:
        raise ValueError(f"checkpoints of a {type(part).__name__} are not written")


def _pairs(models: Any, stepped: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    for of_model, of_optimizer in zip(models, stepped, strict=True):
        yield from zip(of_model, of_optimizer, strict=True)
