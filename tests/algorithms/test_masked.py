from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms import length_mask, masked_mean, row_weights, whiten

GOLDEN = [("token-mean", 1.75), ("seq-mean-token-mean", 2.5), ("seq-mean-token-sum", 3.5), ("sum-norm", 0.4375)]


def aggregate(rows: list[list[float]], aggregation: str, num_tokens: int, num_rows: int) -> float:
    weights = row_weights(
        torch.tensor([len(row) for row in rows]), aggregation, num_tokens=num_tokens, num_rows=num_rows, max_tokens=8
    )
    return sum(float(weight) * sum(row) for weight, row in zip(weights, rows, strict=True))


@pytest.mark.parametrize(("aggregation", "expected"), GOLDEN)
def test_aggregations_give_the_golden_numbers(aggregation: str, expected: float) -> None:
    """ALG-01: each aggregation is a function of the global mini-batch."""
    assert aggregate([[4.0], [1.0, 1.0, 1.0]], aggregation, 4, 2) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregation", [name for name, _ in GOLDEN])
@given(lengths=st.lists(st.integers(0, 8), min_size=1, max_size=12), cuts=st.sets(st.integers(1, 11)))
@settings(max_examples=30, deadline=None)
def test_loss_does_not_depend_on_how_the_minibatch_is_cut(aggregation: str, lengths: list[int], cuts: set[int]) -> None:
    """ALG-01: micro-batches and ranks add up to the whole, for any cut into parts (empty ones too)."""
    rows = [[float(7 * i + j) for j in range(length)] for i, length in enumerate(lengths)]
    whole = aggregate(rows, aggregation, sum(lengths), len(rows))
    bounds = [0, *sorted(cuts), len(rows) + 12]
    parts = [rows[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    summed = sum(aggregate(part, aggregation, sum(lengths), len(rows)) for part in parts)
    assert summed == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("aggregation", [name for name, _ in GOLDEN])
def test_empty_rows_weigh_nothing_even_when_all_are_empty(aggregation: str) -> None:
    """REW-06: no division by zero, loss 0."""
    weights = row_weights(torch.tensor([0, 0]), aggregation, num_tokens=0, num_rows=2, max_tokens=8)
    assert weights.tolist() == [0.0, 0.0]
    assert row_weights(torch.tensor([0, 3]), aggregation, num_tokens=3, num_rows=2, max_tokens=8)[0] == 0.0


def test_wrong_counts_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="5 tokens, more than the mini-batch's num_tokens=4"):
        row_weights(torch.tensor([2, 3]), "token-mean", num_tokens=4, num_rows=2, max_tokens=8)
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        row_weights(torch.tensor([2]), "mean", num_tokens=2, num_rows=1, max_tokens=8)


def test_mask_is_the_generated_length_and_not_the_first_end_token() -> None:
    """MSK-01: a response cut at the limit has no end token; the end token that was produced counts."""
    assert length_mask(torch.tensor([2, 3, 0]), 4).int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"lengths must lie in 0\.\.4, got 1\.\.5"):
        length_mask(torch.tensor([1, 5]), 4)


def test_masked_mean_ignores_what_is_outside_even_nan() -> None:
    x = torch.tensor([1.0, 3.0, float("nan")], requires_grad=True)
    mean = masked_mean(x, torch.tensor([True, True, False]))
    mean.backward()
    assert mean.item() == 2.0
    assert x.grad is not None and x.grad.tolist() == [0.5, 0.5, 0.0]
    assert masked_mean(x, torch.zeros(3, dtype=torch.bool)).item() == 0.0


def test_whitening_gives_the_golden_numbers() -> None:
    x = torch.tensor([[1.0, 99.0], [3.0, float("nan")]])
    mask = torch.tensor([[True, False], [True, False]])
    assert torch.allclose(whiten(x, mask), torch.tensor([[-0.70711, 0.0], [0.70711, 0.0]]), atol=1e-5)


@pytest.mark.parametrize("kept", [[], [5.0], [0.1 + 0.2] * 7])
def test_whitening_without_spread_is_exactly_zero(kept: list[float]) -> None:
    x = torch.tensor([*kept, 1e9])
    mask = torch.tensor([*[True] * len(kept), False])
    assert whiten(x, mask).tolist() == [0.0] * (len(kept) + 1)


def test_whitening_does_not_depend_on_row_order() -> None:
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(64, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(whiten(x, mask)[order], whiten(x[order], mask[order]), rtol=0, atol=1e-7)


def test_shapes_and_float_masks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x \[2\], mask \[1\]"):
        masked_mean(torch.zeros(2), torch.ones(1, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask must be torch.bool"):
        whiten(torch.zeros(2), torch.ones(2))
