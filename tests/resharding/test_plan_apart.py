"""Plans of moves to ranks that do not train: engines receive their whole shard, trainers share the sending."""

from __future__ import annotations

import pytest

from flowrl.resharding.layouts import rollout_places, train_places
from flowrl.resharding.plan import MovePlan, plan_move
from flowrl.resharding.ranks import ParallelSizes, disaggregated
from flowrl.resharding.shapes import planned_shape

GB = 1e9
CASES = [
    ("llama-7b", 8, ParallelSizes(tp=4), 8, ParallelSizes(tp=2)),
    ("llama-7b", 8, ParallelSizes(tp=2), 4, ParallelSizes(tp=4)),
    ("llama-7b", 8, ParallelSizes(tp=2, pp=2), 8, ParallelSizes(pp=2)),
    ("llama-7b", 4, ParallelSizes(), 12, ParallelSizes(tp=2)),
    ("llama-70b", 128, ParallelSizes(tp=8, pp=4), 64, ParallelSizes(tp=4)),
    ("llama-70b", 16, ParallelSizes(tp=8, pp=2), 16, ParallelSizes(tp=8)),
    ("qwen3-30b-a3b", 8, ParallelSizes(ep=8), 8, ParallelSizes(tp=4)),
    ("qwen3-30b-a3b", 8, ParallelSizes(tp=2, ep=4), 8, ParallelSizes(tp=4, ep=4)),
    ("qwen3-30b-a3b", 16, ParallelSizes(tp=2, pp=2, ep=4, etp=2), 8, ParallelSizes(tp=8, ep=8)),
    ("qwen3-235b-a22b", 64, ParallelSizes(tp=4, pp=4, ep=8), 32, ParallelSizes(tp=8)),
]


def plan(name: str, trainers: int, train: ParallelSizes, engines: int, rollout: ParallelSizes) -> MovePlan:
    places = disaggregated(train_places(trainers, train), rollout_places(engines, rollout))
    return plan_move(planned_shape(name), train, rollout, places)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]} to {case[4]}")
def test_engines_receive_their_shard_and_trainers_share_the_sending(
    case: tuple[str, int, ParallelSizes, int, ParallelSizes],
) -> None:
    """Bytes equal the bound on every rank and enter each node once; no rank of a pool sends much more than another."""
    trainers = case[1]
    made = plan(*case)
    assert made.received == made.bound
    assert set(made.received[:trainers]) == {0} and min(made.received[trainers:]) > 0
    assert made.imported == sum(made.import_bound)
    sent = [sum(stage.sent[rank] for stage in made.stages) for rank in range(made.world)]
    assert sum(sent) == sum(made.received)
    assert max(sent[:trainers]) <= 1.2 * sum(sent[:trainers]) / trainers
    for first in range(trainers // 8 * 8, made.world, 8):
        relayed = sent[max(first, trainers) : first + 8]
        assert max(relayed) <= 1.2 * sum(relayed) / len(relayed) + 0.3 * GB, (
            "engines of a node hand on as much as others"
        )


def test_a_single_holder_sends_what_nobody_else_has() -> None:
    """Without replicas there is no choice: each of four parts of the model goes out once, from the rank that holds it."""
    made = plan("llama-7b", 4, ParallelSizes(tp=4), 4, ParallelSizes(tp=4))
    size = planned_shape("llama-7b").num_parameters * 2
    sent = [sum(stage.sent[rank] for stage in made.stages) for rank in range(made.world)]
    assert sum(made.received) == pytest.approx(size, rel=1e-3)
    assert sent[:4] == pytest.approx([size / 4] * 4, rel=1e-3)
