"""The arithmetic of a mixture of experts, over the weights as a loader wrote them."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


def mixture(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    local_numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over a token's experts e of weight * down_e(silu(gate_e x) * up_e x), over the experts that are here.

    hidden: [T, h]; gate_up: [E, 2 f, h] with the gate on top; down: [E, h, f]; weights and experts (global numbers):
    [T, k]; local_numbers: [experts of the model], the row of `gate_up` and `down` or -1; None where all are here.
    Returns [T, h].
    """
    numbers = experts.long() if local_numbers is None else local_numbers[experts.long()].long()
    chosen = numbers.flatten()
    # Choices sorted by expert: each expert multiplies its tokens at once. Those of other ranks (-1) come first.
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen + 1, minlength=len(gate_up) + 1).tolist()
    tokens = order // experts.shape[1]
    found = torch.zeros_like(hidden)
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            choice = order[start : start + count]
            rows = tokens[start : start + count]
            gate, up = linear(hidden[rows], gate_up[expert]).chunk(2, dim=-1)
            part = linear(silu(gate) * up, down[expert])
            found.index_add_(0, rows, part * weights.flatten()[choice, None].to(part.dtype))
            start += count
    return found
