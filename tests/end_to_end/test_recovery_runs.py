"""Runs that lose a worker, begin again from their newest checkpoint, and end as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import ROOT, Command, processes_marked
from tests.end_to_end.test_resume import lines, samples

SMALL = (
    "algorithm=grpo", "kl=none", "data.prompts_per_step=8", "actor.minibatch_prompts=4", "data.eval_prompts=8",
    "trainer.eval_every=2", "trainer.save_every=2", "trainer.keep_checkpoints=0",
)  # fmt: skip


class Watched:
    """A run whose workers can be killed once it has come to some step."""

    def __init__(self, command: Command, *overrides: str) -> None:
        self.mark, self.folder = uuid.uuid4().hex, command.folder / "run"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowrl.main_ppo", f"run.dir={self.folder}", *SMALL, *overrides],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=command.environment(self.mark),
        )  # fmt: skip

    def workers(self) -> dict[str, int]:
        """Process ids by pool and rank, as the names of their logs have them."""
        found = {}
        for line in processes_marked(self.mark):
            pid = int(line.split()[0])
            if "ray::Process" in line:
                log = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
                found[log] = pid
        return found

    def await_step(self, step: int, checkpoint: int) -> tuple[dict[int, dict[str, Any]], dict[str, str]]:
        """Metrics and samples at the moment when the run has done `step` and has a checkpoint."""
        deadline = time.monotonic() + 300
        while step not in lines(self.folder) or not (self.folder / "checkpoints" / f"step_{checkpoint}").is_dir():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"step {step} did not come in 300 s"
            time.sleep(0.02)
        return lines(self.folder), samples(self.folder)

    def finish(self) -> str:
        out, _ = self.process.communicate(timeout=300)
        deadline = time.monotonic() + 60
        while processes_marked(self.mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert processes_marked(self.mark) == []
        assert self.process.returncode == 0, out[-4000:]
        return out

    def check(self, steps: int, *earlier: tuple[dict[int, dict[str, Any]], dict[str, str]]) -> None:
        """The whole curve is there, and what was done twice came out the same, bit for bit."""
        after, texts = lines(self.folder), samples(self.folder)
        assert list(after) == list(range(steps + 1))
        assert set(texts) == {f"step_{step}.jsonl" for step in range(1, steps + 1)}
        for metrics, before in earlier:
            assert {step: after[step] for step in metrics} == metrics
            # The newest file of samples may have been written in part only.
            known = list(metrics)[1:]
            assert all(texts[f"step_{step}.jsonl"] == before[f"step_{step}.jsonl"] for step in known)


@pytest.mark.slow
def test_a_run_that_loses_a_worker_begins_again_and_equals_one_that_did_not(flowrl: Command) -> None:
    """Both ranks are new, in the same Ray; the steps since the checkpoint are done again."""
    run = Watched(flowrl, "trainer.total_steps=8", "trainer.max_restarts=1")
    before = run.await_step(3, checkpoint=2)
    os.kill(run.workers()["main-rank1"], signal.SIGKILL)
    out = run.finish()
    assert "worker died (" in out and "SIGKILL" in out and ": restart 1 of 1 from step_" in out, out
    assert out.count("new local cluster") == 2 and out.count("resumed from checkpoints/step_") == 1
    run.check(8, before)


@pytest.mark.slow
def test_either_pool_begins_again_without_the_processes_of_the_other(flowrl: Command) -> None:
    """The engine's dies, then the trainer's: the other pool keeps its process, and the run is as without the two."""
    run = Watched(
        flowrl, "trainer.total_steps=16", "trainer.max_restarts=2", "placement=standalone_rollout", "cluster.devices=1"
    )
    first = run.await_step(3, checkpoint=2)
    pids = run.workers()
    os.kill(pids["rollout-rank0"], signal.SIGKILL)
    second = run.await_step(6, checkpoint=4)
    again = run.workers()
    os.kill(again["main-rank0"], signal.SIGKILL)
    run.await_step(9, checkpoint=8)
    last = run.workers()
    out = run.finish()
    assert re.search(r"restart 1 of 2 from step_\d; processes of pool main go on", out), out
    assert re.search(r"restart 2 of 2 from step_\d; processes of pool rollout go on", out), out
    assert again["main-rank0"] == pids["main-rank0"] and again["rollout-rank0"] != pids["rollout-rank0"]
    assert last["rollout-rank0"] == again["rollout-rank0"] and last["main-rank0"] != again["main-rank0"]
    run.check(16, first, second)
