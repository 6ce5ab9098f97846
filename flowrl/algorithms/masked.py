"""Reductions over some of the elements; what lies outside a mask never takes part, not even as NaN times zero."""

from __future__ import annotations

import torch

from flowrl.algorithms.checks import check_dims, check_mask, check_same_shape

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "sum-norm")


def length_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Mask [B, width] bool of rows that hold `lengths` [B] elements each, left-aligned.

    The length is the number of generated tokens: a row that never produced an end token is not longer than it is, and
    an end token that was produced counts.
    """
    check_dims(1, lengths=lengths)
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > width):
        raise ValueError(f"lengths must lie in 0..{width}, got {int(lengths.min())}..{int(lengths.max())}")
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of `x` [...] where `mask` [...] bool holds; scalar. No element at all gives 0."""
    check_same_shape(x=x, mask=mask)
    check_mask(mask)
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def whiten(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale `x` [...] to mean 0 and sample deviation 1 over `mask` [...] bool; 0 outside the mask.

    One element, or elements that are all equal, give exactly 0: they hold no information about what is better.
    Computed in float64, so the order of rows does not show in float32.
    """
    check_same_shape(x=x, mask=mask)
    check_mask(mask)
    kept = x[mask]
    result = torch.zeros_like(x)
    if kept.numel() < 2 or bool(kept.max() == kept.min()):
        return result
    exact = kept.double()
    result[mask] = ((exact - exact.mean()) / (exact.std() + 1e-8)).to(x.dtype)
    return result


def row_weights(
    lengths: torch.Tensor, aggregation: str, *, num_tokens: int, num_rows: int, max_tokens: int
) -> torch.Tensor:
    """Weight [B] float32 that each token of a row carries, so that the loss is the plain weighted sum over tokens.

    `lengths` [B] are response tokens of these rows; `num_tokens` and `num_rows` count the *global mini-batch*, whatever
    part of it these rows are, so sums over micro-batches and ranks add up to the same loss however it is cut.
    Empty rows count in `num_rows` and weigh 0. `max_tokens` is the response limit.

    token-mean: 1 / num_tokens. seq-mean-token-mean: 1 / (num_rows * length). seq-mean-token-sum: 1 / num_rows.
    sum-norm: 1 / (num_rows * max_tokens) (Liu et al. 2025, `Understanding R1-Zero-like training`, section 3.2).
    Errors: `ValueError` for an unknown aggregation and for counts that are smaller than those of these rows.
    """
    check_dims(1, lengths=lengths)
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")
    here_rows, here_tokens = lengths.numel(), int(lengths.sum())
    # Rows of weight zero may be added to fill a rank, so only tokens are compared: those would be counted twice.
    if here_tokens > num_tokens:
        raise ValueError(
            f"{here_rows} rows hold {here_tokens} tokens, more than the mini-batch's num_tokens={num_tokens}"
        )
    if num_rows < 1 and here_tokens:
        raise ValueError(f"num_rows={num_rows} but there are {here_rows} rows")
    if aggregation == "sum-norm" and max_tokens < 1:
        raise ValueError(f"sum-norm divides by the response limit: max_tokens={max_tokens} must be at least 1")
    tokens = lengths.to(torch.float64)
    rows = float(max(num_rows, 1))
    if aggregation == "token-mean":
        weights = torch.full_like(tokens, 1.0 / max(num_tokens, 1))
    elif aggregation == "seq-mean-token-mean":
        weights = 1.0 / (rows * tokens.clamp(min=1))
    elif aggregation == "seq-mean-token-sum":
        weights = torch.full_like(tokens, 1.0 / rows)
    else:
        weights = torch.full_like(tokens, 1.0 / (rows * max_tokens))
    return torch.where(tokens > 0, weights, 0.0).to(torch.float32)
