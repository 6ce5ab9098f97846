"""Log-probs and entropy of tokens from hidden states and a vocabulary-sharded head, without ever holding all logits.

Legend: T tokens, h hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from flowrl.config.memory import LOGIT_CHUNK_ELEMENTS

MAX_CHUNK_ELEMENTS = LOGIT_CHUNK_ELEMENTS["cuda" if torch.cuda.is_available() else "cpu"]
"""Logits held at once. A GPU reads them as the product leaves them, 512 MiB of bfloat16; a CPU makes float32 of them."""

LEAST_LOGIT = -1.0e4
"""Stands for minus infinity relative to the largest logit: exp gives exactly 0, and products with 0 stay finite."""


def _shifted(logits: torch.Tensor, temperature: float, largest: torch.Tensor) -> torch.Tensor:
    """Logits / temperature in float32 less the largest of the whole vocabulary; what is masked or minus infinity becomes a
    finite least value."""
    return (logits.float() / temperature - largest[:, None]).clamp_(min=LEAST_LOGIT)


def _shard_logits(hidden: torch.Tensor, weight: torch.Tensor, first_id: int, num_valid: int) -> torch.Tensor:
    """Logits [T, V] of this rank's ids, in the weight's type; ids from `num_valid` on do not exist."""
    logits = hidden @ weight.t()
    valid = max(0, num_valid - first_id)
    if valid < logits.shape[1]:
        logits[:, valid:] = float("-inf")
    return logits


def _largest(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits.float() / temperature).amax(dim=-1)


def _local(targets: torch.Tensor, first_id: int, columns: int) -> torch.Tensor:
    """Columns of the ids [T]; -1 for those of other ranks."""
    return torch.where((targets >= first_id) & (targets < first_id + columns), targets - first_id, -1)


def _sums(logits: torch.Tensor, temperature: float, largest: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """[3, T]: sum of exponentials, the target's shifted logit where it is here, and the sum of both multiplied."""
    shifted = _shifted(logits, temperature, largest)
    exps = shifted.exp()
    target = torch.where(local >= 0, shifted.gather(-1, local.clamp(min=0)[:, None])[:, 0], 0.0)
    return torch.stack([exps.sum(-1), target, (exps * shifted).sum(-1)])


def _gradients(
    logits: torch.Tensor,
    temperature: float,
    local: torch.Tensor,
    entropy: torch.Tensor,
    largest: torch.Tensor,
    normaliser: torch.Tensor,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    log_all = _shifted(logits, temperature, largest) - normaliser[:, None]
    probs = log_all.exp()
    grad = torch.zeros_like(probs)
    if grad_log_probs is not None:
        is_target = local[:, None] == torch.arange(logits.shape[1], device=logits.device)
        grad = torch.where(is_target, grad_log_probs[:, None], 0.0) - probs * grad_log_probs[:, None]
    if grad_entropy is not None:
        grad = grad - grad_entropy[:, None] * probs * (log_all + entropy[:, None])
    return (grad / temperature).to(logits.dtype)


def _fused(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """One kernel on a GPU, where every operation of its own would read and write all logits once more; compiled for any
    number of tokens."""
    if not torch.cuda.is_available():
        return function
    compiled = torch.compile(function)

    def call(*arguments: Any) -> torch.Tensor:
        for tensor in arguments:
            if isinstance(tensor, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*arguments)

    return call


_fused_largest, _fused_sums, _fused_gradients = _fused(_largest), _fused(_sums), _fused(_gradients)


def shard_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_id: int,
    group: dist.ProcessGroup | None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy, largest logit and log normaliser (after subtracting the largest), each [T] float32.

    `logits` [T, V] are this rank's columns, of ids `first_id` on, before they are divided by `temperature`; `targets` [T] are
    global ids. Two reductions over `group`: a maximum, then one stacked sum.
    """
    largest = _fused_largest(logits, temperature)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = _fused_sums(logits, temperature, largest, _local(targets, first_id, logits.shape[1]))
    if group is not None:
        dist.all_reduce(sums, group=group)
    normaliser = sums[0].log()
    return sums[1] - normaliser, normaliser - sums[2] / sums[0], largest, normaliser


def logit_gradients(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_id: int,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Gradient [T, V] of this rank's logits, in their type; `saved` are entropy, largest logit and log normaliser, each [T].

    d log p_t / d x_j = [j = t] - p_j; d H / d x_j = -p_j (log p_j + H); both over `temperature`. Columns of probability 0
    get 0.
    """
    local = _local(targets, first_id, logits.shape[1])
    return _fused_gradients(logits, temperature, local, *saved, grad_log_probs, grad_entropy)


class _TokenOutputs(torch.autograd.Function):
    """Forward keeps three numbers per token; backward computes the logits of each chunk once more."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        first_id: int,
        num_valid: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for rows, ids in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
            logits = _shard_logits(rows, weight, first_id, num_valid)
            parts.append(torch.stack(shard_statistics(logits, ids, first_id, group, temperature)))
            # Else it would live on while the next chunk is made; the same below.
            del logits
        log_probs, entropy, largest, normaliser = torch.cat(parts, dim=1)
        ctx.save_for_backward(hidden, weight, targets, entropy, largest, normaliser)
        ctx.settings = (first_id, num_valid, temperature, chunk)
        ctx.set_materialize_grads(False)
        return log_probs, entropy.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, *saved = ctx.saved_tensors
        first_id, num_valid, temperature, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = _shard_logits(hidden[part], weight, first_id, num_valid)
            chunk_saved = (saved[0][part], saved[1][part], saved[2][part])
            outer = [None if g is None else g[part] for g in grads]
            grad = logit_gradients(logits, targets[part], first_id, chunk_saved, outer[0], outer[1], temperature)
            del logits
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
            del grad
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 6


def token_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    first_id: int,
    num_valid: int,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` and entropy, nats, each [T] float32, of softmax(hidden @ weight^T / temperature).

    hidden: [T, h], equal on all ranks of `group`; weight: [V, h], rows of the ids `first_id` to `first_id + V`;
    targets: [T] int64. Ids from `num_valid` on (padding, ids that the tokenizer does not know) have no probability.
    Gradients of `hidden` are this rank's share: the caller sums them over the group.
    """
    if len(targets) == 0:
        nothing = hidden.sum(-1).float() * weight.float().sum() * 0.0
        return nothing, nothing
    chunk = chunk_tokens or max(1, MAX_CHUNK_ELEMENTS // weight.shape[0])
    group = None if group is None or group.size() == 1 else group
    result: tuple[torch.Tensor, torch.Tensor] = _TokenOutputs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, first_id, num_valid, temperature, group, chunk
    )
    return result
