"""When a run is begun again: rules without processes. That it works is in tests/end_to_end/test_recovery_runs.py."""

from __future__ import annotations

import pytest

from flowrl.restarts import Failure, Restarts
from flowrl.single_controller import WorkerError
from flowrl.single_controller.failures import ProcessInfo


def failure(step: int = 7, cause: str = "killed, pid 12", method: str = "update") -> Failure:
    process = ProcessInfo(0, "node", 12, None)
    error = WorkerError(
        role="actor", pool="main", process=process, method=method, phase=None, step=step, cause=cause
    )  # fmt: skip
    return Failure.of(error, step)


def test_no_restart_is_made_unless_asked_for() -> None:
    assert "trainer.max_restarts=0" in (Restarts(0).refusal(failure()) or "")


@pytest.mark.parametrize("most", [1, 2, 5])
def test_restarts_are_used_up_by_failures_of_any_kind(most: int) -> None:
    restarts = Restarts(most)
    for number in range(1, most + 1):
        assert restarts.refusal(failure(step=number)) is None
        assert restarts.number == number
    assert restarts.refusal(failure(step=99)) == f"trainer.max_restarts={most} are used up"


def test_a_run_that_fails_in_the_same_way_three_times_in_a_row_ends() -> None:
    """What a process is called and how large it was is no difference."""
    restarts = Restarts(100)
    for cause in ("killed, pid 12", "killed, pid 13"):
        assert restarts.refusal(failure(cause=cause)) is None
    assert "3 times in the same way at step 7" in (restarts.refusal(failure(cause="killed, pid 14")) or "")


@pytest.mark.parametrize("other", [failure(step=8), failure(method="generate"), failure(cause="out of memory")])
def test_another_step_method_or_cause_is_another_failure(other: Failure) -> None:
    restarts = Restarts(100)
    assert [restarts.refusal(each) for each in (failure(), failure(), other, failure(), failure())] == [None] * 5
