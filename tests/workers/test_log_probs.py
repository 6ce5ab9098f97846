from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_model
from processes import run
from scenarios import Cell, log_probs_cells

from flowrl.algorithms.distributions import log_probs_and_entropy
from flowrl.protocol import DataProto

TEMPERATURE = 0.7
TOLERANCE = 1e-4


def hugging_face(folder: Path, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropy) of all response tokens, each row alone and unpadded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        parts.append(log_probs_and_entropy(logits, response, TEMPERATURE, logits.shape[-1]))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def check(folder: Path, batch: DataProto, world_size: int, cells: list[Cell]) -> None:
    expected = hugging_face(folder, batch)
    for result in run(world_size, log_probs_cells, folder, cells, batch, TEMPERATURE):
        for cell, got in zip(cells, result, strict=True):
            for name, left, right in zip(("log-probs", "entropy"), got, expected, strict=True):
                assert (left - right).abs().max() <= TOLERANCE, (cell, name)


def test_one_process_gives_the_log_probs_of_transformers(model_folder: dict[str, Path], batch: DataProto) -> None:
    """ROL-01: at a temperature, whatever the micro-batches."""
    for family in model_folder:
        check(model_folder[family], batch, 1, [Cell(), Cell(budget=24)])


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "tied"])
def test_tensor_and_pipeline_parallel_layouts_give_the_same_log_probs(
    model_folder: dict[str, Path], batch: DataProto, family: str
) -> None:
    """PAR-05 (the vocabulary 131 is padded), PAR-03 (rows come back in input order), BAT-01 (five rows over two)."""
    check(
        model_folder[family],
        batch,
        2,
        [Cell(tp=2), Cell(pp=2, budget=24), Cell(pp=2, vpp=2, budget=24), Cell(budget=24)],
    )


def test_two_by_two_layout_gives_the_same_log_probs(model_folder: dict[str, Path], batch: DataProto) -> None:
    check(model_folder["Qwen3"], batch, 4, [Cell(tp=2, pp=2), Cell(pp=2, first_stage_layers=1, budget=24)])


def test_more_ranks_than_key_value_heads_give_the_same_log_probs(
    model_folder: dict[str, Path], batch: DataProto
) -> None:
    """PAR-04."""
    check(model_folder["Qwen3"], batch, 4, [Cell(tp=4)])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    ],
    ids=["linear", "llama3"],
)
def test_stretched_rotary_frequencies_agree_with_transformers(
    tmp_path: Path, batch: DataProto, rope: dict[str, Any]
) -> None:
    check(make_model(tmp_path / "model", rope_parameters=rope), batch, 1, [Cell()])


def test_dropout_of_the_model_config_is_off(tmp_path: Path, batch: DataProto) -> None:
    """NUM-04."""
    check(make_model(tmp_path / "model", attention_dropout=0.1), batch, 1, [Cell()])
