"""Weights from an actor of one layout into engines of another, with real Megatron-core and vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_batch, make_model
from processes import run
from rollout_scenarios import (
    Setup,
    corrupted,
    move,
    move_in_small_buckets,
    prompts,
    refusals,
    repeat_moves,
    train_and_decode,
)
from scenarios import Cell

from flowrl.protocol import DataProto

ROWS = prompts([40, 5, 33, 1])


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the same shapes as `model_folder` with other values."""
    root = tmp_path_factory.mktemp("others")
    names = {"Llama": {}, "Qwen2": {}, "Qwen3": {}, "tied": {"tie_word_embeddings": True}}
    return {
        name: make_model(root / name, "Llama" if name == "tied" else name, seed=9, **overrides)
        for name, overrides in names.items()
    }


def check_moves(
    start: Path, target: Path, world: int, cells: list[Cell], setups: list[Setup]
) -> list[dict[str, float]]:
    """Bit-exact against the folder; the same answers as a fresh engine, prompts longer than a cache block included."""
    figures = {}
    for result in run(world, move, start, target, cells, setups, ROWS):
        for (cell, setup), moved in result.items():
            assert moved.wrong == [], (cell, setup)
            assert moved.metrics["reshard/fingerprint_ok"] == 1.0
            assert moved.metrics["reshard/received_bytes_max"] == moved.metrics["reshard/bound_bytes_max"], (
                cell,
                setup,
            )
            answers, fresh = ({row: line[0] for row, line in rows.items()} for rows in (moved.rows, moved.fresh_rows))
            assert answers == fresh, (cell, setup)
            figures[cell, setup] = moved.metrics
    return figures


CELLS = [Cell(), Cell(tp=2), Cell(pp=2)]
SETUPS = [Setup(), Setup(tp=2), Setup(pp=2)]


def test_weights_arrive_bit_exactly_for_any_pair_of_small_layouts(
    model_folder: dict[str, Path], other_folder: dict[str, Path]
) -> None:
    """SYN-01: no engine keeps old weights or cached keys and values of them. Nothing travels where nothing need."""
    half = Setup(dtype="bfloat16")
    moved = check_moves(model_folder["Llama"], other_folder["Llama"], 2, CELLS, [*SETUPS, half])
    received = {pair: metrics["reshard/received_bytes_max"] for pair, metrics in moved.items()}
    assert received[Cell(tp=2), Setup(tp=2)] == received[Cell(pp=2), Setup(pp=2)] == 0
    assert all(received[Cell(), setup] == 0 for setup in SETUPS), "replicas hold everything"
    assert 2 * received[Cell(tp=2), half] == received[Cell(tp=2), Setup()] > 0, "rounded before they travel"


def test_tied_weights_arrive_bit_exactly(model_folder: dict[str, Path], other_folder: dict[str, Path]) -> None:
    """The embedding is also the head, and a later pipeline stage has its own copy of it, on both sides."""
    check_moves(model_folder["tied"], other_folder["tied"], 2, CELLS[1:], SETUPS[1:])


@pytest.mark.parametrize("train", [Cell(tp=2, pp=2)])
def test_four_ranks_of_tensor_and_pipeline_training_feed_one_engine_of_four(
    model_folder: dict[str, Path], other_folder: dict[str, Path], train: Cell
) -> None:
    """Two key/value heads over four ranks: each head lives twice."""
    check_moves(model_folder["tied"], other_folder["tied"], 4, [train], [Setup(tp=4)])


def test_temporary_memory_is_two_buckets_whatever_the_model(
    model_folder: dict[str, Path], other_folder: dict[str, Path]
) -> None:
    """One buffer to send and one to receive, at most a bucket each; the embedding is larger than a bucket."""
    bucket = 8192
    args = (model_folder["Llama"], other_folder["Llama"], Cell(tp=2), Setup(pp=2), bucket)
    for wrong, report in run(2, move_in_small_buckets, *args):
        assert wrong == []
        assert report.received_bytes == report.bound_bytes > 10 * bucket
        assert report.num_collectives >= report.received_bytes / bucket
        assert 0 < report.peak_extra_bytes <= 2 * bucket


