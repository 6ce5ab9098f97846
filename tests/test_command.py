"""Commands that are told to stop: one line, the usual exit code, nothing left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from recipes.limited import run_limited

ROOT = Path(__file__).parents[1]
DEADLINE = 120


def wait_until(there: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not there():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def stopped(command: list[str], ready: Callable[[subprocess.Popen[str]], bool], signum: int) -> tuple[int, str]:
    """(exit code, stderr) of a command that gets a signal, and no other process does; nothing of it may be left."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    wait_until(lambda: process.poll() is not None or ready(process))
    left = children(process)
    assert left
    process.send_signal(signum)
    _, text = process.communicate(timeout=DEADLINE)
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in left))
    return process.returncode, text


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_benchmark_that_is_told_to_stop_says_so_and_ends_its_ranks(signum: signal.Signals, code: int) -> None:
    words = ["world=2", "model=llama-tiny", "train=tp2", "rollout=tp1", "repeat=100000", "device=cpu"]
    found, text = stopped(
        ["-m", "flowrl.resharding.benchmark", *words], lambda process: len(children(process)) >= 3, signum
    )
    assert found == code
    assert text.strip().splitlines()[-1] == f"stopped by {signum.name}" and "Traceback" not in text


def test_ranks_end_with_a_benchmark_that_was_killed() -> None:
    words = ["world=2", "model=llama-tiny", "train=tp2", "rollout=tp1", "repeat=100000", "device=cpu"]
    found, _ = stopped(
        ["-m", "flowrl.resharding.benchmark", *words], lambda process: len(children(process)) >= 4, signal.SIGKILL
    )
    assert found == -signal.SIGKILL


SLOW_TO_STOP = """
import signal, sys, time
def stop(signum, frame):
    print("told to stop", flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_command_is_told_to_stop_at_its_limit(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert run_limited([sys.executable, "-c", SLOW_TO_STOP], 3, log) == 7
    assert (tmp_path / "log").read_text() == "ready\ntold to stop\n"
    assert run_limited([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_command_stops_with_its_caller(signum: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    caller = (
        "import sys; from pathlib import Path; from flowrl.command import run_command; "
        "from recipes.limited import run_limited; "
        f"run = lambda arguments: run_limited([sys.executable, '-c', {SLOW_TO_STOP!r}], 600, Path({str(log)!r}).open('wb')); "
        "sys.exit(run_command(run))"
    )
    found, text = stopped(["-c", caller], lambda process: log.is_file() and "ready" in log.read_text(), signum)
    killed = signum == signal.SIGKILL
    assert (found, text) == (-signum, "") if killed else (130, "stopped by SIGINT\n")
    assert log.read_text() == "ready\ntold to stop\n"
