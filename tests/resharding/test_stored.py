"""Who writes what into a checkpoint, as pure arithmetic: every element once, from where it lies."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import DENSE, MIXTRAL, MOE, TIED

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.families import ExpertShard, Parameter, Piece, hf_tensors, stage_parameters, train_stage_layers
from flowrl.resharding.layouts import train_places
from flowrl.resharding.ranks import ParallelSizes, TrainPlace
from flowrl.resharding.stored import StoredBox, origins, provided, stored_boxes

CASES = [
    (DENSE, 1, ParallelSizes()),
    (DENSE, 4, ParallelSizes(tp=2)),
    (DENSE, 8, ParallelSizes(tp=4, pp=2)),
    (DENSE, 4, ParallelSizes(pp=2, vpp=2)),
    (TIED, 4, ParallelSizes(pp=2)),
    (TIED, 2, ParallelSizes(pp=2, first_stage_layers=2)),
    (MOE, 2, ParallelSizes(tp=2)),
    (MOE, 4, ParallelSizes(ep=2)),
    (MOE, 4, ParallelSizes(tp=2, ep=2)),
    (MOE, 8, ParallelSizes(tp=2, ep=2, etp=2)),
    (MIXTRAL, 8, ParallelSizes(tp=2, ep=4, pp=1)),
]


def held(shape: ModelShape, sizes: ParallelSizes, at: TrainPlace) -> tuple[Parameter, ...]:
    return stage_parameters(
        shape, tp=sizes.tp, tp_rank=at.tp, layers=train_stage_layers(shape.num_layers, sizes)[at.pp], first=at.pp == 0,
        last=at.pp == sizes.pp - 1, shard=ExpertShard(sizes.ep, at.ep, sizes.etp, at.etp),
    )  # fmt: skip


def local_values(parameter: Parameter, whole: dict[str, np.ndarray]) -> np.ndarray:
    """The parameter as a rank holds it, padding -1, flattened."""
    values = np.full(parameter.shape, -1.0)
    for piece in parameter.pieces:
        values[tuple(slice(*span) for span in piece.target)] = whole[piece.tensor][
            tuple(slice(*span) for span in piece.source)
        ]
    return values.reshape(-1)


def cut(number: int, of: int, count: int) -> tuple[int, int]:
    """Share `number` of a run of `count` elements, at bounds that fall inside rows."""
    bounds = [round(count * i / of) for i in range(of + 1)]
    return list(pairwise(bounds))[number]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize(("shape", "world", "sizes"), CASES)
def test_every_element_of_the_model_is_written_once_from_where_it_lies(
    shape: ModelShape, world: int, sizes: ParallelSizes, sharded: bool
) -> None:
    places = [place.train for place in train_places(world, sizes) if place.train is not None]
    found = origins((rank, held(shape, sizes, at)) for rank, at in enumerate(places))
    start = iter(range(0, 10**9, 10**6))
    whole = {t.name: np.arange(math.prod(t.shape)).reshape(t.shape) + next(start) for t in hf_tensors(shape)}
    written = {name: np.full(values.shape, -1.0) for name, values in whole.items()}
    for rank, at in enumerate(places):
        for parameter in held(shape, sizes, at):
            expert = ".local_experts." in parameter.name
            alone, together = provided(parameter, rank, places, found, expert=expert)
            flat = local_values(parameter, whole)
            low, high = 0, len(flat)
            if sharded:
                replica = at.edp if expert else at.dp
                low, high = cut(replica, world // (sizes.pp * (sizes.ep * sizes.etp if expert else sizes.tp)), high)
            for box in stored_boxes(together if sharded else alone, parameter.shape, low, high):
                assert low <= box.start and box.start + box.count <= high
                target = written[box.tensor][tuple(slice(*span) for span in box.box)]
                assert (target == -1).all(), f"{box} is written twice"
                target[...] = flat[box.start : box.start + box.count].reshape(box.size)
    for name, values in whole.items():
        assert (written[name] == values).all(), name


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_a_run_of_a_flattened_parameter_is_at_most_three_boxes_of_a_tensor(
    rows: int, width: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, rows * width))
    stop = data.draw(st.integers(start, rows * width))
    piece = Piece("t", ((3, 3 + rows), (2, 2 + width)), ((0, rows), (0, width)))
    boxes = stored_boxes([piece], (rows, width), start, stop)
    assert len(boxes) <= 3
    elements = [
        (row - 3) * width + column - 2 for box in boxes for row in range(*box.box[0]) for column in range(*box.box[1])
    ]
    assert elements == list(range(start, stop))
    assert [box.start for box in boxes] == [elements[i] for i in np.cumsum([0, *(b.count for b in boxes)])[:-1]]


def test_elements_of_a_vector_are_one_box_and_padding_is_none() -> None:
    vector = Piece("norm", ((0, 6),), ((0, 6),))
    assert stored_boxes([vector], (6,), 2, 5) == [StoredBox("norm", ((2, 5),), 2)]
    embedding = Piece("embedding", ((4, 7), (0, 2)), ((0, 3), (0, 2)))
    assert stored_boxes([embedding], (8, 2), 6, 16) == []
