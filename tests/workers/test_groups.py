from __future__ import annotations

import itertools

import pytest

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.layouts import common_places, rollout_places, train_places
from flowrl.resharding.ranks import ParallelSizes, TrainPlace, grid, groups
from flowrl.workers.generation import engine_groups, engine_ranks
from flowrl.workers.groups import embedding_ranks

SHAPE = ModelShape("LlamaForCausalLM", 4, 64, 128, 4, 2, 32, 131, False, 1e-6, 1e4, None, 64, False, False, None, (2,))


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), list(itertools.product((1, 2, 4), (1, 2), (1, 3), (1, 2, 3))))
def test_every_rank_is_in_one_ascending_group_of_each_kind(tp: int, cp: int, dp: int, pp: int) -> None:
    world = tp * cp * dp * pp
    places = train_places(world, ParallelSizes(tp=tp, pp=pp, cp=cp))
    assert grid(places, "train").shape == (pp, dp, cp, tp)
    kinds = {("tp",): tp, ("cp",): cp, ("dp",): dp, ("pp",): pp, ("pp", "tp"): pp * tp, ("dp", "cp"): dp * cp}
    for axes, size in kinds.items():
        found = groups(places, "train", *axes)
        assert sorted(rank for group in found for rank in group) == list(range(world))
        assert all(len(group) == size and list(group) == sorted(group) for group in found)


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    places = train_places(8, ParallelSizes(tp=2, pp=2))
    assert places[5].train == TrainPlace(tp=1, cp=0, dp=0, pp=1, etp=0, ep=0, edp=1)
    assert groups(places, "train", "tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups(places, "train", "pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_embedding_groups_join_the_ends_of_each_pipeline() -> None:
    ends, firsts = embedding_ranks(grid(train_places(6, ParallelSizes(tp=2, pp=3)), "train"))
    assert ends == [(0, 4), (1, 5)] and firsts == [(0,), (1,)]
    assert embedding_ranks(grid(train_places(2, ParallelSizes(tp=2)), "train"))[0] == [(0,), (1,)]


def test_experts_regroup_the_ranks_of_a_stage() -> None:
    places = train_places(8, ParallelSizes(tp=2, ep=4, etp=2))
    assert groups(places, "experts", "ep") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_world_that_the_layout_does_not_divide_is_refused_with_the_equation() -> None:
    """PAR-01."""
    with pytest.raises(ValueError, match=r"3 ranks cannot hold replicas of tp=2 x cp=1 x pp=1 = 2 ranks"):
        train_places(3, ParallelSizes(tp=2))


def test_engines_of_fewer_tensor_parallel_ranks_than_training_are_strided() -> None:
    """PAR-04: training TP [0 1 2 3] becomes engines [0 2] and [1 3], which need only what a neighbour holds."""
    places = common_places(SHAPE, 4, ParallelSizes(tp=4), ParallelSizes(tp=2))
    assert engine_groups(places).tp_groups == engine_ranks(places) == [[0, 2], [1, 3]]
    assert groups(places, "train", "tp") == [(0, 1, 2, 3)]


def test_training_is_strided_beside_engines_of_more_tensor_parallel_ranks() -> None:
    """PAR-05: every engine rank's shard lies in what the same rank trains."""
    places = common_places(SHAPE, 4, ParallelSizes(tp=2), ParallelSizes(tp=4))
    assert groups(places, "train", "tp") == [(0, 2), (1, 3)]
    assert engine_ranks(places) == [[0, 1, 2, 3]]


def test_an_engine_alone_has_neighbouring_ranks() -> None:
    places = rollout_places(8, ParallelSizes(tp=2, pp=2))
    assert engine_ranks(places) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert engine_groups(places).tp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
