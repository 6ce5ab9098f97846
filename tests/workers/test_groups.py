from __future__ import annotations

import itertools

import pytest

from flowrl.config.schema import TrainLayout
from flowrl.workers.groups import Coordinates, coordinates, embedding_ranks, expert_grid, lines, rank_grid


def layout(tp: int, pp: int, cp: int = 1, ep: int = 1, etp: int = 1) -> TrainLayout:
    return TrainLayout(tp=tp, pp=pp, vpp=1, first_stage_layers=None, cp=cp, ep=ep, etp=etp)


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), list(itertools.product((1, 2, 4), (1, 2), (1, 3), (1, 2, 3))))
def test_every_rank_is_in_one_ascending_group_of_each_kind(tp: int, cp: int, dp: int, pp: int) -> None:
    world = tp * cp * dp * pp
    grid = rank_grid(world, layout(tp, pp, cp))
    assert grid.shape == (pp, dp, cp, tp)
    for axes, size in (((3,), tp), ((2,), cp), ((1,), dp), ((0,), pp), ((0, 3), pp * tp), ((1, 2), dp * cp)):
        groups = lines(grid, axes)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(len(group) == size and list(group) == sorted(group) for group in groups)


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_far_apart() -> None:
    assert coordinates(5, 8, layout(2, 2)) == Coordinates(tp=1, cp=0, dp=0, pp=1)
    assert lines(rank_grid(8, layout(2, 2)), (3,)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert lines(rank_grid(8, layout(2, 2)), (0,)) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_embedding_groups_join_the_ends_of_each_pipeline() -> None:
    ends, firsts = embedding_ranks(rank_grid(6, layout(2, 3)))
    assert ends == [(0, 4), (1, 5)] and firsts == [(0,), (1,)]
    assert embedding_ranks(rank_grid(2, layout(2, 1)))[0] == [(0,), (1,)]


def test_experts_regroup_the_ranks_of_a_stage() -> None:
    grid = expert_grid(8, layout(2, 1, ep=4, etp=2))
    assert lines(grid, (2,)) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_world_that_the_layout_does_not_divide_is_refused_with_the_equation() -> None:
    """PAR-01."""
    with pytest.raises(ValueError, match=r"3 ranks cannot hold replicas of tp=2 x cp=1 x pp=1 = 2 ranks"):
        coordinates(0, 3, layout(2, 1))
