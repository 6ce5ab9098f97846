"""The rollout role with real engines: distribution, seeds, stopping, ids, limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCAB
from processes import run
from rollout_scenarios import (
    Rows,
    Setup,
    errors_of_bad_rows,
    prompts,
    random_state_around_an_engine,
    sample,
    sample_in_other_orders,
    wait_for_a_silent_peer,
)
from safetensors.torch import load_file, save_file

from flowrl.protocol import DataProto
from flowrl.workers import vllm_private
from flowrl.workers.vllm_private_tame import beside_others

TOLERANCE = 1e-4
LENGTHS = [1, 5, 48, 3, 17]


@pytest.fixture(scope="module")
def rows() -> DataProto:
    return prompts(LENGTHS)


def log_probs_of(folder: Path, batch: DataProto, found: Rows, temperature: float = 1.0, num_ids: int = VOCAB) -> float:
    """Largest difference between the engine's log-probs and those of transformers for the same ids."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    worst = 0.0
    for row, prompt in zip(batch.row_ids, batch["prompt_ids"].rows(), strict=True):
        ids, logs, *_ = found[row]
        with torch.no_grad():
            logits = model(torch.cat([prompt, torch.tensor(ids)])[None]).logits[0, len(prompt) - 1 : -1, :num_ids]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(logs)).abs().max()))
    return worst


def same_samples(left: Rows, right: Rows) -> bool:
    close = all(torch.allclose(torch.tensor(left[r][1]), torch.tensor(right[r][1]), atol=TOLERANCE) for r in left)
    return close and {r: line[0] for r, line in left.items()} == {r: line[0] for r, line in right.items()}


