"""Changes to Megatron-core itself where Transformer Engine and apex are absent: what a mixture of experts needs, sums in a fixed
order, and norms that do not wait for a GPU at every parameter.

Read against Megatron-core 0.16.1. Where those libraries do the thing, it stays theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import utils  # type: ignore[import-untyped]
from megatron.core.optimizer import clip_grads  # type: ignore[import-untyped]
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # type: ignore[import-untyped]
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # type: ignore[import-untyped]

_make_norm = WrappedTorchNorm.__new__
_all_to_all = token_dispatcher.all_to_all
_gather = token_dispatcher.gather_from_sequence_parallel_region
_reduce_scatter = token_dispatcher.reduce_scatter_to_sequence_parallel_region
_unpermute = token_dispatcher.unpermute


def cure() -> None:
    """Apply all of them to this process. Idempotent."""
    # The router looks this name up without asking whether Transformer Engine gave it a meaning.
    vars(moe_utils).setdefault("te_general_gemm", None)
    WrappedTorchNorm.__new__ = _norm
    token_dispatcher.unpermute = _add_in_order
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm_of_all, _scale_all
    if not torch.cuda.is_available():
        token_dispatcher.all_to_all = _all_to_all_of_lists
        token_dispatcher.gather_from_sequence_parallel_region = _gather_unequal
        token_dispatcher.reduce_scatter_to_sequence_parallel_region = _reduce_scatter_unequal


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


def _norm_of_all(_: int, __: Any, lists: list[list[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
    """The norm [1] of all tensors together. Megatron-core's own waits for a GPU once for each of them."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().view(1), None


def _scale_all(_: int, __: Any, lists: list[list[torch.Tensor]], scale: float) -> None:
    """Multiply the tensors in place: clipping gives the same list as source and as target."""
    torch._foreach_mul_(lists[1], scale)


def _add_in_order(
    rows: torch.Tensor, tokens: torch.Tensor, restore_shape: torch.Size, probs: torch.Tensor | None = None, **how: Any
) -> torch.Tensor:
    """Each token's rows, one of each of its k experts, added in the order of experts and rounded once: [T, h].

    `rows` [T k, h], one expert's after another's, are those of the tokens `tokens` [T k]. On a GPU Megatron-core adds them by atomics,
    in another order each time, so that the same pass would give other log-probs.
    """
    count, hidden = restore_shape
    others_do = probs is not None or how.get("drop_and_pad") or how.get("fused")
    if others_do or count == 0 or len(tokens) % count:
        added: torch.Tensor = _unpermute(rows, tokens, restore_shape, probs, **how)
        return added
    return rows.index_select(0, tokens.argsort(stable=True)).view(count, -1, hidden).sum(1)


def _list(sizes: torch.Tensor | Sequence[int] | None) -> Sequence[int] | None:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _all_to_all_of_lists(group: Any, values: torch.Tensor, *splits: Any) -> torch.Tensor:
    """Counts as lists: on a CPU the dispatcher hands over tensors, which torch takes on CUDA only."""
    moved: torch.Tensor = _all_to_all(group, values, *map(_list, splits))
    return moved


def _collect(values: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Parts of all ranks, `sizes[r]` rows of rank r, one below the other on every rank."""
    world = len(sizes)
    out = values.new_empty(sum(sizes), *values.shape[1:])
    everywhere = values.unsqueeze(0).expand(world, *values.shape).reshape(-1, *values.shape[1:])
    dist.all_to_all_single(out, everywhere, list(sizes), [len(values)] * world, group=group)
    return out


def _sum_parts(values: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks of this rank's rows, where part r has `sizes[r]` rows."""
    world, mine = len(sizes), sizes[group.rank()]
    parts = values.new_empty(world * mine, *values.shape[1:])
    dist.all_to_all_single(parts, values.contiguous(), [mine] * world, list(sizes), group=group)
    return parts.view(world, mine, *values.shape[1:]).sum(0)


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, sizes: Sequence[int], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _collect(values, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _sum_parts(gradient, ctx.sizes, ctx.group), None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, sizes: Sequence[int], group: Any) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _sum_parts(values, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _collect(gradient, ctx.sizes, ctx.group), None, None


def _gather_unequal(
    values: torch.Tensor, *args: Any, group: Any, output_split_sizes: Any = None, **kwargs: Any
) -> torch.Tensor:
    """Megatron-core's gather along the sequence, also for parts of unequal length, which gloo has no all-gather for."""
    sizes = _list(output_split_sizes)
    found: torch.Tensor
    if sizes is None or group.size() == 1:
        found = _gather(values, *args, group=group, **kwargs)
    else:
        found = _Collect.apply(values, sizes, group)  # type: ignore[no-untyped-call]
    return found


def _reduce_scatter_unequal(
    values: torch.Tensor, *args: Any, group: Any, input_split_sizes: Any = None, **kwargs: Any
) -> torch.Tensor:
    """The reverse of `_gather_unequal`."""
    sizes = _list(input_split_sizes)
    found: torch.Tensor
    if sizes is None or group.size() == 1:
        found = _reduce_scatter(values, *args, group=group, **kwargs)
    else:
        found = _SumParts.apply(values, sizes, group)  # type: ignore[no-untyped-call]
    return found
