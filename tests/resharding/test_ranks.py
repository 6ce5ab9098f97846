"""The numbering of ranks: which rank trains what and generates what."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.resharding.layouts import rollout_places, train_places
from flowrl.resharding.ranks import (
    AXES,
    Frame,
    Order,
    ParallelSizes,
    RankPlace,
    disaggregated,
    grid,
    groups,
    micro_groups,
    numbering,
)

Sizes = tuple[int, int]


def nests(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def nesting_layouts() -> list[tuple[int, Sizes, Sizes]]:
    """(world, (tp, pp) of training, (tp, pp) of generation) where sizes of one kind divide each other."""
    sizes = list(product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4)))
    return [
        (world, train, rollout)
        for world in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
        for train, rollout in product(sizes, sizes)
        if nests(train[0], rollout[0]) and nests(train[1], rollout[1])
        if world % (train[0] * train[1]) == 0 and world % (rollout[0] * rollout[1]) == 0
    ]


def check_groups(places: list[RankPlace]) -> None:
    """Every place of either side is taken once, and ranks ascend along every axis."""
    for side in AXES:
        ranks = grid(places, side)
        for axis in range(ranks.ndim):
            assert (np.diff(ranks, axis=axis) > 0).all(), side


def shared(a: int, parts_a: int, b: int, parts_b: int) -> Fraction:
    """What share a of `parts_a` and share b of `parts_b` have in common."""
    low = max(Fraction(a, parts_a), Fraction(b, parts_b))
    return max(Fraction(0), min(Fraction(a + 1, parts_a), Fraction(b + 1, parts_b)) - low)


def test_every_rank_keeps_the_most_that_layouts_allow() -> None:
    """Over all layouts of sizes that divide each other: a bijection, ascending groups, nested shards, R_min."""
    layouts = nesting_layouts()
    assert len(layouts) >= 666
    for world, (t, p), (t2, p2) in layouts:
        places = numbering(world, ParallelSizes(tp=t, pp=p), ParallelSizes(tp=t2, pp=p2))
        check_groups(places)
        for place in places:
            assert place.train and place.rollout
            kept = shared(place.train.tp, t, place.rollout.tp, t2) * shared(place.train.pp, p, place.rollout.pp, p2)
            assert kept == Fraction(1, max(t, t2) * max(p, p2)), (world, (t, p), (t2, p2), place)


def test_ranks_follow_the_common_refinement() -> None:
    """rank = x + X * (y + Y * z), each place the floor of its share of x or y."""
    for world, (t, p), (t2, p2) in nesting_layouts():
        x_size, y_size = max(t, t2), max(p, p2)
        if world % (x_size * y_size):
            continue
        for place in numbering(world, ParallelSizes(tp=t, pp=p), ParallelSizes(tp=t2, pp=p2)):
            x, y = place.rank % x_size, place.rank // x_size % y_size
            assert place.train and place.rollout
            assert (place.train.tp, place.train.pp) == (x * t // x_size, y * p // y_size)
            assert (place.rollout.tp, place.rollout.pp) == (x * t2 // x_size, y * p2 // y_size)


def test_interleaved_stages_keep_the_most_that_layouts_allow() -> None:
    """A rank's engine stage takes layers of its own training stage, where one such stage has them all."""
    for (t, p, v), (t2, p2) in product(product((1, 2), (2, 3), (2, 3)), product((1, 2, 4), (1, 2, 4, 6, 12))):
        train, rollout = ParallelSizes(tp=t, pp=p, vpp=v), ParallelSizes(tp=t2, pp=p2)
        world = max(t, t2) * int(np.lcm(p, p2))
        places = numbering(world, train, rollout)
        check_groups(places)
        for place in places:
            assert place.train and place.rollout
            chunk = place.rollout.pp * p * v // p2
            assert p2 % (p * v) or place.train.pp == chunk % p


def test_smaller_generation_groups_are_strided_and_micro_groups_consecutive() -> None:
    """The example of HybridFlow (Sheng et al. 2024, section 5.3): training TP 4, generation TP 2."""
    places = numbering(4, ParallelSizes(tp=4), ParallelSizes(tp=2))
    assert groups(places, "train", "tp") == [(0, 1, 2, 3)]
    assert groups(places, "rollout", "tp") == [(0, 2), (1, 3)]
    assert micro_groups(places) == [(0, 1), (2, 3)]


def test_larger_generation_groups_make_training_groups_strided() -> None:
    places = numbering(4, ParallelSizes(tp=2), ParallelSizes(tp=4))
    assert groups(places, "train", "tp") == [(0, 2), (1, 3)]
    assert groups(places, "train", "dp") == [(0, 1), (2, 3)]
    assert groups(places, "rollout", "tp") == [(0, 1, 2, 3)]
    assert micro_groups(places) == [(0,), (1,), (2,), (3,)]


