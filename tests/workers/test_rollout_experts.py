"""Mixtures of experts in the engine: their samples, and the way of their weights from every training layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_batch, make_model
from processes import run
from rollout_scenarios import Setup, numbered_experts, prompts, sample, train_and_decode
from safetensors.torch import load_file, save_file
from scenarios import Cell
from test_rollout import TOLERANCE, log_probs_of, same_samples
from test_rollout_weights import check_moves

ROWS = prompts([40, 5, 33, 1])
SPREAD = Setup(tp=2, expert_parallel=True)
FAMILIES = pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Mixtral", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the same shapes as `model_folder` with other values."""
    root = tmp_path_factory.mktemp("others")
    return {family: make_model(root / family, family, seed=9) for family in ("Qwen3Moe", "Mixtral")}


@FAMILIES
def test_samples_of_a_mixture_do_not_depend_on_the_layout(model_folder: dict[str, Path], family: str) -> None:
    """ROL-01, PAR-08: slices of all experts or whole experts on each rank, with the log-probs of transformers."""
    folder = model_folder[family]
    first, *others = run(2, sample, folder, [Setup(), Setup(tp=2), SPREAD, Setup(pp=2)], ROWS)[0]
    assert log_probs_of(folder, ROWS, first) <= TOLERANCE
    assert all(same_samples(first, other) for other in others)


@FAMILIES
def test_weights_of_a_mixture_arrive_bit_exactly(
    model_folder: dict[str, Path], other_folder: dict[str, Path], family: str
) -> None:
    """SYN-01, PAR-08: the router and every expert, from shared, sliced and whole experts to each form of an engine."""
    cells = [Cell(ep=2), Cell(tp=2), Cell(tp=2, etp=2)]
    moved = check_moves(model_folder[family], other_folder[family], 2, cells, [Setup(), Setup(tp=2), SPREAD])
    received = {pair: metrics["reshard/received_bytes_max"] for pair, metrics in moved.items()}
    assert received[Cell(ep=2), SPREAD] == received[Cell(tp=2), SPREAD] == received[Cell(tp=2), Setup(tp=2)] == 0
    assert received[Cell(tp=2, etp=2), Setup(tp=2)] == 0 < received[Cell(tp=2, etp=2), SPREAD]


@FAMILIES
def test_four_ranks_with_experts_feed_engines_of_any_size(
    model_folder: dict[str, Path], other_folder: dict[str, Path], family: str
) -> None:
    """PAR-08."""
    cells = [Cell(tp=2, ep=2)] if family == "Qwen3Moe" else [Cell(tp=2, ep=2, etp=2), Cell(pp=2, ep=2)]
    setups = [Setup(), Setup(tp=4, expert_parallel=True)] + [Setup(tp=4)] * (family == "Mixtral")
    check_moves(model_folder[family], other_folder[family], 4, cells, setups)


@pytest.mark.parametrize("cell", [Cell(ep=2), Cell(tp=2, etp=2)])
@pytest.mark.parametrize("setup", [Setup(tp=2), SPREAD])
def test_every_expert_is_at_its_own_place(
    model_folder: dict[str, Path], tmp_path: Path, cell: Cell, setup: Setup
) -> None:
    """PAR-08: experts filled with their number; each number is there once a layer, and where it belongs."""
    target = make_model(tmp_path / "numbered", "Qwen3Moe")
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.fill_(float(name.split(".")[5]))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    everywhere = run(2, numbered_experts, model_folder["Qwen3Moe"], target, cell, setup)
    for layer in range(4):
        held = [sorted(expert for at, expert in found if at == layer) for found in everywhere]
        assert held == ([list(range(4)), list(range(4, 8))] if setup.expert_parallel else [list(range(8))] * 2)
    assert all(set(values) == {float(expert)} for found in everywhere for (_, expert), values in found.items())
    # Gate, up and down of each.
    assert all(len(values) == 3 for found in everywhere for values in found.values())


def test_an_engine_of_experts_decodes_like_the_trainer_after_large_updates(
    model_folder: dict[str, Path], tmp_path: Path
) -> None:
    """SYN-01: three rounds of update, transfer and greedy decoding against the trainer's exported weights."""
    from transformers import AutoModelForCausalLM

    mini = make_batch([(3, 7), (6, 2), (2, 1), (9, 4)])
    args = (model_folder["Qwen3Moe"], tmp_path, Cell(ep=2), SPREAD, ROWS, mini)
    for rows, folder, ok, _ in run(2, train_and_decode, *args)[0]:
        assert ok == 1.0
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for row, prompt in zip(ROWS.row_ids, ROWS["prompt_ids"].rows(), strict=True):
            ids = torch.tensor(rows[row][0])
            with torch.no_grad():
                logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
            assert torch.equal(logits.argmax(-1), ids)
