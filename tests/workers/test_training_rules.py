"""What an update promises beside its numbers: skipped, flat, empty and on-policy steps; the critic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_batch
from processes import run
from scenarios import (
    OPTIM,
    Cell,
    bad_update,
    critic_cells,
    flat_update,
    on_policy,
    strayed,
    tied_copies,
    update_cells,
    value_batch,
)

from flowrl.protocol import DataProto, Ragged


@pytest.mark.parametrize(
    "cell",
    [
        Cell(),
        Cell(tp=2),
        Cell(dtype="bfloat16", pp=2, vpp=2),
        Cell(distributed_optimizer=True),
        Cell(dtype="bfloat16", distributed_optimizer=True),
        Cell(dtype="bfloat16", tp=2),
    ],
    ids=["dp2", "tp2", "bf16-pp2vpp2", "sharded", "bf16-sharded", "bf16-tp2"],
)
def test_gradient_that_is_not_finite_skips_the_step_on_all_ranks(
    model_folder: dict[str, Path], batch: DataProto, cell: Cell
) -> None:
    """NUM-01: weights and moments stay, bit for bit; it is counted, and the first bad tensor is named."""
    results = run(2, bad_update, model_folder["Llama"], cell, batch)
    for result in results:
        assert result["same"] and result["finite"]
        assert result["metrics"]["policy/skipped_steps"] == 1 and result["metrics"]["policy/optimizer_steps"] == 0
        assert "policy/grad_norm" not in result["metrics"]
        assert result["after"]["policy/skipped_steps"] == 0 and result["after"]["policy/optimizer_steps"] == 1
    assert len(results[0]["log"]) == 1
    assert "optimizer step 2 skipped" in results[0]["log"][0] and ".weight on rank" in results[0]["log"][0]


@pytest.mark.parametrize("cell", [Cell(), Cell(tp=2, dtype="bfloat16")], ids=["dp2", "bf16-tp2"])
def test_flat_advantages_leave_the_weights_bit_for_bit(
    model_folder: dict[str, Path], batch: DataProto, cell: Cell
) -> None:
    """ALG-02: even where moments of earlier steps would still move them."""
    for result in run(2, flat_update, model_folder["Llama"], cell, batch):
        assert result["same"]
        assert result["metrics"]["policy/grad_norm"] == 0 and result["metrics"]["policy/skipped_steps"] == 0


def test_mini_batch_without_any_response_token_does_nothing(model_folder: dict[str, Path]) -> None:
    """REW-06, MSK-01: loss 0, no division by zero, no step."""
    lengths = [(3, 0), (2, 0)]
    empty = make_batch(lengths).with_columns(old_log_probs=Ragged.from_rows([torch.empty(0), torch.empty(0)]))
    cells = [Cell(), Cell(tp=2)]
    for result in run(2, update_cells, model_folder["Llama"], cells, empty, {})[0]:
        metrics = result["metrics"]
        assert metrics["policy/loss"] == 0
        assert metrics["policy/optimizer_steps"] == 0 and metrics["policy/skipped_steps"] == 0


def test_first_update_of_fresh_log_probs_has_ratio_one_and_the_second_has_not(
    model_folder: dict[str, Path], batch: DataProto
) -> None:
    """NUM-04, ROL-01: ratio 1, nothing clipped, KL 0 to the old policy and to the reference; then the policy moved."""
    cells = [Cell(tp=2), Cell(pp=2, budget=13), Cell()]
    for first, second in run(2, on_policy, model_folder["Qwen3"], cells, batch)[0]:
        assert first["policy/ratio_min"] == pytest.approx(1, abs=1e-5)
        assert first["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert first["policy/clip_fraction"] == 0
        assert first["kl/approx"] == pytest.approx(0, abs=1e-6)
        assert first["kl/loss"] == pytest.approx(0, abs=1e-6)
        assert second["policy/ratio_max"] > 1.001 and second["kl/approx"] > 1e-6 and second["kl/loss"] > 1e-6
        assert second["policy/lr"] == pytest.approx(OPTIM.lr)
        assert 0 < second["policy/entropy"] < 5


def test_both_copies_of_a_tied_embedding_stay_bit_equal(model_folder: dict[str, Path], batch: DataProto) -> None:
    """PAR-07."""
    first, last = run(2, tied_copies, model_folder["tied"], batch)
    assert len(first) == 1 and len(last) == 1 and torch.equal(first[0], last[0])


@pytest.mark.parametrize("cell", [Cell(), Cell(tp=2)], ids=["dp2", "tp2"])
def test_one_bit_of_one_replica_is_found(model_folder: dict[str, Path], cell: Cell) -> None:
    """PAR-10: the checksum that every test of an update compares across ranks; norms are on every rank."""
    name = "model.layers.2.input_layernorm.weight"
    for message in run(2, strayed, model_folder["Llama"], cell, name):
        assert message.startswith("rank 1 differs in ") and name in message


def test_critic_starts_at_zero_and_learns_the_same_in_every_layout(model_folder: dict[str, Path]) -> None:
    """The trunk learns from the second step on: a head at zero hides it in the first."""
    cells = [Cell(), Cell(budget=8), Cell(tp=2), Cell(pp=2), Cell(pp=2, vpp=2)]
    for folder in ("Llama", "tied"):
        results = run(2, critic_cells, model_folder[folder], cells, value_batch())[0]
        base = results[0]
        assert bool((base["values"][0] == 0).all()) and bool((base["values"][2] != 0).all())
        assert base["metrics"][0]["value/loss"] > 0 and base["metrics"][1]["value/optimizer_steps"] == 1
        for cell, result in zip(cells[1:], results[1:], strict=True):
            for got, expected in zip(result["values"], base["values"], strict=True):
                assert torch.allclose(got, expected, atol=1e-5), cell
            for got, expected in zip(result["metrics"], base["metrics"], strict=True):
                assert got == pytest.approx(expected, rel=1e-4, abs=1e-7), cell
            for name, weight in result["weights"].items():
                assert (weight - base["weights"][name]).norm() <= 1e-5 * weight.norm(), (cell, name)
