from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowrl.builtin.arithmetic import eval_rows, score, train_rows
from flowrl.builtin.model import resolve_model, tiny_model
from flowrl.builtin.recipe import TinyRecipe
from flowrl.builtin.warm_start import accuracy, encode, spoil
from flowrl.config.model_shape import read_model_shape

QUICK = TinyRecipe(clean_steps=2, spoilt_steps=1)


@pytest.fixture(scope="module")
def tiny() -> Path:
    """In the user's cache like any run, so that it is made once for all tests and all runs."""
    return resolve_model("builtin:tiny", "~/.cache/flowrl")


def test_tiny_is_right_greedily_but_seldom_when_sampled(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    held_out = encode(eval_rows())
    generator = torch.Generator().manual_seed(7)
    assert accuracy(model, held_out, None) >= 0.75
    assert 0.10 <= accuracy(model, held_out.repeat(16, 1), generator) <= 0.45
    assert 0.10 <= accuracy(model, encode(train_rows()).repeat(4, 1), generator) <= 0.45


def test_tiny_loads_with_transformers_and_its_greedy_answers_score(tiny: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    rows = eval_rows()[:32]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    output = model.generate(**prompts, max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(output[:, 5:], skip_special_tokens=True)
    assert sum(score(row["prompt"], text, row) for row, text in zip(rows, texts, strict=True)) >= 24
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id


def test_tiny_has_the_announced_shape(tiny: Path) -> None:
    shape = read_model_shape(tiny)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.hidden_size) == (4, 2, 32, 64)
    assert (shape.num_layers, shape.max_positions, shape.tied) == (2, 128, False)
    assert 0.12e6 < shape.num_parameters < 0.14e6
    facts = json.loads((tiny / "warm_start.json").read_text())
    assert facts["greedy"] >= 0.75 and 0.10 <= facts["sampled"] <= 0.45


def test_making_it_is_deterministic_whatever_the_callers_seed(tmp_path: Path) -> None:
    heard: list[tuple[float, str]] = []
    one = tiny_model(tmp_path / "one", QUICK, lambda share, label: heard.append((share, label)))
    torch.manual_seed(4)
    two = tiny_model(tmp_path / "two", QUICK)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert heard[0][0] == 0.0 and heard[-1][0] == 1.0


def test_the_callers_random_state_and_threads_survive(tmp_path: Path) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    tiny_model(tmp_path, QUICK)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_another_recipe_gets_another_folder_and_a_made_one_is_kept(tmp_path: Path) -> None:
    first = tiny_model(tmp_path, QUICK)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert tiny_model(tmp_path, QUICK) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert dataclasses.replace(QUICK, seed=1).key != QUICK.key


def test_two_runs_at_once_make_it_once_and_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / f".{QUICK.key}.making-dead").mkdir()
    code = (
        "import sys, pathlib; from flowrl.builtin.model import tiny_model; from flowrl.builtin.recipe import TinyRecipe\n"
        "calls = []\n"
        "tiny_model(pathlib.Path(sys.argv[1]), TinyRecipe(clean_steps=2, spoilt_steps=1), lambda *a: calls.append(a))\n"
        "print(len(calls))"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    made = [int(run.communicate(timeout=120)[0]) for run in runs]
    assert sorted(made)[0] == 0 and sorted(made)[1] > 0
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == [QUICK.key]


def test_a_failed_making_leaves_no_folder(tmp_path: Path) -> None:
    def fail(share: float, label: str) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        tiny_model(tmp_path, QUICK, fail)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]


def test_spoilt_answers_are_near_misses_of_three_digits() -> None:
    clean = encode(train_rows() * 4)
    spoilt = spoil(clean, TinyRecipe(), torch.Generator().manual_seed(0))
    wrong = (spoilt != clean).any(dim=1)
    assert 0.62 < float(wrong.float().mean()) < 0.71
    assert torch.equal(spoilt[:, :5], clean[:, :5]) and torch.equal(spoilt[:, 8], clean[:, 8])
    place = torch.tensor([100, 10, 1])
    offset = ((spoilt[:, 5:8] - clean[:, 5:8]) * place).sum(dim=1)[wrong]
    assert offset.abs().min() >= 1 and offset.abs().max() <= 10
    assert int(spoilt[:, 5:8].min()) >= 3 and int(spoilt[:, 5:8].max()) <= 12


def test_other_paths_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such built-in model; known: builtin:tiny"):
        resolve_model("builtin:huge", tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        resolve_model("some-org/some-model", tmp_path)
    with pytest.raises(ValueError, match=r"has no config.json \(there is: nothing\)"):
        resolve_model(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_cache_that_cannot_be_written_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="model.cache_dir=.*choose another folder"):
        tiny_model(tmp_path / "file" / "cache", QUICK)


def test_a_cached_model_is_resolved_without_torch(tiny: Path) -> None:
    code = (
        "import sys; from flowrl.builtin.model import resolve_model; print(resolve_model('builtin:tiny', '~/.cache/flowrl'));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True).stdout
    assert output.strip() == str(tiny)
