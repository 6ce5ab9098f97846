"""Packed rows give what each row alone gives, in numbers and in gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.workers.attention import CausalAttention, attention, prepare, turned
from flowrl.workers.packed import MAX_PADDING, PackedRows, plan_blocks

CPU = torch.device("cpu")
HEADS, GROUPS, SIZE = 4, 2, 8
FREQUENCIES = 0.5 ** torch.arange(SIZE // 2, dtype=torch.float32)


def packed(lengths: list[int]) -> PackedRows:
    rows = PackedRows(lengths, CPU)
    rows.turn(FREQUENCIES, torch.float32)
    return rows


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_blocks_hold_every_row_once_with_little_padding(lengths: list[int]) -> None:
    for order in (lengths, sorted(lengths, reverse=True)):
        blocks = plan_blocks(order)
        assert [row for block in blocks for row in block] == list(range(len(order)))
        for block in blocks:
            own = [order[row] for row in block]
            assert len(own) == 1 or max(own) * len(own) <= MAX_PADDING * sum(own)


def test_rows_of_one_length_are_one_block_without_copies() -> None:
    assert [block.places for block in PackedRows([7] * 5, CPU).blocks] == [None]


@pytest.mark.parametrize("lengths", [[5], [4, 4], [9, 8, 2, 1, 1], [1, 6, 3]])
def test_attention_within_packed_rows_is_that_of_each_row_alone(lengths: list[int]) -> None:
    """Rotary embeddings begin anew in every row; fewer key/value heads than query heads; gradients too."""
    torch.manual_seed(0)
    total = sum(lengths)
    inputs = [torch.randn(total, heads, SIZE, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    weight = torch.randn(total, HEADS * SIZE)
    rows = packed(lengths)
    found = CausalAttention()(*(x[:, None] for x in inputs), packed_seq_params=rows)
    gradients = torch.autograd.grad((found[:, 0] * weight).sum(), inputs)
    expected = torch.cat([alone(*(x[a:b] for x in inputs)) for a, b in pairwise(rows.starts)])
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(found[:, 0], expected)
    for left, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(left, right)


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One row by the definition: complex rotations, one head at a time."""
    turns = torch.exp(1j * torch.arange(len(query))[:, None] * FREQUENCIES)
    columns = []
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        q, k = (torch.complex(*x.chunk(2, -1)) * turns for x in (query[:, head], key[:, group]))
        scores = (q @ k.conj().t()).real / SIZE**0.5
        mask = torch.ones_like(scores, dtype=torch.bool).triu(1)
        columns.append(scores.masked_fill(mask, float("-inf")).softmax(-1) @ value[:, group])
    return torch.cat(columns, dim=-1)


def test_padding_after_the_last_row_changes_nothing_before_it() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 8, HEADS, SIZE)
    whole = attention(q, k, v, packed([3, 5]))
    short = attention(q[:6], k[:6], v[:6], packed([3, 3]))
    torch.testing.assert_close(whole[:6], short)


def test_rotary_embeddings_can_be_compiled_with_the_heads_repeated() -> None:
    """What a GPU runs as one kernel: traced whole, with a number of tokens that changes."""
    compiled = torch.compile(prepare, backend="aot_eager", fullgraph=True)
    for lengths in ([3, 2], [4, 4, 1], [1]):
        rows = packed(lengths)
        q, k, v = (torch.randn(sum(lengths), heads, SIZE, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS))
        got, expected = (form(q, k, v, rows.cosines, rows.sines) for form in (compiled, prepare))
        for left, right in zip(got, expected, strict=True):
            torch.testing.assert_close(left, right)


def test_turning_keeps_lengths_and_relative_angles() -> None:
    x = torch.randn(6, HEADS, SIZE)
    rows = packed([6])
    out = turned(x, rows.cosines, rows.sines)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(out[0], x[0])