def test_ten_transfers_of_the_same_weights_change_no_bit_of_the_answers(model_folder: dict[str, Path]) -> None:
    """SYN-03: repeated moves; versions count up; parameters, aliases and buffers keep place and bits."""
    found = run(2, repeat_moves, model_folder["tied"], Cell(tp=2), Setup(pp=2), ROWS)
    assert all(verdicts == [1.0] * 10 and changed == [] for _, verdicts, changed in found)
    rows = found[0][0]
    for number, answer in enumerate(rows):
        assert {row: line[:3] for row, line in answer.items()} == {row: line[:3] for row, line in rows[0].items()}
        assert {line[3] for line in answer.values()} == {number}


def test_one_changed_bit_is_found_and_named_on_every_rank(model_folder: dict[str, Path]) -> None:
    """SYN-01: rank, tensor and parameter are in the error."""
    parameter = "model.layers.1.self_attn.qkv_proj.weight"
    for message in run(2, corrupted, model_folder["Llama"], Cell(tp=2), Setup(tp=2), parameter):
        assert "in 1 regions" in message and "rank 1: model.layers.1.self_attn.q_proj.weight" in message
        assert parameter in message


def test_another_name_or_dtype_of_a_tensor_is_an_error(model_folder: dict[str, Path]) -> None:
    """SYN-03: names and dtypes are in the message."""
    renamed, half, quantised, mixed = run(1, refusals, model_folder["Llama"])[0]
    assert "1 missing: model.embed_tokens.weight; 1 unexpected: model.embedding" in renamed
    embedding = "the trainer holds model.embed_tokens.weight in"
    assert f"{embedding} torch.float16; weights move between torch.bfloat16 and torch.float32 only" in half
    assert f"{embedding} torch.int8" in quantised
    assert "several dtypes: model.embed_tokens.weight in torch.bfloat16, model.layers.0." in mixed


@pytest.mark.parametrize("cell", [Cell(tp=2), Cell(pp=2, distributed_optimizer=True)], ids=["plain", "distributed"])
def test_the_engine_decodes_like_the_trainer_after_large_updates(
    model_folder: dict[str, Path], tmp_path: Path, cell: Cell
) -> None:
    """SYN-01: three rounds of update, transfer and greedy decoding against the trainer's exported weights, with an engine
    that does not sleep, one that is awake again when weights arrive, and one whose cache is not."""
    from transformers import AutoModelForCausalLM

    prompts_only: DataProto = ROWS
    mini = make_batch([(3, 7), (6, 2), (2, 1), (9, 4)])
    args = (model_folder["Llama"], tmp_path, cell, Setup(), prompts_only, mini)
    decoded = []
    refused = []
    for rows, folder, ok, messages in run(2, train_and_decode, *args)[0]:
        assert ok == 1.0
        refused.append(messages)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for row, prompt in zip(prompts_only.row_ids, prompts_only["prompt_ids"].rows(), strict=True):
            ids = torch.tensor(rows[row][0])
            with torch.no_grad():
                logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
            assert torch.equal(logits.argmax(-1), ids)
        decoded.append({row: line[0] for row, line in rows.items()})
    assert decoded[0] != decoded[1] != decoded[2], "the updates were too small to be seen"
    asleep = ["call rollout.wake(what='weights') before", "weights and kv_cache sleep; call rollout.wake() before"]
    lost, uncached = (
        "lost its weights in rollout.sleep(); call rollout.receive_weights(actor)",
        "the rollout's kv_cache sleep",
    )
    for messages, expected in zip(refused, ([], [*asleep, lost], [*asleep, uncached, uncached]), strict=True):
        assert len(messages) == len(expected)
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages
