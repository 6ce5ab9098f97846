"""What must travel, as integers: boxes, bounds, routes and buckets."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.families import Box, hf_tensors, stage_layers, stage_parameters
from flowrl.resharding.regions import (
    Route,
    bound_bytes,
    count_once,
    cut_buckets,
    cut_rows,
    disjoint,
    intersect,
    num_elements,
    plan_routes,
    slices_in,
    subtract,
    whole,
)

SHAPE = (5, 4)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    box = []
    for size in SHAPE:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return tuple(box)


def elements(*many: Box) -> list[tuple[int, ...]]:
    return [index for box in many for index in product(*(range(*interval) for interval in box))]


@given(boxes(), boxes())
def test_intersection_and_difference_partition_a_box(a: Box, b: Box) -> None:
    common = intersect(a, b)
    parts = subtract(a, b) + ([common] if common else [])
    assert sorted(elements(*parts)) == sorted(elements(a))
    assert set(elements(common) if common else []) == set(elements(a)) & set(elements(b))


@given(st.lists(boxes(), max_size=6))
def test_union_as_disjoint_boxes_has_every_element_once(many: list[Box]) -> None:
    assert sorted(elements(*disjoint(many))) == sorted(set(elements(*many)))


@given(boxes(), st.integers(1, 25))
def test_row_pieces_are_the_box_and_respect_the_limit(box: Box, limit: int) -> None:
    pieces = cut_rows(box, limit)
    assert elements(*pieces) == elements(box)
    row = num_elements(box) // (box[0][1] - box[0][0])
    assert all(num_elements(piece) <= max(limit, row) for piece in pieces)


def test_slices_are_relative_to_the_outer_box() -> None:
    assert slices_in(((3, 5), (1, 2)), ((2, 5), (1, 4))) == (slice(1, 3), slice(0, 1))


@given(st.lists(boxes(), min_size=1, max_size=4), st.lists(st.lists(boxes(), max_size=3), min_size=2, max_size=4))
def test_routes_bring_every_needed_element_once_from_a_holder(need: list[Box], hold: list[list[Box]]) -> None:
    hold[0] = [whole(SHAPE)]
    needed = [{"w": need if rank % 2 == 0 else need[:1]} for rank in range(len(hold))]
    held = [{"w": there} for there in hold]
    routes = plan_routes(needed, held)
    for rank in range(len(hold)):
        arriving = [route for route in routes if route.target == rank]
        assert sorted(elements(*(route.box for route in arriving))) == sorted(set(elements(*needed[rank]["w"])))
        for route in arriving:
            assert any(intersect(box, route.box) == route.box for box in held[route.source]["w"])
        travelling = sum(num_elements(route.box) for route in arriving if route.source != rank)
        assert 4 * travelling == bound_bytes(needed[rank], held[rank], 4)


@given(st.lists(st.lists(boxes(), max_size=3), min_size=1, max_size=4))
def test_counting_once_covers_a_tensor_exactly(hold: list[list[Box]]) -> None:
    held = [{"w": there} for there in [*hold, [whole(SHAPE)]]]
    counted = count_once({"w": SHAPE}, held)
    assert sorted(elements(*(box for part in counted for box in part.get("w", ())))) == elements(whole(SHAPE))


def test_an_element_that_nobody_holds_is_an_error_that_names_the_tensor() -> None:
    half: Box = ((0, 2), (0, 4))
    with pytest.raises(ValueError, match=r"rank 0 needs .* of w"):
        plan_routes([{"w": [whole(SHAPE)]}], [{"w": [half]}])
    with pytest.raises(ValueError, match=r"no training rank holds .* of w \[5, 4\]"):
        count_once({"w": SHAPE}, [{"w": [half]}])


@given(st.lists(st.tuples(boxes(), st.integers(0, 2), st.integers(0, 2)), max_size=12), st.integers(4, 64))
def test_buckets_keep_all_routes_and_bound_what_a_rank_sends_and_receives(
    many: list[tuple[Box, int, int]], limit: int
) -> None:
    routes = [Route(f"w{number}", *route) for number, route in enumerate(many)]
    buckets = cut_buckets(routes, 3, 4, limit)
    flat = [route for bucket in buckets for route in bucket]
    for route in routes:
        pieces = [piece.box for piece in flat if piece.tensor == route.tensor]
        assert sorted(elements(*pieces)) == sorted(elements(route.box))
    for bucket, rank in product(buckets, range(3)):
        for end in ("source", "target"):
            moved = [r for r in bucket if r.source != r.target and getattr(r, end) == rank]
            size = sum(4 * num_elements(route.box) for route in moved)
            assert size <= limit or len(moved) == 1


def dense(layers: int = 4, tied: bool = False) -> ModelShape:
    return ModelShape(
        "LlamaForCausalLM", layers, 64, 128, 8, 4, 8, 256, tied, 1e-6, 1e4, None, 64, False, False, None, ()
    )  # fmt: skip


def held_by(shape: ModelShape, tp: int, pp: int, world: int) -> list[dict[str, list[Box]]]:
    """Boxes of each training rank; tensor parallel fastest, then replicas, then stages."""
    replicas = world // (tp * pp)
    held: list[dict[str, list[Box]]] = []
    for rank in range(world):
        stage = rank // tp // replicas
        layers = stage_layers(shape.num_layers, pp)[stage]
        there: dict[str, list[Box]] = {}
        for parameter in stage_parameters(
            shape, tp=tp, tp_rank=rank % tp, layers=layers, first=stage == 0, last=stage == pp - 1
        ):
            for piece in parameter.pieces:
                there.setdefault(piece.tensor, []).append(piece.source)
        held.append(there)
    return held


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_training_ranks_hold_the_whole_model(layout: tuple[int, int]) -> None:
    shape = dense(tied=layout == (2, 2))
    held = held_by(shape, *layout, world=4)
    counted = count_once({tensor.name: tensor.shape for tensor in hf_tensors(shape)}, held)
    total = sum(num_elements(box) for part in counted for there in part.values() for box in there)
    assert total == shape.num_parameters


def test_same_layout_needs_nothing_and_larger_shards_need_what_is_missing() -> None:
    shape = dense()
    two, four = held_by(shape, 2, 1, 4), held_by(shape, 4, 1, 4)
    assert all(bound_bytes(mine, mine, 2) == 0 for mine in two)
    size = {tensor.name: num_elements(whole(tensor.shape)) for tensor in hf_tensors(shape)}
    split = sum(count for name, count in size.items() if "norm" not in name)
    # From quarters to halves: a quarter of every split tensor is missing, norms are everywhere.
    assert [bound_bytes(need, hold, 2) for need, hold in zip(two[:1], four[:1], strict=True)] == [2 * split // 4]
