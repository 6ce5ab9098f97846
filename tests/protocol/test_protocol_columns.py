"""Ragged and stored columns."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.protocol import LocalBlock, Ragged, Stored

rows_of_ints = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=7)


def ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows(rows, torch.int64)


def as_lists(column: Ragged) -> list[list[int]]:
    return [row.tolist() for row in column.rows()]


@given(rows_of_ints)
def test_rows_go_in_and_come_out(rows):
    assert as_lists(ragged(rows)) == rows
    assert ragged(rows).lengths.tolist() == [len(row) for row in rows]


@given(rows_of_ints)
def test_padding_and_cutting_are_inverse(rows):
    values, mask = ragged(rows).padded(pad_value=77)
    assert mask.sum().item() == sum(map(len, rows)) and bool((values[~mask] == 77).all())
    assert as_lists(Ragged.from_padded(values, ragged(rows).lengths)) == rows


@given(rows_of_ints, st.data())
def test_select_takes_rows_in_the_given_order(rows, data):
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    assert as_lists(ragged(rows).select(indices)) == [rows[i] for i in indices]


@given(st.lists(rows_of_ints.filter(bool), min_size=1, max_size=4), st.data())
def test_stored_rows_are_index_arithmetic_over_blocks(blocks, data):
    """Any chain of select and concat equals the same chain on plain lists, and pickling keeps it."""
    flat = [row for block in blocks for row in block]
    stored = Stored.concat([Stored.whole(LocalBlock(ragged(block))) for block in blocks])
    picks = data.draw(st.lists(st.integers(0, len(flat) - 1), min_size=1, max_size=9))
    chosen = stored.select(torch.tensor(picks))
    again = Stored.concat([chosen, stored])
    expected = [flat[i] for i in picks] + flat
    assert as_lists(again.load()) == expected
    assert again.lengths.tolist() == [len(row) for row in expected]
    assert as_lists(pickle.loads(pickle.dumps(chosen)).load()) == [flat[i] for i in picks]
    assert sum(block.num_rows for block in again.blocks) <= len(flat), "shared blocks are kept once"


def test_blocks_that_no_row_needs_are_let_go():
    stored = Stored.concat([Stored.whole(LocalBlock(ragged([[i]]))) for i in range(5)])
    chosen = stored.select(torch.tensor([3, 1]))
    assert len(chosen.blocks) == 2 and as_lists(chosen.load()) == [[3], [1]]


def test_a_run_of_rows_is_a_view():
    column = ragged([[1, 2], [3], [4, 5]])
    assert column.select([1, 2]).values.data_ptr() == column.values[2:].data_ptr()


@pytest.mark.parametrize(
    ("values", "offsets", "words"),
    [
        (torch.arange(3), torch.tensor([0, 2]), "from 0 to 3"),
        (torch.arange(3), torch.tensor([0, 3, 2, 3]), "must not decrease"),
        (torch.arange(3), torch.tensor([0.0, 3.0]), "int64"),
    ],
)
def test_wrong_offsets_are_refused(values, offsets, words):
    with pytest.raises(ValueError, match=words):
        Ragged(values, offsets)


def test_empty_rows_do_not_change_the_dtype():
    assert Ragged.from_rows([[], [1]]).values.dtype == torch.int64
    assert Ragged.from_rows([torch.empty(0), torch.ones(1)]).values.dtype == torch.float32


def test_rows_of_different_numbers_get_a_type_that_takes_all() -> None:
    assert Ragged.from_rows([[1], [0.5, 0.75]]).values.tolist() == [1, 0.5, 0.75]
    assert Ragged.from_rows([torch.tensor([1]), torch.tensor([0.5])]).values.tolist() == [1, 0.5]
    assert Ragged.from_rows([[True], [5], []]).values.tolist() == [1, 5]
    assert Ragged.from_rows([[1], [2]], dtype=torch.float64).values.dtype == torch.float64
    for rows, dtype in (([[0.5]], torch.int64), ([[1, 2]], torch.bool), ([torch.tensor([0.5])], torch.int32)):
        with pytest.raises(ValueError, match="would lose what they are"):
            Ragged.from_rows(rows, dtype=dtype)
