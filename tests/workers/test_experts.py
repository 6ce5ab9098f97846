"""Mixtures of experts against transformers: log-probs, updates and folders in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import make_model
from processes import run
from safetensors.torch import load_file
from scenarios import OPTIM, Cell, bad_update, critic_cells, export_cells, update_cells, value_batch
from test_log_probs import check as check_log_probs
from test_update import CONFIG, hugging_face_update, with_old_log_probs
from test_update import check as check_update

from flowrl.protocol import DataProto
from flowrl.resharding.ranks import ParallelSizes
from flowrl.workers import megatron_private

TWO = [Cell(ep=2), Cell(etp=2), Cell(tp=2), Cell(tp=2, etp=2), Cell(tp=2, ep=2), Cell(pp=2), Cell(budget=24)]
TWO.append(Cell(pp=2, vpp=2, budget=24))
FOUR = [Cell(tp=2, ep=2), Cell(tp=2, ep=2, etp=2), Cell(tp=2, ep=4), Cell(pp=2, ep=2), Cell(tp=4, ep=2, etp=2)]
FOUR += [
    Cell(tp=2, pp=2, vpp=2, ep=2),
    Cell(tp=2, ep=2, beside=ParallelSizes(tp=4)),
    Cell(tp=2, ep=2, etp=2, beside=ParallelSizes(tp=4)),
    Cell(tp=2, ep=4, beside=ParallelSizes(tp=2, ep=2)),
]
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


def test_plain_and_distributed_optimizer_move_experts_alike_in_bfloat16(
    model_folder: dict[str, Path], batch: DataProto
) -> None:
    """CPU-02: with float32 gradients and moments, experts among shared and unshared weights. Without clipping, for the norm
    is summed in another order."""
    config = CONFIG | {"optim": replace(OPTIM, clip_grad=0.0)}
    layouts = [{"ep": 2}, {"tp": 2, "ep": 2}]
    cells = [Cell(**layout, dtype="bfloat16", distributed_optimizer=d) for layout in layouts for d in (False, True)]
    ready = with_old_log_probs(batch)
    results = run(2, update_cells, model_folder["Qwen3Moe"], cells, ready, config)[0]
    expected = hugging_face_update(model_folder["Qwen3Moe"], ready)
    for plain, sharded in zip(results[::2], results[1::2], strict=True):
        assert plain["metrics"]["policy/grad_norm"] == pytest.approx(expected.grad_norm, rel=0.1)
        assert all(torch.equal(weight, sharded["weights"][name]) for name, weight in plain["weights"].items())


def test_a_replica_without_rows_still_serves_its_experts(model_folder: dict[str, Path], batch: DataProto) -> None:
    """PAR-02: one row over two replicas that share the experts."""
    ready = with_old_log_probs(batch).rows([0])
    expected = hugging_face_update(model_folder["Qwen3Moe"], ready)
    result = run(2, update_cells, model_folder["Qwen3Moe"], [Cell(ep=2)], ready, CONFIG)[0][0]
    check_update(result, expected, Cell(ep=2))


def test_a_gradient_that_is_not_a_number_changes_no_expert(model_folder: dict[str, Path], batch: DataProto) -> None:
    """NUM-01: on the last rank only, whose tokens visit experts of both; skipped on both."""
    for result in run(2, bad_update, model_folder["Qwen3Moe"], Cell(ep=2), batch):
        assert result["same"] and result["finite"]
        assert result["metrics"]["policy/skipped_steps"] == 1 and result["after"]["policy/optimizer_steps"] == 1


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
    cells = [Cell(), Cell(ep=2), Cell(tp=2, etp=2), Cell(tp=2, ep=2), Cell(pp=2), Cell(pp=2, vpp=2)]
    run(2, export_cells, model_folder[family], cells, tmp_path)
    expected = load_file(model_folder[family] / "model.safetensors")
    for number, cell in enumerate(cells):
        files = (tmp_path / str(number)).glob("*.safetensors")
        written = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert set(written) == set(expected)
        assert all(torch.equal(written[name], tensor) for name, tensor in expected.items()), cell


def test_what_experts_give_for_a_token_is_added_in_float32_and_rounded_once() -> None:
    """Sixteenths, whose sums float32 holds and bfloat16 does not."""
    count, experts, visited, hidden = 50, 12, 8, 16
    routing = torch.rand(count, experts).argsort(1).argsort(1) < visited
    tokens = torch.arange(count).expand(experts, count).masked_select(routing.T)
    rows = (torch.randint(-999, 999, (count * visited, hidden)) / 16).bfloat16().requires_grad_()
    added = megatron_private._add_in_order(rows, tokens, torch.Size([count, hidden]), routing_map=routing, fused=False)
    exact = torch.zeros(count, hidden).index_add(0, tokens, rows.detach().float())
    assert torch.equal(added, exact.bfloat16())
    # On a CPU Megatron-core's own does the same.
    assert torch.equal(megatron_private._unpermute(rows, tokens, torch.Size([count, hidden])), added)
    (gradient,) = torch.autograd.grad(added, rows, outer := torch.randn(count, hidden).bfloat16())
    assert torch.equal(gradient, outer[tokens])


def test_no_tokens_for_experts_give_nothing() -> None:
    nothing, tokens = torch.zeros(0, 16), torch.zeros(0, dtype=torch.int64)
    added = megatron_private._add_in_order(nothing, tokens, torch.Size([0, 16]))
    assert added.shape == (0, 16)
