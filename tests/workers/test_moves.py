"""Moves between layouts with real processes: every element has a value of its own, so any swap shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
from models import make_model
from move_scenarios import (
    Pair,
    copies_of_a_move,
    corrupt_a_bucket,
    die_in_a_bucket,
    exact_moves,
    number_elements,
    views_over_time,
)
from processes import run
from rollout_scenarios import Setup
from scenarios import Cell

from flowrl.resharding.transfer import MoveReport

BUCKET_BYTES = 1 << 16


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders whose elements are numbered."""
    root = tmp_path_factory.mktemp("numbered")
    folders = {name: make_model(root / name, name) for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral")}
    folders["tied"] = make_model(root / "tied", "Llama", tie_word_embeddings=True, num_hidden_layers=5)
    folders["even"] = make_model(root / "even", "Llama", vocab_size=192)
    folders["wide"] = make_model(root / "wide", "Llama", num_attention_heads=8, num_key_value_heads=4)
    folders["single"] = make_model(root / "single", "Llama", num_key_value_heads=1)
    return {name: number_elements(folder) for name, folder in folders.items()}


def check(folder: Path, world: int, pairs: list[Pair]) -> dict[Pair, list[int]]:
    """Every parameter is as vLLM loads it and every rank received its bound; returns received bytes by rank."""
    reports = moved(folder, world, pairs)
    return {pair: [report.received_bytes for report in there] for pair, there in reports.items()}


def moved(folder: Path, world: int, pairs: list[Pair]) -> dict[Pair, list[MoveReport]]:
    """As `check`; returns the report of every rank."""
    reports: dict[Pair, list[MoveReport]] = {}
    for result in run(world, exact_moves, folder, pairs, BUCKET_BYTES):
        assert sorted(map(str, result)) == sorted(map(str, set(pairs)))
        for pair, (wrong, report) in result.items():
            assert wrong == [], pair
            assert report.received_bytes == report.bound_bytes, pair
            reports.setdefault(pair, []).append(report)
    return reports


HALVES = [Cell(), Cell(tp=2), Cell(pp=2), Cell(pp=2, vpp=2)]
TRAIN = [Cell(), Cell(tp=2), Cell(tp=4), Cell(pp=2), Cell(pp=4), Cell(tp=2, pp=2), Cell(pp=2, first_stage_layers=1)]
TRAIN += [Cell(pp=2, vpp=2), Cell(tp=2, pp=2, vpp=2)]
ROLLOUT = [Setup(), Setup(tp=2), Setup(tp=4), Setup(pp=2), Setup(pp=4), Setup(tp=2, pp=2)]
FEW = [Setup(), Setup(tp=2), Setup(tp=2, pp=2)]
UNEVEN = [Cell(tp=4), Cell(pp=2), Cell(pp=2, first_stage_layers=2), Cell(tp=2, pp=2, first_stage_layers=3)]
MIXED = [Cell(ep=2), Cell(ep=4), Cell(tp=2, ep=2), Cell(tp=2, ep=4), Cell(ep=2, etp=2), Cell(tp=2, pp=2, etp=2)]
MIXED.append(Cell(pp=2, vpp=2, ep=2))
SPREAD = Setup(tp=2, expert_parallel=True)
EXPERTS = [Setup(), Setup(tp=2), SPREAD, Setup(tp=4), Setup(tp=4, expert_parallel=True), Setup(tp=2, pp=2)]
EXPERTS.append(Setup(tp=2, pp=2, expert_parallel=True))
WIDE = [Cell(tp=4, pp=2), Cell(tp=2, pp=4), Cell(tp=2)]


def every_second(cells: Sequence[Cell], setups: Sequence[Setup]) -> list[Pair]:
    """Like the fields of one colour on a chess board: each layout of either side meets half of the other's."""
    return [(cells[i], setups[j]) for i, j in product(range(len(cells)), range(len(setups))) if (i + j) % 2 == 0]


GRID: dict[str, tuple[str, int, list[Pair]]] = {
    "two": ("Llama", 2, list(product(HALVES, ROLLOUT[:2] + [Setup(pp=2)]))),
    **{
        f"four-tp{setup.tp}pp{setup.pp}": (
            "Llama",
            4,
            [pair for pair in every_second(TRAIN, ROLLOUT) if pair[1] == setup],
        )
        for setup in ROLLOUT
    },
    "Qwen2": ("Qwen2", 4, list(product([Cell(tp=4), Cell(tp=2, pp=2), Cell(pp=2, first_stage_layers=1)], FEW))),
    "Qwen3": ("Qwen3", 4, list(product([Cell(tp=4), Cell(tp=2, pp=2), Cell(pp=2, vpp=2)], FEW))),
    "tied": ("tied", 4, list(product(UNEVEN, FEW))),
    "Qwen3Moe-one-stage": ("Qwen3Moe", 4, every_second(MIXED, [setup for setup in EXPERTS if setup.pp == 1])),
    "Qwen3Moe-stages": ("Qwen3Moe", 4, every_second(MIXED, [setup for setup in EXPERTS if setup.pp > 1])),
    "Mixtral": ("Mixtral", 4, every_second([*MIXED[1:4], Cell(tp=4, ep=2, etp=2)], EXPERTS)),
    "single": ("single", 4, list(product([Cell(), Cell(tp=2), Cell(tp=4)], [Setup(), Setup(tp=2), Setup(tp=4)]))),
    "eight": ("wide", 8, list(product(WIDE, [Setup(tp=2), Setup(tp=8), Setup(tp=4, pp=2)]))),
}
"""(family, ranks, pairs) by name; moved by the slow tests below. Llama has 2 key/value heads and a prime vocabulary,
single 1 key/value head."""


def test_the_grid_has_every_kind_of_move() -> None:
    """What the specification asks of real processes: at least 40 pairs, and each of these among them."""
    pairs = {(family, world, cell, setup) for family, world, made in GRID.values() for cell, setup in made}
    assert len(pairs) >= 40
    kinds: dict[str, Callable[[str, Cell, Setup], bool]] = {
        "t' < t": lambda _, cell, setup: setup.tp < cell.tp,
        "t' = t > 1": lambda _, cell, setup: setup.tp == cell.tp > 1,
        "t' > t": lambda _, cell, setup: setup.tp > cell.tp,
        "p' < p": lambda _, cell, setup: setup.pp < cell.pp,
        "p' = p > 1": lambda _, cell, setup: setup.pp == cell.pp > 1,
        "p' > p": lambda _, cell, setup: setup.pp > cell.pp,
        "nkv < t'": lambda family, _, setup: setup.tp > (4 if family == "wide" else 2),
        "tied over stages on both sides": lambda family, cell, setup: family == "tied" and cell.pp > 1 < setup.pp,
        "uneven pipeline": lambda family, cell, _: family == "tied" and cell.pp == 2 and not cell.first_stage_layers,
        "chosen first stage": lambda _, cell, __: cell.first_stage_layers is not None,
        "interleaved pipeline": lambda _, cell, __: cell.vpp > 1,
        "interleaved to stages": lambda _, cell, setup: cell.vpp > 1 < setup.pp,
        "interleaved experts": lambda _, cell, __: cell.vpp > 1 < cell.ep,
        "EP to TP": lambda _, cell, setup: cell.ep > 1 < setup.tp and not setup.expert_parallel,
        "EP to EP": lambda _, cell, setup: cell.ep > 1 == cell.tp and setup.expert_parallel,
        "TP+EP to TP+EP": lambda _, cell, setup: cell.ep > 1 < cell.tp and setup.expert_parallel,
        "EP to whole": lambda _, cell, setup: cell.ep > 1 == setup.tp,
        "experts over engine stages": lambda _, cell, setup: cell.ep > 1 < setup.pp,
        "etp > tp": lambda _, cell, __: cell.etp > cell.tp,
        "etp < tp": lambda _, cell, __: cell.etp < cell.tp and cell.ep > 1,
    }
    for name, belongs in kinds.items():
        assert any(belongs(family, cell, setup) for family, _, cell, setup in pairs), name


def test_views_of_parameters_are_made_anew_only_where_they_have_other_memory(numbered: dict[str, Path]) -> None:
    assert run(1, views_over_time, numbered["Qwen3Moe"]) == [[]]


def test_two_ranks_receive_what_they_lack_and_no_byte_more(numbered: dict[str, Path]) -> None:
    """PAR-04, PAR-05, PAR-07: halves to whole replicas; from whole to halves is free; an interleaved pipeline."""
    pairs = [(Cell(tp=2), Setup()), (Cell(), Setup(tp=2)), (Cell(pp=2), Setup(tp=2)), (Cell(pp=2, vpp=2), Setup())]
    received = check(numbered["Llama"], 2, pairs)
    assert [max(received[pair]) > 0 for pair in pairs] == [True, False, True, True]


def test_pipeline_stages_are_sent_from_the_trainers_own_memory(numbered: dict[str, Path]) -> None:
    """PAR-04: flowrl's continuous buffer and that of the distributed optimizer; nothing is packed."""
    pairs = [(Cell(pp=2), Setup()), (Cell(pp=2, distributed_optimizer=True), Setup())]
    for there in moved(numbered["even"], 2, pairs).values():
        assert all(report.packed_bytes == 0 < report.received_bytes for report in there)
        assert all({"local", "pp", "install", "meet"} == report.stage_seconds.keys() for report in there)


def test_four_ranks_receive_what_they_lack_and_no_byte_more(numbered: dict[str, Path]) -> None:
    """PAR-04, PAR-05: generation groups are strided where training has the larger tensor-parallel size."""
    check(numbered["Llama"], 4, [(Cell(tp=2, pp=2), Setup(tp=4)), (Cell(tp=4), Setup(tp=2)), (Cell(tp=4), Setup())])


def test_two_ranks_receive_the_experts_that_they_lack_and_no_byte_more(numbered: dict[str, Path]) -> None:
    """PAR-08."""
    received = check(numbered["Qwen3Moe"], 2, [(Cell(ep=2), Setup(tp=2)), (Cell(ep=2), Setup())])
    assert min(received[Cell(ep=2), Setup(tp=2)]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_moves_over_the_grid_are_exact(numbered: dict[str, Path], name: str) -> None:
    """PAR-04, PAR-05, PAR-07, PAR-08, PAR-10. On two ranks free where no side of the generation layout is smaller; on
    four also where every engine stage is one chunk of an interleaved pipeline."""
    family, world, pairs = GRID[name]
    for (cell, setup), there in check(numbered[family], world, pairs).items():
        if world == 2:
            assert (max(there) == 0) == (setup.tp >= cell.tp and setup.pp >= cell.pp * cell.vpp), (cell, setup, there)
        if cell == Cell(pp=2, vpp=2) and setup == Setup(pp=4):
            assert max(there) == 0


@pytest.mark.parametrize(
    ("world", "cell", "setup"),
    [
        (2, Cell(tp=2), Setup()),
        (4, Cell(tp=2, pp=2), Setup()),
        pytest.param(4, Cell(tp=4), Setup(), marks=pytest.mark.slow),
    ],
    ids=["exchange", "exchange-among-others", "gather"],
)
def test_a_death_inside_a_stage_ends_the_move_of_all_others(
    numbered: dict[str, Path], world: int, cell: Cell, setup: Setup
) -> None:
    """PAR-07: within 10 s, with the stage and the ranks."""
    last = world - 1
    *others, dead = run(world, die_in_a_bucket, numbered["Llama"], cell, setup, last, 2, dying=[last])
    assert dead is None
    for rank, (message, seconds) in enumerate(others):
        assert message.startswith(f"rank {rank}: the ") and "failed, because a rank has died or given up" in message
        assert "of stage " in message
        assert seconds < 10


@pytest.mark.parametrize(
    ("world", "cell", "setup", "stages"),
    [(2, Cell(tp=2), Setup(), 1), (4, Cell(tp=2, pp=2), Setup(), 2), (2, Cell(), Setup(tp=2), 0)],
    ids=["one stage", "two stages", "nothing travels"],
)
def test_copies_leave_a_part_of_the_device_to_collectives_that_are_under_way(
    numbered: dict[str, Path], world: int, cell: Cell, setup: Setup, stages: int
) -> None:
    """And have all of it where none are: before the first bucket of a stage and after the last."""
    for found in run(world, copies_of_a_move, numbered["Llama"], cell, setup, 1e9):
        assert {kind for kind, _, _ in found} >= ({"own", "pack", "install"} if stages == 1 else {"own"})
        assert all(told == under_way for _, told, under_way in found), found
        assert any(told for _, told, _ in found) == bool(stages)
        assert sum(kind == "install" and not told for kind, told, _ in found) <= stages


def test_own_copies_that_outlast_their_bucket_have_the_whole_device(numbered: dict[str, Path]) -> None:
    for found in run(2, copies_of_a_move, numbered["Llama"], Cell(tp=2), Setup(), 0.0):
        assert not any(told for kind, told, _ in found if kind == "own")
        assert any(told for kind, told, _ in found if kind == "pack")


def test_a_corrupted_bucket_is_found_and_named(numbered: dict[str, Path]) -> None:
    """SYN-01: rank, tensor and parameter, on every rank."""
    (first, nothing), (second, wrong) = run(2, corrupt_a_bucket, numbered["Llama"], Cell(tp=2), Setup(), 1)
    assert first == second and nothing == "" and wrong
    assert "in 1 regions" in first and "rank 1: model." in first and f"in {wrong}" in first
