"""Where a storage's bytes wait in host memory; the moves themselves are tested on GPUs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.workers.offload import Offload, plan_pieces, storages


@given(sizes=st.lists(st.integers(0, 70), max_size=8), chunk=st.integers(1, 32))
def test_every_byte_has_one_place_and_chunks_are_filled_in_order(sizes: list[int], chunk: int) -> None:
    pieces = plan_pieces(sizes, chunk)
    bytes_of = [(piece.storage, byte) for piece in pieces for byte in range(piece.start, piece.stop)]
    assert bytes_of == [(storage, byte) for storage, size in enumerate(sizes) for byte in range(size)]
    places = [(piece.chunk, piece.offset + byte) for piece in pieces for byte in range(piece.stop - piece.start)]
    assert places == [divmod(position, chunk) for position in range(sum(sizes))]


def test_views_of_one_storage_move_once() -> None:
    whole, other = torch.zeros(10), torch.ones(3)
    found = storages([whole[2:4], other, whole, torch.empty(0)], torch.device("cpu"))
    assert [storage.nbytes() for storage in found] == [40, 12]


def test_on_a_cpu_nothing_moves() -> None:
    weight = torch.arange(4.0)
    offload = Offload(weight.device)
    offload.leave([weight], [], [])
    offload.check("reading the weights")
    offload.back()
    offload.finish()
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0]
