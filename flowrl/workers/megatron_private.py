"""Changes to Megatron-core itself, which a mixture of experts needs where Transformer Engine and apex are absent.

Read against Megatron-core 0.16.1. Each one has no effect where Megatron-core does the thing itself.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # type: ignore[import-untyped]
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # type: ignore[import-untyped]

_make_norm = WrappedTorchNorm.__new__
_all_to_all = token_dispatcher.all_to_all


def cure() -> None:
    """Apply all of them to this process. Idempotent."""
    # The router looks this name up without asking whether Transformer Engine gave it a meaning.
    vars(moe_utils).setdefault("te_general_gemm", None)
    WrappedTorchNorm.__new__ = _norm  # type: ignore[method-assign]
    token_dispatcher.all_to_all = _all_to_all_of_lists


def _norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """A norm over its part of the sequence, marked so that its gradients are summed over the parts.

    Megatron-core refuses torch's norms under sequence parallelism, because they lack that mark.
    """
    parallel = config.sequence_parallel
    config.sequence_parallel = False
    try:
        norm: torch.nn.Module = _make_norm(cls, config, *args, **kwargs)
    finally:
        config.sequence_parallel = parallel
    for parameter in norm.parameters():
        parameter.sequence_parallel = parallel  # type: ignore[attr-defined]
    return norm


def _all_to_all_of_lists(group: Any, values: torch.Tensor, *splits: Any) -> torch.Tensor:
    """Counts as lists: on a CPU the dispatcher hands over tensors, which torch takes on CUDA only."""
    lists = (split.tolist() if isinstance(split, torch.Tensor) else split for split in splits)
    moved: torch.Tensor = _all_to_all(group, values, *lists)
    return moved
