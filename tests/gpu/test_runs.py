"""Whole runs on GPUs, as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, Command
from tests.end_to_end.test_runs import EVERY_RUN, SMALL, WITH_CRITIC, WITH_REFERENCE

pytestmark = pytest.mark.gpu
ON_A_GPU = {"seconds/offload", "seconds/reload", "memory/generate/free_bytes_min", "memory/update_actor/peak_bytes_max"}


@pytest.fixture
def flowrl(tmp_path: Path) -> Command:
    return Command(tmp_path)


def test_three_steps_of_ppo_on_gpus_report_every_metric(flowrl: Command) -> None:
    run = flowrl(*SMALL, "cluster.device=cuda", timeout=400)
    assert run.code == 0, run.err[-3000:]
    assert run.left_behind == ()
    rows = run.metrics
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        expected = EVERY_RUN | WITH_CRITIC | WITH_REFERENCE | ON_A_GPU
        assert expected <= row.keys(), expected - row.keys()
        assert row["reshard/fingerprint_ok"] == 1.0
        assert row["rollout/logprob_diff_mean"] < 0.05


def test_a_run_on_gpus_goes_on_from_its_checkpoint(
    flowrl: Command, record_property: Callable[[str, object], None]
) -> None:
    """RES-01: whether its further steps are bit for bit those of a run that never stopped is recorded, not demanded:
    several kernels of a GPU add in an order of their own."""
    command = (
        *SMALL,
        "cluster.device=cuda",
        "rollout.cuda_graphs=false",
        "trainer.save_every=1",
        "trainer.keep_checkpoints=0",
    )
    whole = flowrl(*command, name="whole", timeout=400)
    first = flowrl(*command, "trainer.total_steps=2", name="cut", timeout=400)
    again = flowrl(*command, name="cut", timeout=400)
    for run in (whole, first, again):
        assert run.code == 0, run.err[-3000:]
        assert run.left_behind == ()
    assert "resumed from checkpoints/step_2: actor" in again.out and "generators restored" in again.out
    rows = again.metrics
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["reshard/fingerprint_ok"] == 1.0 and rows[3]["rollout/logprob_diff_mean"] < 0.05
    comparing = [sys.executable, "-m", "flowrl.compare_runs", str(whole.folder), str(again.folder)]
    compared = subprocess.run(comparing, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert compared.returncode in (0, 1), compared.stderr
    record_property("against a run that never stopped", compared.stdout.strip())
