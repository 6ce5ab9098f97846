"""A driver of one's own: a loss defined in the script, an update before its time, gradients that are not finite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT

DRIVER = """
from functools import partial

import torch

from flowrl.launch import launch


def loss(factor, outputs, columns):
    return -factor * columns["advantages"] * outputs.log_probs, {"policy/factor": torch.full_like(outputs.log_probs, 1.0)}


def train(run):
    actor, rollout = run.actor(), run.rollout()
    for prompts in run.steps():
        batch = prompts.union(rollout.generate(prompts))
        if FORGETS:
            run.log(actor.update(batch))
        batch = run.advantages(batch.union(actor.log_probs(batch), run.rewards(batch)))
        factor = float("nan") if run.step >= 2 else 1.0
        run.log(*[actor.update(part, loss=partial(loss, factor)) for part in run.minibatches(batch, run.config.actor)])
        run.log(rollout.receive_weights(actor))


if __name__ == "__main__":
    launch(train)
"""


def run_driver(folder: Path, forgets: bool) -> subprocess.CompletedProcess[str]:
    script = folder / "driver.py"
    script.write_text(DRIVER.replace("FORGETS", str(forgets)))
    small = ["data.prompts_per_step=8", "actor.minibatch_prompts=4", "trainer.total_steps=6", "trainer.eval_every=0"]
    return subprocess.run(
        [sys.executable, str(script), "algorithm=grpo", "kl=none", f"run.dir={folder / 'run'}", *small],
        capture_output=True, text=True, timeout=200, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_gradients_that_stay_non_finite_end_the_run_with_the_count(tmp_path: Path) -> None:
    """NUM-01, API-02: a loss of the script itself; two mini-batches a step, so the third skip comes in step 3."""
    done = run_driver(tmp_path, forgets=False)
    assert done.returncode == 1, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert "failed at step 3: step 3: 3 optimizer steps in a row had non-finite gradients" in last
    assert "trainer.max_skipped_steps=3" in last
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2 and '"policy/skipped_steps": 2.0' in metrics[1]


@pytest.mark.slow
def test_an_update_before_advantages_names_the_missing_column(tmp_path: Path) -> None:
    """API-02."""
    done = run_driver(tmp_path, forgets=True)
    assert done.returncode == 1
    assert (
        "advantages" in done.stderr and "ActorWorker.update" in done.stderr or "actor" in done.stderr.splitlines()[-1]
    )
    assert "KeyError" not in done.stderr
