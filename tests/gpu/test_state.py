"""Checkpoints of roles on GPUs: bit for bit into another layout, and between turns on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios import Cell
from state_scenarios import Trip, hashes

from flowrl.protocol import DataProto
from flowrl.workers.stored_files import logical_tensors
from tests.gpu.ranks import run

pytestmark = pytest.mark.gpu
SHARDED = Cell(distributed_optimizer=True)
HALF = Cell(dtype="bfloat16", distributed_optimizer=True)
Results = list[dict[str, Any]]


@pytest.mark.parametrize(
    "trips",
    [
        [Trip(Cell(), Cell()), Trip(Cell(dtype="bfloat16"), HALF), Trip(Cell(), SHARDED, "critic")],
        [Trip(Cell(tp=2), Cell(pp=2)), Trip(Cell(pp=2), SHARDED), Trip(HALF, Cell(tp=2, dtype="bfloat16"))],
    ],
    ids=["one rank", "two ranks"],
)
def test_state_is_the_same_in_another_layout(tiny: Path, batch: DataProto, trips: list[Trip], tmp_path: Path) -> None:
    """RES-02: what is read is what was written, to the last bit; the next step agrees as kernels of a GPU do."""
    ranks = 2 if trips[0].written.tp > 1 else 1
    found: tuple[Results, Results] = run(
        ranks, "tests.gpu.scenarios_gpu:states_through_files", tiny, trips, batch, tmp_path
    )[0]
    for number, (trip, written, read) in enumerate(zip(trips, *found, strict=True)):
        first, second = (hashes(logical_tensors(tmp_path / name / str(number))) for name in ("written", "read"))
        assert first == second and {"weight", "exp_avg", "exp_avg_sq"} <= {key.partition(".")[0] for key in first}
        assert ("generators restored" in read["said"]) == torch.equal(read["drawn"], written["drawn"])
        name = "policy" if trip.kind == "actor" else "value"
        one, two = (result["metrics"][0][f"{name}/grad_norm"] for result in (written, read))
        assert one == pytest.approx(two, rel=1e-4 if trip.written.dtype == "float32" else 0.05), trip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_between_turns_is_what_was_learned(
    tiny: Path, batch: DataProto, dtype: str, tmp_path: Path
) -> None:
    """CKP-01: weights and moments that were on the host, that go there again while files are written, or were read."""
    cells = [Cell(dtype=dtype), Cell(dtype=dtype, distributed_optimizer=True)]
    found = run(1, "tests.gpu.scenarios_gpu:saved_between_turns", tiny, cells, batch, tmp_path)[0]
    assert found == [True] * 4
