"""What must travel, as integers: boxes, bounds, routes and buckets."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.families import Box, hf_tensors, stage_parameters, train_stage_layers
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.regions import (
    bound_bytes,
    disjoint,
    intersect,
    num_elements,
    same_elements,
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


@given(st.lists(boxes(), max_size=4), st.lists(boxes(), max_size=4))
def test_boxes_are_the_same_elements_however_they_are_cut(a: list[Box], b: list[Box]) -> None:
    assert same_elements(a, b) == (set(elements(*a)) == set(elements(*b)))
    assert same_elements(a, disjoint(a))


def test_slices_are_relative_to_the_outer_box() -> None:
    assert slices_in(((3, 5), (1, 2)), ((2, 5), (1, 4))) == (slice(1, 3), slice(0, 1))


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
        layers = train_stage_layers(shape.num_layers, ParallelSizes(pp=pp))[stage]
        there: dict[str, list[Box]] = {}
        for parameter in stage_parameters(
            shape, tp=tp, tp_rank=rank % tp, layers=layers, first=stage == 0, last=stage == pp - 1
        ):
            for piece in parameter.pieces:
                there.setdefault(piece.tensor, []).append(piece.source)
        held.append(there)
    return held


def test_same_layout_needs_nothing_and_larger_shards_need_what_is_missing() -> None:
    shape = dense()
    two, four = held_by(shape, 2, 1, 4), held_by(shape, 4, 1, 4)
    assert all(bound_bytes(mine, mine, 2) == 0 for mine in two)
    size = {tensor.name: num_elements(whole(tensor.shape)) for tensor in hf_tensors(shape)}
    split = sum(count for name, count in size.items() if "norm" not in name)
    # From quarters to halves: a quarter of every split tensor is missing, norms are everywhere.
    assert [bound_bytes(need, hold, 2) for need, hold in zip(two[:1], four[:1], strict=True)] == [2 * split // 4]
