"""Comparing two runs, on folders made by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from flowrl.checkpoints.files import Files
from flowrl.checkpoints.manifest import digest_file, write_manifest
from flowrl.checkpoints.state import RoleState, RunState
from flowrl.compare_runs import compare, main

TENSORS = {"weight.a": torch.arange(6.0).reshape(2, 3), "exp_avg.a": torch.zeros(2, 3), "weight.b": torch.ones(())}


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Writer(dcp.FileSystemWriter):
    """Like Megatron-core's, it does not note where it wrote."""

    def storage_meta(self) -> None:
        return None


def write_checkpoint(run: Path, step: int, tensors: dict[str, torch.Tensor], **state: object) -> None:
    folder = run / "checkpoints" / f"step_{step}"
    shutil.rmtree(folder, ignore_errors=True)
    dcp.save(dict(tensors), storage_writer=Writer(folder / "actor"), no_dist=True)
    fields = {
        "step": step, "run_id": run.name, "total_steps": 9, "kl_coefficient": 0.1, "data": {"a": "b"},
        "skipped_in_a_row": {}, "roles": {"actor": RoleState("tp 1, pp 1", 1)}, "versions": {},
    }  # fmt: skip
    (folder / "state.json").write_text(RunState(**(fields | state)).to_json())  # type: ignore[arg-type]
    for name in ("common.pt", "metadata.json"):
        (folder / "actor" / name).touch()
    (folder / "config.yaml").write_text(f"run: {run.name}\n")
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    write_manifest(Files(), folder, [digest_file(folder, path) for path in files])


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal runs of three steps, which took different times and have different names."""
    folders = (tmp_path / "A", tmp_path / "B")
    for number, folder in enumerate(folders):
        times = {"seconds/total": 1.0 + number, "tokens_per_second": 9.0 * number, "memory/update/peak_bytes": number}
        write_lines(folder / "metrics.jsonl", [{"step": n, "reward/mean": n / 3, **times} for n in range(4)])
        for step in range(1, 4):
            write_lines(folder / "samples" / f"step_{step}.jsonl", [{"id": "x", "response": "y"}] * 2)
        write_checkpoint(folder, 2, TENSORS)
        (folder / "export" / "step_2").mkdir(parents=True)
        save_file({"a": TENSORS["weight.a"]}, folder / "export" / "step_2" / "model.safetensors")
        (folder / "export" / "step_2" / "config.json").write_text("{}")
    return folders


def test_equal_runs_are_bit_identical_whatever_they_took(runs: tuple[Path, Path]) -> None:
    found = compare(*runs)
    assert found.differences == []
    expected = "bit-identical: steps 0-3, 6 samples, checkpoint step_2 (actor 3 tensors), export step_2 (1 tensors)"
    assert expected in found.table()
    assert "seconds/..." in found.table()


Harm = Callable[[Path], object]


def change(step: int, **metrics: object) -> Harm:
    def harm(run: Path) -> None:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows[step] |= metrics
        write_lines(run / "metrics.jsonl", rows)

    return harm


def tensors(**changed: torch.Tensor) -> Harm:
    return lambda run: write_checkpoint(run, 2, TENSORS | {k.replace("__", "."): v for k, v in changed.items()})


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (change(2, **{"reward/mean": 0.5}), ["step 2, reward/mean: 0.666", "0.5 in B", "relative difference 2.5e-01"]),
        (change(1, **{"kl/reference": 0.0}), ["step 1, kl/reference: absent in A, 0.0 in B"]),
        (change(1, **{"reward/mean": None}), ["step 1, reward/mean: 0.333", "None in B"]),
        (
            lambda run: write_lines(run / "samples" / "step_3.jsonl", [{"id": "x", "response": "y"}, {"id": "z"}]),
            ["samples of step 3, row 2", '{"id": "z"} in B'],
        ),
        (lambda run: (run / "samples" / "step_1.jsonl").unlink(), ["samples of step 1: in A only"]),
        (tensors(exp_avg__a=torch.full((2, 3), -0.0)), ["step_2, actor, exp_avg.a: 6 of 6 elements, the first [0, 0]"]),
        (tensors(weight__b=torch.tensor(1.5)), ["weight.b: 1 of 1 elements, the first []: 1.0 in A, 1.5 in B"]),
        (tensors(weight__b=torch.ones(1)), ["weight.b: () torch.float32 in A, (1,) torch.float32 in B"]),
        (tensors(weight__c=torch.ones(1)), ["weight.c: in B only"]),
        (lambda run: write_checkpoint(run, 2, TENSORS, kl_coefficient=0.2), ["kl_coefficient: 0.1 in A, 0.2 in B"]),
        (
            lambda run: (run / "checkpoints" / "step_2" / "state.json").write_text("{}"),
            ["checkpoint step_2 in B is not complete: state.json is truncated"],
        ),
        (
            lambda run: save_file({"a": torch.ones(2, 3)}, run / "export" / "step_2" / "model.safetensors"),
            ["export step_2, model.safetensors, a: 5 of 6 elements, the first [0, 0]: 0.0 in A, 1.0 in B"],
        ),
        (lambda run: (run / "export" / "step_2" / "config.json").write_text("{ }"), ["export step_2: config.json"]),
    ],
)  # fmt: skip
def test_the_first_differences_are_named_with_both_values(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], harm: Harm, words: list[str]
) -> None:
    harm(runs[1])
    assert main([str(run) for run in runs]) == 1
    out = capsys.readouterr().out
    assert all(word in out for word in words), out
    assert "bit-identical" not in out


def test_another_number_of_steps_is_a_difference_and_another_number_of_checkpoints_is_not(
    runs: tuple[Path, Path],
) -> None:
    lines = (runs[1] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs[1] / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:10])
    write_checkpoint(runs[0], 3, TENSORS)
    found = compare(*runs)
    assert found.differences == ["steps: 0-3 in A, 0-2 in B"]
    assert "checkpoints of steps 3 are in A only" in found.notes
    assert "steps 0-2" in found.same


def test_earlier_steps_can_be_left_out(runs: tuple[Path, Path]) -> None:
    change(1, **{"reward/mean": 7.0})(runs[1])
    assert compare(*runs).differences
    found = compare(*runs, from_step=3)
    assert (found.differences, found.same) == ([], ["steps 3", "2 samples"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["A"], "two folders"),
        (["A", "B", "--from-step", "x"], "--from-step x"),
        (["A", "B", "--from-step", "9"], "no step from 9 on"),
        (["A", "nowhere"], "nowhere is not the folder of a run"),
        (["A", "twice"], "step 1 is there twice"),
        (["A", "noise"], "line 1 is not the metrics of a step"),
        (["A", "B", "--from-step", "\u00b2"], "--from-step \u00b2"),
    ],
)
def test_a_wrong_input_is_one_message_and_exit_2(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    parent = runs[0].parent
    write_lines(parent / "twice" / "metrics.jsonl", [{"step": 1}, {"step": 1}])
    write_lines(parent / "noise" / "metrics.jsonl", [{"reward": 1}])
    folders = ("A", "B", "nowhere", "twice", "noise")
    assert main([str(parent / each) if each in folders else each for each in arguments]) == 2
    captured = capsys.readouterr()
    assert word in captured.err and not captured.out


@pytest.mark.parametrize(
    "line",
    [
        '{"step": Infinity}',
        '{"step": 12.7}',
        '{"step": true}',
        '{"step": 1, "deep": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"step": 1, "table": {}}',
        "[1]",
    ],
)
def test_a_line_that_is_no_step_is_named(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], line: str
) -> None:
    (runs[1] / "metrics.jsonl").write_text(line + "\n")
    assert main([str(run) for run in runs]) == 2
    assert f"{runs[1] / 'metrics.jsonl'}, line 1 is not the metrics of a step" in capsys.readouterr().err


def folder_in_place_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("file", "harm", "word"),
    [
        ("metrics.jsonl", lambda path: path.write_bytes(b'{"step": 1, "\xff": 1}\n'), "is not UTF-8: byte 13 is 0xff"),
        ("samples/step_1.jsonl", lambda path: path.write_bytes(b"\xff"), "is not UTF-8: byte 0 is 0xff"),
        ("samples/step_1.jsonl", folder_in_place_of, "cannot be read: Is a directory"),
        ("export/step_2/model.safetensors", lambda path: path.write_bytes(b"noise" * 9), "read as safetensors"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], file: str, harm: Harm, word: str
) -> None:
    harm(runs[1] / file)
    assert main([str(run) for run in runs]) == 2
    error = capsys.readouterr().err
    assert str(runs[1] / file) in error and word in error and error.count("\n") == 1


def test_metrics_are_compared_by_their_bits(runs: tuple[Path, Path]) -> None:
    for run in runs:
        change(1, nan=float("nan"), infinite=float("inf"))(run)
    assert compare(*runs).differences == []
    change(2, zero=0.0, large=10**400)(runs[0])
    change(2, zero=-0.0, large=10**400 + 1)(runs[1])
    found = compare(*runs).differences
    assert len(found) == 2 and found[0].startswith("step 2, large: 1000") and "zero: 0.0 in A, -0.0 in B" in found[1]


def test_samples_that_differ_in_the_ends_of_lines_differ(runs: tuple[Path, Path]) -> None:
    path = runs[1] / "samples" / "step_1.jsonl"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (runs[1] / "samples" / "step_\u00b2.jsonl").write_text("not a step's")
    assert len(compare(*runs).differences) == 1


def test_tensors_without_elements_are_equal(runs: tuple[Path, Path]) -> None:
    for run in runs:
        save_file({"a": torch.empty(0, 3)}, run / "export" / "step_2" / "model.safetensors")
    assert compare(*runs).differences == []


def test_a_reader_that_goes_away_gets_no_traceback(runs: tuple[Path, Path]) -> None:
    for run in runs:
        shutil.rmtree(run / "checkpoints")
        shutil.rmtree(run / "export")
    command = [sys.executable, "-m", "flowrl.compare_runs", *map(str, runs)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, cwd=Path(__file__).parent.parent)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_metrics_alone_are_compared_without_loading_torch(runs: tuple[Path, Path]) -> None:
    for run in runs:
        shutil.rmtree(run / "checkpoints")
        shutil.rmtree(run / "export")
    code = (
        "import sys; from flowrl.compare_runs import main; "
        f"assert main({[str(run) for run in runs]!r}) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0