def test_equal_layouts_leave_the_plain_order() -> None:
    sizes = ParallelSizes(tp=2, pp=2)
    places = numbering(8, sizes, sizes)
    assert groups(places, "train", "tp") == groups(places, "rollout", "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups(places, "train", "pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups(places, "train", "pp", "tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_pipeline_stages_supply_what_replicas_cannot() -> None:
    """Training TP 2 x PP 4 on 8 ranks, generation TP 8: there are no replicas, and every shard still nests."""
    places = numbering(8, ParallelSizes(tp=2, pp=4), ParallelSizes(tp=8))
    assert groups(places, "train", "tp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups(places, "rollout", "tp") == [tuple(range(8))]
    assert all(place.rollout.tp // 4 == place.train.tp for place in places if place.train and place.rollout)


@pytest.mark.parametrize(
    ("world", "train", "rollout"),
    [(6, (3, 1), (2, 1)), (12, (3, 2), (2, 2)), (6, (2, 3), (3, 2)), (12, (6, 1), (4, 1)), (12, (4, 3), (6, 2))],
)
def test_sizes_that_do_not_divide_each_other_still_get_an_order(world: int, train: Sizes, rollout: Sizes) -> None:
    places = numbering(world, ParallelSizes(tp=train[0], pp=train[1]), ParallelSizes(tp=rollout[0], pp=rollout[1]))
    check_groups(places)
    kept = [
        shared(p.train.tp, train[0], p.rollout.tp, rollout[0]) * shared(p.train.pp, train[1], p.rollout.pp, rollout[1])
        for p in places
        if p.train and p.rollout
    ]
    if world == 6 and train == (3, 1):
        assert kept == [Fraction(1, part) for part in (3, 3, 6, 6, 3, 3)]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_experts_regroup_the_ranks_of_a_stage_in_any_order(data: st.DataObject) -> None:
    size = st.sampled_from((1, 2, 4))
    train = ParallelSizes(
        tp=data.draw(size), pp=data.draw(size), cp=data.draw(st.sampled_from((1, 2))), ep=data.draw(size), etp=data.draw(size)
    )  # fmt: skip
    rollout = ParallelSizes(tp=data.draw(size), pp=data.draw(size))
    world = 32
    aligned = data.draw(st.sampled_from(("tp", "ep", "etp")))
    inner, step = data.draw(st.sampled_from((1, 2, 4))), st.sampled_from((1, 2, 4, 8))
    try:
        frame = Frame(world, train, rollout, aligned, inner)
        strides = (
            data.draw(st.sampled_from((None, 1, 2, 4))),
            data.draw(st.sampled_from((None, 1, 2, 4))),
            data.draw(step),
        )
        frame.dense(strides[0])
        frame.experts(strides[1], strides[2])
    except ValueError:
        return
    places = numbering(world, train, rollout, Order(aligned, inner, *strides))
    check_groups(places)
    stages = {place.train.pp: set() for place in places if place.train}
    for place in places:
        assert place.train
        stages[place.train.pp].add((place.train.ep, place.train.etp, place.train.edp))
    assert all(len(found) == world // train.pp for found in stages.values())


def test_context_parallel_ranks_are_neighbours_among_replicas() -> None:
    places = numbering(8, ParallelSizes(tp=2, cp=2), ParallelSizes(tp=2))
    assert groups(places, "train", "cp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups(places, "train", "dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_separate_ranks_take_part_on_one_side_only() -> None:
    places = disaggregated(train_places(4, ParallelSizes(tp=2, pp=2)), rollout_places(2, ParallelSizes(tp=2)))
    assert [place.rank for place in places] == list(range(6))
    assert groups(places, "train", "tp") == [(0, 1), (2, 3)]
    assert groups(places, "rollout", "tp") == [(4, 5)]
    assert all((place.train is None) == (place.rank >= 4) == (place.rollout is not None) for place in places)
    assert micro_groups(places) == [(rank,) for rank in range(6)]


@pytest.mark.parametrize(
    ("world", "train", "rollout", "message"),
    [
        (
            6,
            ParallelSizes(tp=4),
            ParallelSizes(),
            r"6 ranks cannot be cut into train tp x cp x pp = 4; nearest: 4 or 8",
        ),
        (4, ParallelSizes(), ParallelSizes(tp=8), r"4 ranks cannot be cut into rollout tp x pp = 8; nearest: 8 ranks"),
        (4, ParallelSizes(ep=8), ParallelSizes(), r"train etp x ep x pp = 8"),
        (8, ParallelSizes(), ParallelSizes(tp=4, ep=2), r"ep is 1 or tp=4"),
    ],
)
def test_impossible_layouts_are_errors_with_numbers(
    world: int, train: ParallelSizes, rollout: ParallelSizes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        numbering(world, train, rollout)


def test_an_order_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="have no 4 replicas inside"):
        numbering(8, ParallelSizes(tp=4), ParallelSizes(tp=4), Order(inner=4))
    with pytest.raises(ValueError, match="ep=4 at stride 4 does not fit the 8 ranks of a stage"):
        numbering(8, ParallelSizes(ep=4), ParallelSizes(), Order(ep_stride=4))
    with pytest.raises(ValueError, match="ep at stride 1 overlaps etp=2 at stride 1"):
        numbering(8, ParallelSizes(ep=4, etp=2), ParallelSizes(), Order(ep_stride=1))
