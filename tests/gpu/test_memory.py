"""Trainer and engine have the memory of one GPU by turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout_scenarios import Setup
from scenarios import Cell

from flowrl.protocol import DataProto
from tests.gpu.conftest import WIDE_VOCAB
from tests.gpu.ranks import run

pytestmark = pytest.mark.gpu
MIB = 1 << 20
PARAMETERS = WIDE_VOCAB * 1536 + 2 * (3 * 1536 * 8960 + 2 * 1536 * 1536 + 2 * 1536 * 256)
"""Elements of the matrices of the wide model."""


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_memory_goes_to_the_host_and_comes_back_bit_for_bit(
    wide: Path, batch: DataProto, distributed: bool, tmp_path: Path
) -> None:
    """What is freed is at least what was held, and nothing is lost; using it while it is away is an error."""
    cell = Cell(dtype="bfloat16", distributed_optimizer=distributed)
    setup = Setup(num_ids=WIDE_VOCAB, dtype="bfloat16")
    found: dict[str, Any] = run(1, "tests.gpu.scenarios_gpu:take_turns", wide, cell, setup, batch, tmp_path)[0]
    assert found["same"] == [True, True], "offloading changed a weight or a moment"
    assert found["wrong"] == []
    assert "reload() before" in found["error"]
    free = found["free"]
    for step in range(2):
        asleep = free[step, "engine asleep"] - free[step, "awake"]
        assert asleep >= 2 * PARAMETERS, f"sleep gave {asleep / MIB:.0f} MiB"
        # Weights in 2 bytes; gradients, exact weights and two moments in 4 each.
        away = free[step, "trainer away"] - free[step, "trained"] + 2 * PARAMETERS
        assert away >= 18 * PARAMETERS, f"offload gave {away / MIB:.0f} MiB of {18 * PARAMETERS / MIB:.0f}"
    back = found["back"][1]
    assert 18 * PARAMETERS <= back <= 19 * PARAMETERS + 256 * MIB, f"reload took {back / MIB:.0f} MiB"


def test_an_engine_can_follow_another_one_in_a_process(tiny: Path) -> None:
    """Nothing keeps the memory of an engine that was closed."""
    first, second = run(1, "tests.gpu.scenarios_gpu:two_engines", tiny)[0]
    assert first.keys() == second.keys()


def test_an_engine_sleeps_while_another_process_takes_the_memory(tiny: Path) -> None:
    """vLLM compares what is free on the whole GPU before and after, and would fail for what it did not take."""
    (before, after), taken = run(1, "tests.gpu.scenarios_gpu:sleeps_beside_another", tiny)[0]
    assert taken == 1
    assert before == after
