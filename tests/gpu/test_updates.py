"""An update on a GPU is the update of the CPU, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios import Cell

from flowrl.protocol import DataProto
from tests.gpu.ranks import run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_cpu(tiny: Path, batch: DataProto) -> dict[str, Any]:
    found: dict[str, Any] = run(1, "tests.gpu.scenarios_gpu:updates", tiny, [Cell()], batch, device="cpu")[0][0]
    return found


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("policy/loss", "policy/grad_norm", "policy/entropy"):
        assert abs(found["metrics"][name] - expected["metrics"][name]) <= 1e-4 * abs(expected["metrics"][name]) + 1e-6
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-4, msg=name)


def test_one_gpu_learns_what_a_cpu_learns(tiny: Path, batch: DataProto, on_cpu: dict[str, Any]) -> None:
    cells = [Cell(), Cell(budget=24), Cell(recompute=True), Cell(distributed_optimizer=True)]
    for found in run(1, "tests.gpu.scenarios_gpu:updates", tiny, cells, batch)[0]:
        expected = on_cpu if found["gradients"] else on_cpu | {"gradients": {}}
        check(found, expected)


def test_two_ranks_learn_what_one_cpu_learns(tiny: Path, batch: DataProto, on_cpu: dict[str, Any]) -> None:
    """PAR-01: tensor and pipeline parallel."""
    for results in run(2, "tests.gpu.scenarios_gpu:updates", tiny, [Cell(tp=2), Cell(pp=2)], batch):
        for found in results:
            check(found, on_cpu)