def with_weights(folder: Path, out: Path, change: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(folder, out)
    save_file(load_file(folder / "model.safetensors") | change, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_the_private_names_of_vllm_are_all_there() -> None:
    assert run(1, vllm_private.missing_names) == [[]]


def test_a_vanished_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_private, "PRIVATE_NAMES", ("torch:nn.Linear", "torch:nn.Gone", "torch.gone:x"))
    monkeypatch.setattr(vllm_private, "CPU_NAMES", ())
    assert vllm_private.missing_names() == ["torch:nn.Gone", "torch.gone:x"]


def test_memory_that_others_take_is_no_failure_of_a_sleep_and_everything_else_is() -> None:
    def sleep(worker: list[int], level: int = 1) -> None:
        worker.append(level)
        raise AssertionError(worker[0])

    sleeps = beside_others(sleep)
    worker: list[Any] = ["Memory usage increased after sleeping."]
    sleeps(worker, level=2)
    assert worker[1:] == [2]
    with pytest.raises(AssertionError, match="CuMem allocator"):
        sleeps(["CuMem allocator can only be used for one instance per process."])


@pytest.mark.parametrize("family", ["Llama", "tied"])
def test_samples_and_log_probs_do_not_depend_on_the_layout(
    model_folder: dict[str, Path], rows: DataProto, family: str
) -> None:
    """ROL-01: TP, PP and replicas sample the same ids, with the log-probs of transformers."""
    folder = model_folder[family]
    replicas, tensor, pipeline = run(2, sample, folder, [Setup(), Setup(tp=2), Setup(pp=2)], rows)[0]
    assert log_probs_of(folder, rows, replicas) <= TOLERANCE
    assert same_samples(replicas, tensor) and same_samples(replicas, pipeline)
    assert all(len(line[0]) == 16 and line[2] == "length" and line[3] == 0 for line in replicas.values())


@pytest.mark.slow
def test_samples_of_all_families_do_not_depend_on_larger_layouts(
    model_folder: dict[str, Path], rows: DataProto
) -> None:
    layouts = [(1, 1), (2, 1), (2, 2), (4, 1), (1, 4)]
    setups = [Setup(tp=tp, pp=pp, max_response_tokens=32) for tp, pp in layouts]
    for folder in model_folder.values():
        first, *others = run(4, sample, folder, setups, rows)[0]
        assert log_probs_of(folder, rows, first) <= TOLERANCE
        assert all(same_samples(first, other) for other in others)


def test_samples_do_not_depend_on_order_or_company(model_folder: dict[str, Path], rows: DataProto) -> None:
    """Seeds of all 64 bits are accepted; no rows are no work."""
    first, backwards, alone, nothing = run(1, sample_in_other_orders, model_folder["Llama"], rows)[0]
    assert same_samples(first, backwards) and same_samples(first, alone)
    assert nothing == {}


def test_log_probs_are_those_of_the_sampling_temperature(model_folder: dict[str, Path], rows: DataProto) -> None:
    """ROL-01: at 0.5, 1.0 and 1.7; the ratio to a full-vocabulary log-softmax of logits / T is 1."""
    temperatures = [0.5, 1.0, 1.7]
    found = run(1, sample, model_folder["Llama"], [Setup(temperature=t) for t in temperatures], rows)[0]
    for temperature, responses in zip(temperatures, found, strict=True):
        assert log_probs_of(model_folder["Llama"], rows, responses, temperature) <= TOLERANCE


def test_the_model_folder_has_no_say_in_sampling(
    model_folder: dict[str, Path], rows: DataProto, tmp_path: Path
) -> None:
    """ROL-02: a folder that asks for top_k=1, a penalty and a stop id samples like one that does not."""
    folder = tmp_path / "opinionated"
    shutil.copytree(model_folder["Llama"], folder)
    opinion = {"top_k": 1, "repetition_penalty": 1.3, "temperature": 0.1, "eos_token_id": list(range(VOCAB))}
    (folder / "generation_config.json").write_text(json.dumps(opinion))
    four = rows.rows([1]).repeat(4)
    four = four.drop("seeds").with_columns(seeds=torch.arange(4))
    found, plain = (run(1, sample, path, [Setup()], four)[0][0] for path in (folder, model_folder["Llama"]))
    assert found == plain
    assert len({tuple(line[0]) for line in found.values()}) == 4
    assert log_probs_of(folder, four, found) <= TOLERANCE


def test_truncated_sampling_gives_log_probs_of_the_truncated_distribution(
    model_folder: dict[str, Path], rows: DataProto
) -> None:
    """ROL-02: with top_k=1 every log-prob is 0, which is off the full distribution by the log of the kept mass."""
    found = run(1, sample, model_folder["Llama"], [Setup(top_k=1)], rows)[0][0]
    assert all(abs(value) < 1e-6 for line in found.values() for value in line[1])
    assert log_probs_of(model_folder["Llama"], rows, found) > 0.1


def test_ids_beyond_the_tokenizer_are_never_sampled(
    model_folder: dict[str, Path], rows: DataProto, tmp_path: Path
) -> None:
    """TOK-01: 131 rows of weights, 120 ids of the tokenizer, and a head that wants the other eleven."""
    head = load_file(model_folder["Llama"] / "model.safetensors")["lm_head.weight"].clone()
    head[120:] *= 30
    folder = with_weights(model_folder["Llama"], tmp_path / "eager", {"lm_head.weight": head})
    setups = [Setup(num_ids=120), Setup(tp=2, num_ids=120), Setup(pp=2, num_ids=120), Setup(num_ids=VOCAB)]
    limited, tensor, pipeline, free = run(2, sample, folder, setups, rows)[0]
    assert same_samples(limited, tensor) and same_samples(limited, pipeline)
    assert log_probs_of(folder, rows, limited, num_ids=120) <= TOLERANCE
    assert max(id for line in limited.values() for id in line[0]) < 120
    assert max(id for line in free.values() for id in line[0]) >= 120, "the model did not want these ids at all"


def test_a_response_is_what_was_sampled_up_to_the_first_stop_id(model_folder: dict[str, Path], rows: DataProto) -> None:
    """TOK-05, MSK-01, MSK-03: the stop id is part of the response, nothing is rewritten, the reason says which end."""
    free = run(1, sample, model_folder["Llama"], [Setup()], rows)[0][0]
    stops = (free["row0"][0][0], free["row3"][0][5])
    stopped = run(1, sample, model_folder["Llama"], [Setup(stops=stops)], rows)[0][0]
    for row, (ids, logs, reason, _) in stopped.items():
        sampled = free[row][0]
        end = next((place + 1 for place, token in enumerate(sampled) if token in stops), None)
        assert ids == sampled[:end] and len(logs) == len(ids)
        assert reason == ("length" if end is None else "stop")
    assert len(stopped["row0"][0]) == 1 and stopped["row0"][2] == "stop"
    assert {line[2] for line in stopped.values()} == {"stop", "length"}, "both ends should occur"


def test_an_illegal_prompt_is_named_and_the_engine_lives_on(model_folder: dict[str, Path], rows: DataProto) -> None:
    message, found = run(1, errors_of_bad_rows, model_folder["Llama"], prompts([3, 49]), rows)[0]
    assert "prompt of row row1 has 49 tokens; legal are 1 to data.max_prompt_tokens=48" in message
    assert len(found) == len(rows)


def test_an_engine_leaves_the_random_state_of_the_process_alone(model_folder: dict[str, Path]) -> None:
    assert run(1, random_state_around_an_engine, model_folder["Llama"])[0] == [True, True, True]


@pytest.mark.slow
def test_groups_of_vllm_wait_no_longer_than_the_default_group(tmp_path: Path) -> None:
    """A peer that hangs is an error after the collective timeout, not after vLLM's half an hour."""
    waited = run(2, wait_for_a_silent_peer, str(tmp_path / "store"), 8.0)[0]
    assert 7 < waited < 11
