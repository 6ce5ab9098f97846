"""Moves between two pools with real processes: trainers and engines share no rank and no default group."""

from __future__ import annotations

from pathlib import Path

import pytest
from apart_scenarios import (
    Pair,
    join_late,
    receive,
    receive_until_a_death,
    send,
    send_until_a_death,
    stay_away,
)
from models import make_model
from move_scenarios import number_elements
from processes import run_apart
from rollout_scenarios import Setup
from scenarios import Cell

BUCKET_BYTES = 1 << 16


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders whose elements are numbered."""
    root = tmp_path_factory.mktemp("numbered")
    folders = {name: make_model(root / name, name) for name in ("Llama", "Qwen3Moe")}
    folders["tied"] = make_model(root / "tied", "Llama", tie_word_embeddings=True, num_hidden_layers=5)
    return {name: number_elements(folder) for name, folder in folders.items()}


def check(sizes: tuple[int, int], pairs: list[Pair]) -> None:
    """Every parameter is as vLLM loads it; engines receive their whole shard and trainers nothing."""
    results = run_apart(sizes, (send, receive), pairs, BUCKET_BYTES)
    trainers, engines = results[: sizes[0]], results[sizes[0] :]
    for number, pair in enumerate(pairs):
        assert all(reports[number].received_bytes == reports[number].bound_bytes == 0 for reports in trainers), pair
        received = []
        for results_of_rank in engines:
            wrong, metrics, report = results_of_rank[number]
            assert wrong == [], pair
            assert report.received_bytes == report.bound_bytes > 0, pair
            assert metrics["reshard/fingerprint_ok"] == 1.0
            received.append(report.received_bytes)
            assert metrics["reshard/bound_bytes_max"] == metrics["reshard/received_bytes_max"]
        assert engines[0][number][1]["reshard/received_bytes_max"] == max(received)


def test_engines_of_another_pool_receive_their_shard_and_no_byte_more(numbered: dict[str, Path]) -> None:
    """PAR-04, PAR-05, PAR-07, PAR-08: into one, two or four parts of other cuts, experts among them."""
    dense, experts = numbered["Llama"], numbered["Qwen3Moe"]
    check(
        (2, 2),
        [
            (dense, Cell(tp=2), Setup()),
            (dense, Cell(pp=2), Setup(tp=2)),
            (dense, Cell(), Setup(tp=2)),
            (experts, Cell(ep=2), Setup(tp=2)),
        ],
    )


STAGES = [Cell(pp=2, first_stage_layers=3), Cell(tp=2, pp=2, first_stage_layers=1)]
WHOLE, SPREAD = Setup(tp=2), Setup(tp=2, expert_parallel=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "cells", "setups", "mixture"),
    [
        ((4, 2), [Cell(tp=4), *STAGES], [Setup(tp=2), Setup(pp=2)], (Cell(tp=2, ep=4), SPREAD)),
        ((2, 4), [Cell(tp=2), STAGES[0]], [Setup(tp=4), Setup(tp=2, pp=2), Setup(pp=2)], (Cell(tp=2, etp=2), WHOLE)),
        ((1, 3), [Cell()], [Setup()], (Cell(), Setup())),
    ],
    ids=["fewer engines", "more engines", "one trainer"],
)
def test_pools_of_different_sizes_move_exactly(
    numbered: dict[str, Path],
    sizes: tuple[int, int],
    cells: list[Cell],
    setups: list[Setup],
    mixture: tuple[Cell, Setup],
) -> None:
    """PAR-04, PAR-07, PAR-08: tied weights over unequal stages, experts whole and cut."""
    dense = [(numbered["tied"], cell, setup) for cell in cells for setup in setups]
    check(sizes, [*dense, (numbered["Qwen3Moe"], *mixture)])


@pytest.mark.parametrize("victim", [0, 2], ids=["trainer", "engine"])
def test_a_death_in_one_pool_ends_the_move_in_both(numbered: dict[str, Path], victim: int) -> None:
    """PAR-07: within 10 s, with the stage, and ranks by their pools; rank 0 takes the store of both with it."""
    results = run_apart(
        (2, 2),
        (send_until_a_death, receive_until_a_death),
        numbered["Llama"], Cell(tp=2), Setup(tp=2), victim,
        dying=[victim],
    )  # fmt: skip
    names = ["rank 0 of pool trainers", "rank 1 of pool trainers", "rank 0 of pool engines", "rank 1 of pool engines"]
    assert results[victim] is None
    for rank, (message, seconds) in ((rank, result) for rank, result in enumerate(results) if rank != victim):
        assert message.startswith(f"{names[rank]}: the ")
        assert "failed, because a rank has died or given up" in message and "of stage " in message
        assert seconds < 10


def test_a_pool_that_does_not_come_is_named_after_the_timeout() -> None:
    for message, seconds in run_apart((1, 1), (join_late, stay_away), 5.0)[:1]:
        assert "not all of rank 0 of pool trainers, rank 0 of pool engines joined for moving weights within" in message
        assert "cluster.collective_timeout_seconds=5" in message
        assert 4 < seconds < 10
