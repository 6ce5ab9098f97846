"""Signals that ask the driver to end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from flowrl.signals import Stopped, stop_signals


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)
    # Handlers of Python run a moment after the signal.
    time.sleep(0.02)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_without_grace_a_signal_ends_the_block_at_once(signum: signal.Signals, code: int) -> None:
    """RAY-03: and an interrupt that no signal caused stays what it is."""
    with pytest.raises(Stopped) as caught, stop_signals():
        send(signum)
        pytest.fail("not reached")
    assert caught.value.exit_code == code and not caught.value.late
    with pytest.raises(KeyboardInterrupt), stop_signals():
        raise KeyboardInterrupt


def test_with_grace_the_first_signal_lets_the_block_reach_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    reached = []
    with pytest.raises(Stopped) as caught, stop_signals() as request, request.grace(60):
        request.stop()
        assert not request.requested
        send(signal.SIGTERM)
        assert request.requested
        reached.append("the step's end")
        request.stop()
    assert reached and caught.value.exit_code == 143 and not caught.value.late
    assert "SIGTERM: stopping when this step is saved, in 60 s at the latest" in capfd.readouterr().err


def test_what_does_not_end_within_its_grace_is_abandoned() -> None:
    with pytest.raises(Stopped) as caught, stop_signals() as request, request.grace(0.05):
        send(signal.SIGTERM)
        time.sleep(30)
    assert caught.value.late and caught.value.exit_code == 143


def test_a_second_signal_ends_the_block_at_once_and_a_third_does_not_disturb_cleaning_up() -> None:
    """RAY-03: the exit code is that of the first."""
    cleaned = []
    with pytest.raises(Stopped) as caught, stop_signals() as request, request.grace(60):
        try:
            send(signal.SIGINT)
            send(signal.SIGTERM)
            pytest.fail("not reached")
        finally:
            send(signal.SIGINT)
            cleaned.append(True)
    assert cleaned and caught.value.exit_code == 130 and not caught.value.late


def test_a_block_that_is_done_before_its_grace_is_over_ends_in_order() -> None:
    """The last step of a run: all steps are done."""
    before = signal.getsignal(signal.SIGALRM)
    with stop_signals() as request:
        with request.grace(0.2):
            send(signal.SIGTERM)
        time.sleep(0.3)
    assert signal.getsignal(signal.SIGALRM) == before


class Dropping:
    """What its destructor raises is dropped by Python, with a message."""

    def __del__(self) -> None:
        send(signal.SIGINT)


def swallow() -> None:
    try:
        send(signal.SIGINT)
    except BaseException:
        return


@pytest.mark.parametrize("lose", [Dropping, swallow])
def test_an_interrupt_that_is_lost_on_its_way_is_raised_again(
    lose: Callable[[], object], capfd: pytest.CaptureFixture[str]
) -> None:
    """RAY-03: and cleaning up, which holds the interrupt, is not disturbed however long it takes."""
    cleaned = []
    hook = sys.unraisablehook
    with pytest.raises(Stopped) as caught, stop_signals():
        lose()
        try:
            time.sleep(30)
        finally:
            time.sleep(1.5)
            cleaned.append(True)
    assert cleaned and caught.value.exit_code == 130
    assert capfd.readouterr().err == "" and sys.unraisablehook is hook
