"""A role's state goes through a checkpoint bit for bit, whatever the layouts that write and read it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run
from scenarios import Cell, layout_of
from state_scenarios import hashes, write_and_read
from test_update import with_old_log_probs

from flowrl.checkpoints.manifest import digest_file
from flowrl.protocol import DataProto
from flowrl.workers.stored_files import logical_tensors

KINDS = {"weight", "exp_avg", "exp_avg_sq"}
Results = Sequence[dict[str, Any]]


@pytest.fixture(scope="module")
def update_batch(batch: DataProto) -> DataProto:
    return with_old_log_probs(batch)


def check_pairs(pairs: Sequence[tuple[Cell, Cell]], written: Results, read: Results, folder: Path) -> None:
    """Every stored tensor is the same after the round trip, and the next step is: to the last bit in the same layout, to
    1e-5 in another."""
    for number, (before, after) in enumerate(pairs):
        first, second = (hashes(logical_tensors(folder / name / str(number))) for name in ("written", "read"))
        stored = {key: value for key, value in first.items() if not key.startswith("rng.")}
        assert stored == {key: value for key, value in second.items() if not key.startswith("rng.")}, (before, after)
        kinds = KINDS | ({"exact"} if before.dtype == "bfloat16" else set())
        assert {key.partition(".")[0] for key in stored} == kinds
        check_next_step(before, after, written[number], read[number])


def check_next_step(before: Cell, after: Cell, expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert set(found["weights"]) == set(expected["weights"])
    assert ("generators restored" in found["said"]) == (layout_of(before) == layout_of(after)), found["said"]
    if before == after:
        assert found["metrics"] == expected["metrics"]
        assert all(torch.equal(weight, expected["weights"][name]) for name, weight in found["weights"].items())
        return
    tolerance = 1e-5 if before.dtype == "float32" else 0.02
    assert found["metrics"]["policy/lr"] == expected["metrics"]["policy/lr"]
    norm = expected["metrics"]["policy/grad_norm"]
    assert found["metrics"]["policy/grad_norm"] == pytest.approx(norm, rel=tolerance), (before, after)
    for name, weight in found["weights"].items():
        assert (weight - expected["weights"][name]).norm() <= tolerance * weight.norm(), (before, after, name)


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
    """RES-02: plain and distributed optimizer read each other's; a pipeline reads a tensor-parallel one's."""
    sharded = Cell(distributed_optimizer=True)
    pairs = [(Cell(tp=2), sharded), (sharded, Cell(pp=2, vpp=2)), (sharded, sharded), (Cell(tp=2), Cell(tp=2))]
    written, read = run(2, write_and_read, model_folder["Qwen3"], pairs, update_batch, tmp_path)[0]
    check_digests(written, tmp_path)
    check_pairs(pairs, written, read, tmp_path)
