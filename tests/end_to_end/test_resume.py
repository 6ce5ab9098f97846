"""A run that was killed and started again is the run that never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowrl.compare_runs import by_nature
from tests.end_to_end.conftest import ROOT, Command, processes_marked

SMALL = ("data.prompts_per_step=8", "actor.minibatch_prompts=4", "data.eval_prompts=8", "trainer.eval_every=2")


def lines(folder: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step, without those that differ by nature."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return {row["step"]: {k: v for k, v in row.items() if not by_nature(k)} for row in rows}


def kill_after(command: Command, step: int, overrides: Sequence[str], name: str = "run") -> Path:
    """Starts a run and sends its driver SIGKILL as soon as the metrics of `step` are written and a checkpoint is there."""
    mark, folder = uuid.uuid4().hex, command.folder / name
    run = subprocess.Popen(
        [sys.executable, "-m", "flowrl.main_ppo", f"run.dir={folder}", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=command.environment(mark),
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while step not in lines(folder) or not any((folder / "checkpoints").glob("step_*")):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline, "the step did not come in 300 s"
        time.sleep(0.02)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    deadline = time.monotonic() + 60
    while processes_marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_marked(mark) == []
    return folder


def samples(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "samples").iterdir())}


def contents(folder: Path) -> Mapping[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_run_goes_on_bit_for_bit_and_decides_before_ray_starts(flowrl: Command) -> None:
    """CKP-01, RES-01: killed in step 7 or later, in the middle of an epoch, and started again by the same command: metrics,
    samples and exported weights of the steps that are done twice are equal; the file of metrics is whole. Then: a run that
    is done changes nothing, a changed learning rate is refused, and a damaged checkpoint is passed over."""
    command = (
        *SMALL,
        "trainer.total_steps=8",
        "trainer.save_every=4",
        "trainer.export_every=6",
        "trainer.keep_checkpoints=0",
    )
    folder = kill_after(flowrl, 7, (*command, "trainer.total_steps=200"))
    before = {"metrics": lines(folder), "samples": samples(folder), "export": contents(folder / "export" / "step_6")}
    shutil.rmtree(folder / "export")
    shutil.rmtree(folder / "checkpoints" / "step_8", ignore_errors=True)  # of a kill that came late
    (folder / "checkpoints" / ".step_8.partial").mkdir(exist_ok=True)

    run = flowrl(*command)
    assert run.code == 0, run.err[-3000:]
    assert run.left_behind == ()
    assert "resumed from checkpoints/step_4: actor (tp 2, pp 1 on 2 rank(s)): " in run.out
    assert "resumed from checkpoints/step_4: critic " in run.out and "before training" not in run.out
    after = lines(folder)
    assert list(after) == list(range(9))
    for step in range(8):
        assert after[step] == before["metrics"][step], step
    redone = samples(folder)
    assert {name: redone[name] for name in before["samples"] if name in redone} == {
        name: text for name, text in before["samples"].items() if name in redone
    }
    assert set(redone) == {f"step_{step}.jsonl" for step in range(1, 9)}
    assert contents(folder / "export" / "step_6") == before["export"]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_4", "step_8"}

    untouched = contents(folder)
    done = flowrl(*command, timeout=100)
    assert done.code == 0 and "nothing to do" in done.out and "Ray" not in done.out
    other = flowrl(*command, "actor.optim.lr=1e-3", timeout=100)
    assert other.code == 2 and "actor.optim.lr: 0.0002 in the checkpoint, 0.001 now" in other.err, other.err
    assert contents(folder) == untouched

    shard = max((folder / "checkpoints" / "step_8" / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    plan = flowrl(*command, "dry_run=true", timeout=100)
    assert plan.code == 0 and "resumes from" in plan.out and "with step 5 of 8" in plan.out
    assert "step_8 is not complete and was skipped: actor/" in plan.out and "truncated" in plan.out


PROMPTS = "".join(json.dumps({"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)}) + "\n" for i in range(20))


@pytest.mark.slow
def test_a_killed_run_goes_on_in_its_own_layout_and_in_another(flowrl: Command, tmp_path: Path) -> None:
    """RES-01, RES-02: two pipeline stages for the actor, distributed optimizer, the critic on its own pool, an adaptive KL
    coefficient, and a checkpoint in whose next step an epoch ends. In the same layout every bit is the same; in another
    one, and with one rank less, the first update is the same up to rounding."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(PROMPTS)
    command = (
        *SMALL, f"data.train_files=[{prompts}]", "reward.function=flowrl.builtin.arithmetic:score", "kl=adaptive",
        "trainer.save_every=2", "trainer.total_steps=6", "actor.optim.schedule=linear",
        "rollout.fingerprint_every=3",
    )  # fmt: skip
    layout = ("placement=split", "cluster.devices=2", "actor.layout.pp=2", "critic.distributed_optimizer=true")
    folder = kill_after(flowrl, 4, (*command, *layout))
    shutil.rmtree(folder / "checkpoints" / "step_4", ignore_errors=True)
    before = lines(folder)
    elsewhere = flowrl.folder / "elsewhere"
    shutil.copytree(folder, elsewhere)

    same = flowrl(*command, *layout)
    assert same.code == 0, same.err[-3000:]
    after = lines(folder)
    assert list(after) == list(range(7))
    assert all(after[step] == before[step] for step in range(5))
    assert ["reshard/fingerprint_ok" in after[step] for step in range(1, 7)] == [False, True, False, False, True, False]
    assert "kl/coefficient" in after[3] and after[3]["kl/coefficient"] != after[1]["kl/coefficient"]

    moved = flowrl(*command, "cluster.devices=1", name="elsewhere")
    assert moved.code == 0, moved.err[-3000:]
    assert "tp 1, pp 2 on 2 rank(s) -> tp 1, pp 1 on 1 rank(s)" in moved.out
    there = lines(elsewhere)[3]
    assert there["reward/mean"] == after[3]["reward/mean"]
    for name in ("policy/grad_norm", "value/loss", "policy/entropy", "kl/reference", "kl/coefficient", "policy/lr"):
        assert there[name] == pytest.approx(after[3][name], rel=1e-5, abs=1e-8), name
    assert samples(elsewhere)["step_3.jsonl"] == samples(folder)["step_3.jsonl"]
