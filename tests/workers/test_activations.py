"""What `dry_run` counts of a pass without gradients is what Megatron-core's layers hold."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch, make_model
from processes import run
from scenarios import Cell, actor, call

from flowrl.config.memory import WIDTHS, _forward_elements
from flowrl.config.model_shape import read_model_shape
from flowrl.config.schema import TrainLayout
from flowrl.resharding.measure.meter import Meter

HIDDEN, ROWS = 128, ((16, 48),) * 32
ALONE = TrainLayout(tp=1, pp=1, vpp=1, first_stage_layers=None, cp=1, ep=1, etp=1)


def held_by_a_token(folder: Path) -> float:
    """Elements that are there at once for every token of a micro-batch."""
    role, batch = actor(folder, Cell(budget=1 << 20)), make_batch(list(ROWS))
    call(role, role.log_probs, batch)
    there = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and thing.layout == torch.strided]
    with Meter(there) as meter:
        call(role, role.log_probs, batch)
    return meter.peak_bytes / 4 / sum(map(sum, ROWS))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"intermediate_size": 3 * HIDDEN}),
        ("Qwen3Moe", {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": HIDDEN // 2}),
        ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 3 * HIDDEN}),
    ],
    ids=["dense", "many experts", "wide experts"],
)
def test_a_forward_pass_holds_what_is_counted(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_model(tmp_path / family, family, hidden_size=HIDDEN, num_hidden_layers=2, **settings)
    counted = _forward_elements(read_model_shape(folder), ALONE, WIDTHS["cpu"])
    assert counted == pytest.approx(run(1, held_by_a_token, folder)[0], rel=0.1)
