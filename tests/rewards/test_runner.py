"""Reward processes: order, time limits, errors, ends. Each test starts one to three small Python processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from flowrl.config.schema import RewardConfig
from flowrl.config.tree import ConfigError
from flowrl.rewards.runner import RewardError, RewardResult, RewardRunner

FUNCTIONS = """
import os, re, signal, subprocess, sys, time
from flowrl.rewards import batched

def number(prompt, response, row):
    return float(row["n"])

def light(prompt, response, row):
    return 0.0 if {"torch", "numpy", "ray"} & set(sys.modules) else 1.0

def pid(prompt, response, row):
    return {"score": 0.0, "pid": os.getpid()}

def slow_first(prompt, response, row):
    time.sleep(0.2 if row["n"] == 0 else 0.0)
    return row["n"]

def alarm(prompt, response, row):
    def ring(*_):
        raise TimeoutError("rang")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        time.sleep(5)
    except TimeoutError:
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # left behind
        return 1.0

def sleeps(prompt, response, row):
    if row["n"] == 2:
        time.sleep(600)
    return 1.0

def raises(prompt, response, row):
    if row["n"] == 2:
        raise KeyError("colour")
    return 1.0

def raises_on_empty(prompt, response, row):
    return float(response.split()[-1])

class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def unspeakable(prompt, response, row):
    if row["n"] == 2:
        raise Unspeakable
    return 1.0

class Unreadable:
    def __repr__(self):
        raise RuntimeError("no words")

def unreadable(prompt, response, row):
    return Unreadable() if row["n"] == 2 else 1.0

def greedy(prompt, response, row):
    return len(bytearray(2 << 30)) if row["n"] == 2 else 1.0

def exits(prompt, response, row):
    if row["n"] == 2:
        sys.exit(3)
    return 1.0

