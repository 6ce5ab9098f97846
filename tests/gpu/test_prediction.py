"""What `dry_run` says of memory is what a run takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT

pytestmark = pytest.mark.gpu


def test_the_peak_of_each_phase_is_predicted_within_a_tenth(tmp_path: Path) -> None:
    """PPO of a model of half a billion parameters, long enough rows for activations to count."""
    words = ("model=qwen2.5-0.5b", "runs=ppo", "prompts=64", "samples=4", "prompt=128", "tokens=256", "steps=2")
    command = [sys.executable, "-m", "recipes.gpu_steps", f"out={tmp_path}", *words, "cluster.devices=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = json.loads((tmp_path / "results.json").read_text())["memory"]
    assert {peak["phase"] for peak in peaks} == {
        "generate", "log_probs", "reference", "values", "update_critic", "update_actor", "reshard",
    }  # fmt: skip
    wrong = [peak for peak in peaks if not 0.9 <= peak["ratio"] <= 1.1]
    assert not wrong
