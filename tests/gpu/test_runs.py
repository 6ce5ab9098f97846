"""Whole runs on GPUs, as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Command
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
