"""The tables that GPU kernels read, without a GPU: every byte once, and nothing that a kernel cannot do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from flowrl.resharding.copies_gpu import Addresses  # noqa: E402
from flowrl.resharding.copy_boxes import FLAT_BYTES, Place, rows_of, tiles_of  # noqa: E402


@given(num_rows=st.lists(st.integers(1, 50), min_size=1, max_size=9), at_once=st.integers(1, 16))
def test_every_row_is_in_one_tile(num_rows: list[int], at_once: int) -> None:
    tiles = tiles_of(torch.tensor(num_rows), at_once).tolist()
    rows = [(box, row) for box, first in tiles for row in range(first, min(first + at_once, num_rows[box]))]
    assert rows == [(box, row) for box, count in enumerate(num_rows) for row in range(count)]


@pytest.mark.parametrize("elements", [8, 4096, 70_000 // 8 * 8])
def test_what_lies_together_is_cut_into_rows(elements: int) -> None:
    source, target = torch.zeros(elements, dtype=torch.bfloat16), torch.zeros(elements, dtype=torch.bfloat16)
    position = 0
    for start_of_target, start_of_source, rows, words, *strides in rows_of(
        (elements,), 2, Place.of(target), Place.of(source)
    ):
        assert start_of_target == start_of_source == position
        assert strides == [words, words] and words * 4 <= FLAT_BYTES
        position += rows * words * 4
    assert position == target.nbytes


def test_columns_are_one_box() -> None:
    source, target = torch.zeros(6, 64), torch.zeros(6, 32)
    assert rows_of((6, 32), 4, Place.of(target), Place.of(source[:, 32:])) == [(0, 0, 6, 32, 32, 64)]


def test_what_is_in_a_buffer_counts_from_its_beginning() -> None:
    source, buffer = torch.zeros(6, 64), Place((32, 1), 4096, 0)
    assert rows_of((6, 32), 4, buffer, Place.of(source[:, 32:])) == [(4096, 0, 6, 32, 32, 64)]
    assert rows_of((6, 32), 4, Place.of(source[:, 32:]), buffer) == [(0, 4096, 6, 32, 64, 32)]
    assert rows_of((6, 32), 4, Place((32, 1), 4100, 0), Place.of(source)) == []


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(9)[1:], torch.zeros(8)),
        (torch.zeros(7), torch.zeros(7)),
        (torch.zeros(8, 4).t(), torch.zeros(4, 8)),
        (torch.zeros(0), torch.zeros(0)),
    ],
    ids=["start", "length", "strides", "nothing"],
)
def test_what_the_kernel_cannot_copy_is_left_out(target: torch.Tensor, source: torch.Tensor) -> None:
    assert rows_of(target.shape, 4, Place.of(target), Place.of(source)) == []


def test_addresses_follow_a_storage_that_moves() -> None:
    whole = torch.arange(64, dtype=torch.uint8)
    part = whole[16:]
    table = Addresses(torch.tensor([[0, 7], [32, 8]]), [whole, part], torch.tensor([[1], [0]]), slice(1))
    assert table.now().tolist() == [[part.data_ptr(), 7], [whole.data_ptr() + 32, 8]]
    whole.untyped_storage().resize_(0)
    keep = torch.zeros(1 << 16, dtype=torch.uint8)
    whole.untyped_storage().resize_(64)
    assert table.now().tolist() == [[part.data_ptr(), 7], [whole.data_ptr() + 32, 8]] and len(keep)
    second = Addresses(torch.tensor([[7, 0, 3], [8, 32, 4]]), [whole, part], torch.tensor([[1], [0]]), slice(1, 2))
    assert second.now().tolist() == [[7, part.data_ptr(), 3], [8, whole.data_ptr() + 32, 4]]
