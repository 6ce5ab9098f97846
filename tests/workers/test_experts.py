"""Mixtures of experts against transformers: log-probs, updates and folders in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_model
from processes import run
from safetensors.torch import load_file
from scenarios import Cell, critic_cells, export_cells, update_cells, value_batch
from test_log_probs import check as check_log_probs
from test_update import CONFIG, hugging_face_update, with_old_log_probs
from test_update import check as check_update

from flowrl.protocol import DataProto

TWO = [Cell(ep=2), Cell(etp=2), Cell(tp=2), Cell(tp=2, etp=2), Cell(tp=2, ep=2), Cell(pp=2), Cell(budget=24)]
FOUR = [Cell(tp=2, ep=2), Cell(tp=2, ep=2, etp=2), Cell(tp=2, ep=4), Cell(pp=2, ep=2), Cell(tp=4, ep=2, etp=2)]
SHARDED = [Cell(ep=2, distributed_optimizer=True), Cell(tp=2, ep=2, distributed_optimizer=True)]
FAMILIES = pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])


@FAMILIES
def test_mixtures_give_the_log_probs_of_transformers(
    model_folder: dict[str, Path], batch: DataProto, family: str
) -> None:
    """ROL-01, PAR-08: one process, and every way to use two."""
    check_log_probs(model_folder[family], batch, 1, [Cell(), Cell(budget=24)])
    check_log_probs(model_folder[family], batch, 2, TWO)


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_mixtures_on_four_ranks_give_the_log_probs_of_transformers(
    model_folder: dict[str, Path], batch: DataProto, family: str
) -> None:
    check_log_probs(model_folder[family], batch, 4, FOUR)


def test_weights_of_experts_need_not_be_normalised(tmp_path: Path, batch: DataProto) -> None:
    check_log_probs(make_model(tmp_path / "model", "Qwen3Moe", norm_topk_prob=False), batch, 1, [Cell()])


@pytest.mark.parametrize(
    ("world_size", "family", "cells"),
    [
        (1, "Qwen3Moe", [Cell(), Cell(budget=13)]),
        (2, "Qwen3Moe", [*TWO, *SHARDED]),
        (2, "Mixtral", [Cell(ep=2, budget=13), Cell(tp=2, ep=2)]),
        pytest.param(4, "Qwen3Moe", FOUR, marks=pytest.mark.slow),
        pytest.param(4, "Mixtral", FOUR, marks=pytest.mark.slow),
    ],
)
def test_update_of_a_mixture_does_not_depend_on_the_layout(
    model_folder: dict[str, Path], batch: DataProto, world_size: int, family: str, cells: list[Cell]
) -> None:
    """ALG-01, PAR-08: gradients of router, norms and experts, their norm, and the weights after one step of AdamW."""
    ready = with_old_log_probs(batch)
    expected = hugging_face_update(model_folder[family], ready)
    for result in run(world_size, update_cells, model_folder[family], cells, ready, CONFIG):
        for cell, one in zip(cells, result, strict=True):
            check_update(one, expected, cell)


def test_a_critic_with_experts_learns_the_same_in_every_layout(model_folder: dict[str, Path]) -> None:
    cells = [Cell(), Cell(ep=2), Cell(tp=2, ep=2), Cell(tp=2, etp=2)]
    first, *others = run(2, critic_cells, model_folder["Qwen3Moe"], cells, value_batch())[0]
    for cell, other in zip(cells[1:], others, strict=True):
        for left, right in zip(first["values"], other["values"], strict=True):
            assert (left - right).abs().max() <= 1e-5, cell
        for name, weight in first["weights"].items():
            assert (weight - other["weights"][name]).norm() <= 1e-5 * weight.norm(), (cell, name)


@FAMILIES
def test_a_mixture_comes_out_as_it_went_in(model_folder: dict[str, Path], tmp_path: Path, family: str) -> None:
    """PAR-08: bit for bit, whatever the split of the experts."""
    cells = [Cell(), Cell(ep=2), Cell(tp=2, etp=2), Cell(tp=2, ep=2), Cell(pp=2)]
    run(2, export_cells, model_folder[family], cells, tmp_path)
    expected = load_file(model_folder[family] / "model.safetensors")
    for number, cell in enumerate(cells):
        files = (tmp_path / str(number)).glob("*.safetensors")
        written = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert set(written) == set(expected)
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items()), cell