def dies(prompt, response, row):
    if row["n"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def backtracks(prompt, response, row):
    if row["n"] == 2:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0

def breeds(prompt, response, row):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(row["file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)

def nan_on_two(prompt, response, row):
    return float("nan") if row["n"] == 2 else 1.0

def source(prompt, response, row):
    return {"": 1, None: 2, "mine": 3}[row["data_source"]] if "data_source" in row else 4

def extras(prompt, response, row):
    return {"score": 1.0, "format": row["n"]} if row["n"] else 0.0

@batched
def whole(prompts, responses, rows):
    return [row["n"] for row in rows]

@batched
def short(prompts, responses, rows):
    return [1.0]

@batched
def bad_third(prompts, responses, rows):
    return [None if row["n"] == 2 else 1.0 for row in rows]

@batched
def stuck(prompts, responses, rows):
    time.sleep(600)
"""


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., RewardRunner]:
    (tmp_path / "graders.py").write_text(FUNCTIONS)

    def make(name: str, **changes: Any) -> RewardRunner:
        settings = {"num_processes": 2, "timeout_seconds": 5.0, "memory_bytes": 1 << 30, "on_error": "raise"} | changes
        return RewardRunner(RewardConfig(function=f"{tmp_path / 'graders.py'}:{name}", **settings))

    return make


def grade(runner: RewardRunner, num_rows: int = 4, **fields: Any) -> RewardResult:
    rows = [{"n": n, **fields} for n in range(num_rows)]
    return runner.score(
        [f"prompt {n}" for n in range(num_rows)], ["x"] * num_rows, rows, [f"id-{n}" for n in range(num_rows)]
    )


def test_scores_come_in_row_order_whoever_finishes_first(runner: Callable[..., RewardRunner]) -> None:
    with runner("slow_first") as rewards:
        result = grade(rewards, 9)
    assert result.scores.tolist() == list(range(9))
    assert result.scores.dtype == np.float32 and result.num_errors == 0


def test_no_rows_start_no_process(runner: Callable[..., RewardRunner]) -> None:
    with runner("number") as rewards:
        assert grade(rewards, 0).scores.shape == (0,)
        assert rewards._processes == []


def test_reward_processes_load_neither_torch_nor_ray(runner: Callable[..., RewardRunner]) -> None:
    with runner("light") as rewards:
        assert grade(rewards, 1).scores.tolist() == [1.0]


def test_alarms_work_and_one_left_behind_hurts_no_other_row(runner: Callable[..., RewardRunner]) -> None:
    """REW-01 (a): user code runs in a main thread."""
    with runner("alarm", num_processes=1) as rewards:
        assert grade(rewards).scores.tolist() == [1.0] * 4
        time.sleep(0.1)
        assert grade(rewards).scores.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["sleeps", "backtracks"])
def test_a_stuck_row_is_killed_counted_and_the_others_go_on(runner: Callable[..., RewardRunner], name: str) -> None:
    """REW-01 (b), (d): a sleep and a busy loop in C that no Python signal interrupts; two steps."""
    with runner(name, timeout_seconds=0.5, on_error="score:-1") as rewards:
        for _ in range(2):
            started = time.monotonic()
            result = grade(rewards)
            assert time.monotonic() - started < 30
            assert result.scores.tolist() == [1.0, 1.0, -1.0, 1.0]
            assert (result.num_errors, result.metrics["reward/errors"].value) == (1, 1.0)
            assert f"{name} on row 'id-2' (prompt 'prompt 2'): did not finish within 0.5 s" in result.first_error


def test_a_stuck_row_ends_the_step_by_default_and_the_pool_recovers(runner: Callable[..., RewardRunner]) -> None:
    """REW-01 (b)."""
    with runner("sleeps", timeout_seconds=0.5) as rewards:
        with pytest.raises(RewardError, match="sleeps on row 'id-2' .*did not finish within 0.5 s and was killed"):
            grade(rewards)
        assert grade(rewards, 2).scores.tolist() == [1.0, 1.0]


def test_what_a_stuck_row_started_dies_with_it(runner: Callable[..., RewardRunner], tmp_path: Path) -> None:
    with runner("breeds", timeout_seconds=1.0) as rewards, pytest.raises(RewardError):
        grade(rewards, 1, file=str(tmp_path / "pid"))
    # The kernel ends a whole group at once but takes each process away when it gets to it.
    deadline = time.monotonic() + 60
    while not gone(int((tmp_path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_raising_row_is_named_with_function_and_traceback(runner: Callable[..., RewardRunner]) -> None:
    """REW-01 (c): never scored silently."""
    with runner("raises") as rewards, pytest.raises(RewardError) as caught:
        grade(rewards)
    text = str(caught.value)
    assert "raises on row 'id-2' (prompt 'prompt 2'): raised KeyError: 'colour'" in text
    assert "graders.py" in text and 'raise KeyError("colour")' in text and "process.py" not in text


def test_a_raising_row_gets_the_score_the_user_chose(runner: Callable[..., RewardRunner]) -> None:
    """REW-01 (c)."""
    with runner("raises", on_error="score:0.25") as rewards:
        result = grade(rewards)
    assert result.scores.tolist() == [1.0, 1.0, 0.25, 1.0] and result.num_errors == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("exits", "raised SystemExit: 3"),
        ("dies", "was killed by signal SIGKILL"),
        ("unspeakable", r"raised Unspeakable: \(its __str__ raises RuntimeError\)"),
        ("unreadable", "returned a value that raises RuntimeError: no words when it is read"),
        ("greedy", r"ran out of memory \(reward\.memory_bytes=1073741824 for each reward process\)"),
        ("nan_on_two", r"returned nan \(float\); expected a finite number"),
    ],
)
def test_other_failures_name_row_and_function_too(runner: Callable[..., RewardRunner], name: str, reason: str) -> None:
    """REW-04 (nan), REW-01."""
    with (
        runner(name) as rewards,
        pytest.raises(RewardError, match=rf"{name} on row 'id-2' \(prompt 'prompt 2'\): {reason}"),
    ):
        grade(rewards)


def test_a_process_killed_while_idle_is_replaced(
    runner: Callable[..., RewardRunner], caplog: pytest.LogCaptureFixture
) -> None:
    """And it is said; no row is affected."""
    with runner("number", num_processes=1) as rewards:
        grade(rewards)
        victim = rewards._processes[0].pid
        os.kill(victim, signal.SIGKILL)
        time.sleep(0.1)
        assert grade(rewards).scores.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert rewards._processes[0].pid != victim
        assert f"reward process {victim} was killed by signal SIGKILL while idle" in caplog.text


def test_the_users_function_gets_every_row_whatever_its_fields_say(runner: Callable[..., RewardRunner]) -> None:
    """REW-02: no field of a row chooses another grader."""
    rows: list[dict[str, Any]] = [{"data_source": ""}, {"data_source": None}, {"data_source": "mine"}, {}]
    with runner("source") as rewards:
        assert rewards.score(["p"] * 4, ["r"] * 4, rows, list("abcd")).scores.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_extras_become_metrics_over_the_rows_that_have_them(runner: Callable[..., RewardRunner]) -> None:
    with runner("extras") as rewards:
        result = grade(rewards)
    assert result.scores.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert {name: metric.value for name, metric in result.metrics.items()} == {"reward/format": 2.0}


def test_a_batched_function_sees_all_rows_at_once(runner: Callable[..., RewardRunner]) -> None:
    with runner("whole") as rewards:
        assert grade(rewards).scores.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_batched_function_with_too_few_scores_is_named_with_both_counts(runner: Callable[..., RewardRunner]) -> None:
    """REW-03."""
    with runner("short") as rewards:
        with pytest.raises(RewardError, match="short on 4 rows from row 'id-0' .*: returned 1 scores; expected 4"):
            grade(rewards)
        assert grade(rewards, 1).scores.tolist() == [1.0]


def test_one_bad_value_of_a_batched_function_concerns_its_row_only(runner: Callable[..., RewardRunner]) -> None:
    """REW-04."""
    with runner("bad_third", on_error="score:0") as rewards:
        result = grade(rewards)
    assert result.scores.tolist() == [1.0, 1.0, 0.0, 1.0] and result.num_errors == 1


def test_a_stuck_batched_function_costs_the_whole_batch(runner: Callable[..., RewardRunner]) -> None:
    with runner("stuck", timeout_seconds=0.3, on_error="score:0") as rewards:
        result = grade(rewards)
    assert result.scores.tolist() == [0.0] * 4 and result.num_errors == 4


def test_check_tries_the_function_before_anything_expensive(runner: Callable[..., RewardRunner]) -> None:
    """REW-02: a function that is missing or fails on the first row ends the start, not the first step."""
    with runner("number") as rewards:
        rewards.check({"n": 3, "prompt": "p"})
    with runner("no_such") as rewards, pytest.raises(ConfigError, match="graders.py has no 'no_such'; it has: "):
        rewards.check({"prompt": "p"})
    with (
        runner("raises_on_empty") as rewards,
        pytest.raises(ConfigError, match="first row with an empty response: .*IndexError"),
    ):
        rewards.check({"id": "a", "prompt": [{"role": "user", "content": "hello"}]})
    with runner("raises_on_empty", on_error="score:0") as rewards:
        rewards.check({"prompt": "p"})


def test_a_module_that_ends_its_process_at_import_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os; os._exit(4)\n")
    config = RewardConfig(
        function=f"{tmp_path / 'ends.py'}:f", num_processes=1, timeout_seconds=1.0, memory_bytes=0, on_error="raise"
    )
    with RewardRunner(config) as rewards, pytest.raises(ConfigError, match="ended its process with exit code 4"):
        rewards.check({"prompt": "p"})


def test_what_the_driver_can_import_the_function_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REW-02: a module that lies only in the driver's working directory."""
    (tmp_path / "only_here.py").write_text("def f(prompt, response, row):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    with RewardRunner(RewardConfig(function="only_here:f", num_processes=1, memory_bytes=0)) as rewards:
        assert grade(rewards, 1).scores.tolist() == [0.5]


def test_wrong_counts_and_a_wrong_policy_are_refused(runner: Callable[..., RewardRunner]) -> None:
    with runner("number") as rewards, pytest.raises(ValueError, match="got 2, 1, 1, 1"):
        rewards.score(["a", "b"], ["x"], [{}], ["id"])
    for policy in ("ignore", "score:", "score:nan", "score:x"):
        with pytest.raises(ConfigError, match=f"reward.on_error={policy} is not legal"):
            runner("number", on_error=policy)


def test_closing_ends_all_processes(runner: Callable[..., RewardRunner]) -> None:
    rewards = runner("number")
    grade(rewards)
    pids = [process.pid for process in rewards._processes]
    assert len(pids) == 2
    rewards.close()
    rewards.close()
    assert all(gone(pid) for pid in pids)


DRIVER = """
import sys
from flowrl.config.schema import RewardConfig
from flowrl.rewards.runner import RewardRunner
rewards = RewardRunner(RewardConfig(function=sys.argv[1], num_processes=2, timeout_seconds=600.0, memory_bytes=0, on_error="raise"))
rewards.score(["p"], [""], [{"n": 0}], ["i"])
print(*[process.pid for process in rewards._processes], flush=True)
rewards.score(["p"] * 4, [""] * 4, [{"n": n} for n in range(4)], list("abcd"))
"""


def test_processes_end_with_the_driver_even_when_stuck_in_c(
    runner: Callable[..., RewardRunner], tmp_path: Path
) -> None:
    """REW-01: a killed driver, started as a plain script without a main guard, leaves nothing behind."""
    runner("backtracks").close()
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable, str(driver), f"{tmp_path / 'graders.py'}:backtracks"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        time.sleep(0.5)
        assert len(pids) == 2 and not any(gone(pid) for pid in pids)
        process.kill()
    deadline = time.monotonic() + 5
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """No such process, or one that only waits for somebody to ask how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
