"""A role's state goes through a checkpoint bit for bit, whatever the layouts that write and read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from scenarios import Cell, layout_of
from state_scenarios import Trip, equal, fresh_round_trip, hashes, read_trips, refusals, round_trips, write_trips
from test_update import with_old_log_probs

from flowrl.checkpoints.manifest import digest_file
from flowrl.protocol import DataProto
from flowrl.workers.stored_files import logical_tensors

SHARDED = Cell(distributed_optimizer=True)
Results = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def update_batch(batch: DataProto) -> DataProto:
    return with_old_log_probs(batch)


def check_trips(trips: Sequence[Trip], written: Results, read: Results, folder: Path, *, ranks: str = "") -> None:
    """Every stored tensor is the same after the round trip. The next two steps are, to the last bit in the same layout;
    the first of them is, to 1e-5, in another. `ranks`: where the numbers of ranks differ, that of the first."""
    for number, trip in enumerate(trips):
        first, second = (hashes(logical_tensors(folder / name / str(number))) for name in ("written", "read"))
        assert first == second, trip
        exact = {"exact"} if trip.written.dtype == "bfloat16" else set()
        assert {key.partition(".")[0] for key in first} == {"weight", "exp_avg", "exp_avg_sq"} | exact
        check_steps(trip, written[number], read[number], ranks)


def check_steps(trip: Trip, expected: dict[str, Any], found: dict[str, Any], ranks: str) -> None:
    taken = 1 if trip.kind == "actor" else 2
    assert f"moments of {taken} steps, schedule at step 2" in found["said"]
    same = not ranks and layout_of(trip.written) == layout_of(trip.read)
    assert ("generators restored" in found["said"]) == same and ranks in found["said"], found["said"]
    assert torch.equal(found["drawn"], expected["drawn"]) == same
    if not ranks and trip.written == trip.read:
        assert equal(found, expected), trip
        return
    tolerance = 1e-5 if trip.written.dtype == "float32" else 0.05
    name = "policy" if trip.kind == "actor" else "value"
    for one, two in zip(found["metrics"], expected["metrics"], strict=True):
        assert one[f"{name}/lr"] == pytest.approx(two[f"{name}/lr"], rel=1e-9)
    one, two = found["metrics"][0], expected["metrics"][0]
    assert one[f"{name}/grad_norm"] == pytest.approx(two[f"{name}/grad_norm"], rel=tolerance), trip
    weights, those = found["weights"][0], expected["weights"][0]
    assert set(weights) == set(those)
    for name, weight in weights.items():
        assert (weight - those[name]).norm() <= tolerance * weight.norm(), (trip, name)


def check_digests(written: Results, folder: Path) -> None:
    """Every file is named by one rank, with its size and hash."""
    for number, one in enumerate(written):
        root = folder / "written" / str(number)
        digests = [digest for rank in one["digests"] for digest in rank]
        assert sorted(digest.path for digest in digests) == sorted(path.name for path in root.iterdir())
        assert all(digest_file(root, digest.path) == digest for digest in digests)


def test_state_is_the_same_in_another_layout_and_learning_goes_on(
    model_folder: dict[str, Path], update_batch: DataProto, tmp_path: Path
) -> None:
    """RES-02: plain and distributed optimizer read each other's, a pipeline that of tensor parallelism. In the same
    layout nothing tells the role from one that went on: each parameter counts its own steps."""
    trips = [Trip(Cell(tp=2), SHARDED), Trip(SHARDED, Cell(pp=2, vpp=2)), Trip(SHARDED, SHARDED)]
    trips.append(Trip(Cell(pp=2), Cell(tp=2), "critic"))
    written, read = run(2, round_trips, model_folder["Qwen3"], trips, update_batch, tmp_path)[0]
    check_digests(written, tmp_path)
    check_trips(trips, written, read, tmp_path)


def test_a_role_without_any_step_is_read_as_one(
    model_folder: dict[str, Path], update_batch: DataProto, tmp_path: Path
) -> None:
    """Moments that no step has made are zero, and what the reader had before is gone."""
    cells = [Cell(), Cell(dtype="bfloat16", distributed_optimizer=True)]
    assert run(1, fresh_round_trip, model_folder["Qwen3"], cells, update_batch, tmp_path) == [[True, True]]


def test_a_save_that_cannot_succeed_says_why_on_all_ranks(model_folder: dict[str, Path], tmp_path: Path) -> None:
    """NUM-01: the tensor is named and nothing is written. A full disk: the folder, bytes needed and bytes free."""
    for found in run(2, refusals, model_folder["Qwen3"], tmp_path):
        assert found["no folder"].startswith("NotADirectoryError") and str(tmp_path / "file") in found["no folder"]
        assert "rank 1 cannot write its part" in found["disk full"] and "File too large" in found["disk full"]
        assert " bytes, " in found["disk full"] and str(tmp_path / "full") in found["disk full"]
        assert "weight.model.layers.1.mlp.up_proj.weight [64:128, 0:64] (on rank 1)" in found["not finite"]
        assert found["left"] == "False"


@pytest.mark.slow
def test_state_moves_between_numbers_of_ranks_and_types_of_layout(
    model_folder: dict[str, Path], update_batch: DataProto, tmp_path: Path
) -> None:
    """RES-02: two ranks to four and back, biased, tied, uneven, bfloat16 with exact weights."""
    sharded = Cell(dtype="bfloat16", distributed_optimizer=True)
    there = [Trip(Cell(tp=2), Cell(tp=2, pp=2)), Trip(SHARDED, Cell(tp=4)), Trip(sharded, Cell(dtype="bfloat16", tp=2))]
    back = [
        Trip(Cell(tp=2, pp=2), Cell()), Trip(Cell(tp=4), SHARDED), Trip(Cell(tp=2, distributed_optimizer=True), Cell(pp=2)),
        Trip(Cell(dtype="bfloat16", pp=2, vpp=2), sharded), Trip(Cell(tp=2, pp=2), Cell(), "critic"),
    ]  # fmt: skip
    for number, (trips, ranks, family) in enumerate(
        [(there, (2, 4), "Qwen2"), (back, (4, 2), "tied"), (there, (2, 4), "tied"), (back, (4, 2), "Qwen3")]
    ):
        folder = tmp_path / str(number)
        written = run(ranks[0], write_trips, model_folder[family], trips, update_batch, folder / "written")[0]
        parts = folder / "written", folder / "read"
        read = run(ranks[1], read_trips, model_folder[family], trips, update_batch, *parts)[0]
        check_trips(trips, written, read, folder, ranks=f"on {ranks[0]} rank(s) and this role is")


@pytest.mark.slow
def test_state_of_a_mixture_moves_between_splits_of_its_experts(
    model_folder: dict[str, Path], update_batch: DataProto, tmp_path: Path
) -> None:
    """RES-02: expert groups of another number; their replicas are not those of the other weights."""
    sharded = Cell(ep=2, distributed_optimizer=True)
    trips = [
        Trip(Cell(ep=2), Cell()), Trip(sharded, Cell(tp=2, etp=2)), Trip(Cell(tp=2, distributed_optimizer=True), sharded),
        Trip(sharded, sharded), Trip(Cell(tp=2, ep=2), Cell(pp=2)),
    ]  # fmt: skip
    written, read = run(2, round_trips, model_folder["Qwen3Moe"], trips, update_batch, tmp_path / "two")[0]
    check_trips(trips, written, read, tmp_path / "two")
    four = [Trip(Cell(tp=2, ep=2), Cell(pp=2)), Trip(Cell(pp=2, ep=2, distributed_optimizer=True), Cell(tp=2, ep=4))]
    written, read = run(4, round_trips, model_folder["Qwen3Moe"], four, update_batch, tmp_path / "four")[0]
    check_trips(four, written, read, tmp_path / "four")
