"""How a run ends when something ends it: with one message that names the cause, soon, leaving nothing behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from flowrl import launch
from flowrl.builtin.model import resolve_model
from flowrl.config.tree import ConfigError
from tests.end_to_end.conftest import MARK, ROOT, Command, processes_marked
from tests.sockets import listening_beyond_loopback

DEADLINE_SECONDS = 60
ENDLESS = (
    "trainer.total_steps=500",
    "trainer.eval_every=0",
    "data.prompts_per_step=8",
    "actor.minibatch_prompts=8",
    "kl=none",
)


def started(pid: int) -> int:
    """When a process was started, in ticks since the system was. Numbers of processes begin again at the highest."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class Running:
    """A run in the background that has finished at least one step."""

    def __init__(self, command: Command, *overrides: str, name: str = "run", start_new_session: bool = False) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = command.folder / name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flowrl.main_ppo", f"run.dir={self.folder}", *ENDLESS, *overrides],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=command.environment(self.mark),
            start_new_session=start_new_session,
        )  # fmt: skip
        metrics = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text().count("\n")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "no step in 200 s"
            time.sleep(0.2)
        assert listening_beyond_loopback(f"{MARK}={self.mark}") == []

    def worker(self) -> int:
        """Process id of one worker."""
        return self.workers()[0]

    def workers(self) -> list[int]:
        """Process ids of all workers, in the order in which they were started."""
        pids = [int(line.split()[0]) for line in processes_marked(self.mark) if "ray::Process" in line]
        return sorted(pids, key=started)

    def finish(self) -> tuple[int, str]:
        """Exit code and stderr. The run must end, and whatever it started soon after it.

        The deadlines only tell a hang from a slow machine; `recipes/kill_matrix.py` measures the seconds.
        """
        try:
            _, err = self.process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            self.process.kill()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (left := processes_marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
        return self.process.returncode, err


def test_a_killed_worker_ends_the_run_with_its_name(flowrl: Command) -> None:
    """RAY-01: exit 1 within seconds; the last line names role, rank, node, pid, phase, step and log."""
    run = Running(flowrl, "algorithm=grpo")
    pid = run.worker()
    os.kill(pid, signal.SIGKILL)
    code, err = run.finish()
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert f"pid {pid}" in last and re.search(r"rank \d", last) and "phase" in last and "step" in last
    assert "SIGKILL" in last and str(run.folder / "logs") in last


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["trainer", "engine"])
def test_a_killed_worker_of_either_pool_ends_the_run_with_its_name(flowrl: Command, victim: int) -> None:
    """RAY-01: also where the other pool waits for it."""
    run = Running(flowrl, "algorithm=grpo", "placement=standalone_rollout", "cluster.devices=1")
    pid = run.workers()[victim]
    os.kill(pid, signal.SIGKILL)
    code, err = run.finish()
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert f"pid {pid}" in last and "rank 0" in last and "SIGKILL" in last
    assert ("main-rank0.log", "rollout-rank0.log")[victim] in last


@pytest.mark.slow
def test_a_run_without_checkpoints_stops_at_once(flowrl: Command) -> None:
    """RAY-03: SIGINT, which a terminal sends to all processes of the run's group, ends everything that the run started."""
    run = Running(flowrl, "algorithm=grpo", start_new_session=True)
    os.killpg(run.process.pid, signal.SIGINT)
    code, err = run.finish()
    assert code == 130, err
    assert re.search(r"stopped at step \d+ of 500; there is no checkpoint to go on from", err.splitlines()[-1])


@pytest.mark.slow
def test_a_stopped_run_saves_the_step_under_way_and_says_how_to_go_on(flowrl: Command) -> None:
    """RAY-03: SIGTERM, as preemptible machines send it; the command that it names goes on from there."""
    run = Running(flowrl, "algorithm=grpo", "trainer.save_every=100", "trainer.grace_seconds=100")
    run.process.terminate()
    code, err = run.finish()
    assert code == 143, err
    assert "SIGTERM: stopping when this step is saved, in 100 s at the latest" in err
    found = re.search(r"stopped at step (\d+) of 500; resumable from step (\d+): (.*)", err.splitlines()[-1])
    assert found and found[1] == found[2]
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == int(found[1])
    assert (run.folder / "checkpoints" / f"step_{found[1]}" / "manifest.json").exists()
    said = subprocess.run(
        [*shlex.split(found[3]), "dry_run=true"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f"step_{found[1]}" in said.stdout


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_behind(flowrl: Command) -> None:
    """RAY-03: SIGKILL to the driver; workers, Ray and reward processes go too, and a new run starts at once."""
    run = Running(flowrl, "algorithm=grpo")
    run.process.kill()
    assert run.finish()[0] == -signal.SIGKILL
    assert [path.name for path in flowrl.folder.iterdir()] == ["run"], "not even the lock"
    again = Running(flowrl, "algorithm=grpo", name="again")
    again.process.terminate()
    assert again.finish()[0] == 143


@pytest.mark.slow
def test_two_runs_started_in_the_same_second_both_succeed(flowrl: Command) -> None:
    """RAY-02, RAY-06: no port, name, folder or shared-memory segment in common."""
    small = (
        "trainer.total_steps=1",
        "algorithm=grpo",
        "kl=none",
        "data.prompts_per_step=8",
        "actor.minibatch_prompts=8",
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "flowrl.main_ppo", f"run.dir={flowrl.folder / str(number)}", *small],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for number in range(2)
    ]  # fmt: skip
    for run in runs:
        _, err = run.communicate(timeout=300)
        assert run.returncode == 0, err[-3000:]


REWARDS = """
import time

def hangs(prompt, response, row):
    time.sleep(60 if row["id"].endswith("7") else 0)
    return 0.0

def raises(prompt, response, row):
    return 1.0 if not response else 1 / 0

def counts(prompt, response, row):
    return {"score": float(len(response)), "letters": 1.0}
"""


def test_a_reward_that_raises_ends_the_run_naming_row_and_function(flowrl: Command, tmp_path: Path) -> None:
    """REW-01: never scored in silence."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    run = flowrl(*ENDLESS, "algorithm=grpo", f"reward.function={rewards}:raises")
    assert run.code == 1 and run.left_behind == ()
    assert "ZeroDivisionError" in run.err and "raises" in run.err and "row" in run.err


@pytest.mark.slow
def test_a_reward_that_hangs_can_be_scored_and_is_counted(flowrl: Command, tmp_path: Path) -> None:
    """REW-01: opt-in; the limit kills the work and the next rows are graded."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    small = (
        "data.prompts_per_step=8",
        "actor.minibatch_prompts=8",
        "trainer.total_steps=1",
        "trainer.eval_every=0",
        "kl=none",
    )
    run = flowrl(
        *small, "algorithm=grpo", f"reward.function={rewards}:hangs", "reward.timeout_seconds=0.5",
        "reward.on_error=score:-1", "rollout.samples_per_prompt=2", "trainer.seed=3",
    )  # fmt: skip
    assert run.code == 0, run.err[-2000:]
    errors = run.metrics[-1].get("reward/errors", 0)
    assert run.metrics[-1]["reward/mean"] == pytest.approx(-errors / 16)


def test_data_and_reward_mistakes_are_found_before_ray_starts(flowrl: Command, tmp_path: Path) -> None:
    """REW-02, DAT-01: exit 2 and one message with the remedy."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12345678901234567890+1="}\n' * 8)
    for overrides, word in (
        ((f"data.train_files=[{prompts}]", "data.eval_files=[]", "reward.function=nowhere.at:all"), "data.overlong"),
        (("reward.function=flowrl.builtin.arithmetic:scor",), "scor"),
        ((f"reward.function={tmp_path}/none.py:f",), "none.py"),
    ):
        run = flowrl(
            *overrides, "data.prompts_per_step=8", "actor.minibatch_prompts=8", name=uuid.uuid4().hex, timeout=60
        )
        assert run.code == 2, run.err
        assert word in run.err and "Traceback" not in run.err
        assert "Ray" not in run.out


def test_a_run_dir_that_cannot_be_used_is_refused_and_leaves_nothing(flowrl: Command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file / "below", Path("/proc/none/here"), tmp_path / ("a" * 300)):
        run = flowrl(f"run.dir={folder}", name="unused", timeout=60)
        assert run.code == 2 and "run.dir" in run.err and "Traceback" not in run.err, run.err


def test_two_runs_cannot_write_into_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launch._alone(folder), pytest.raises(ConfigError, match=r"run.dir=.* still going"), launch._alone(folder):
        pass
    with launch._alone(folder):
        assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_set_aside_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in (1, 2):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(str(number))
        assert launch._set_aside(folder) == tmp_path / f"run.{number}"
    assert launch._set_aside(folder) is None
    assert (tmp_path / "run.2" / "metrics.jsonl").read_text() == "2"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_imports_is_one_line(flowrl: Command, number: signal.Signals, code: int) -> None:
    """RAY-03: while a newcomer still sees nothing."""
    mark = uuid.uuid4().hex
    folder = flowrl.folder / "run"
    run = subprocess.Popen(
        [sys.executable, "-m", "flowrl.main_ppo", f"run.dir={folder}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=flowrl.environment(mark),
    )
    deadline = time.monotonic() + 60
    while not (folder / "logs" / "driver.log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert run.returncode == code, err
    assert "Traceback" not in err and "stopped by" in err
    assert processes_marked(mark) == []


def test_weights_that_do_not_fit_are_told_before_ray_starts(flowrl: Command, tmp_path: Path) -> None:
    """The cheap way: headers only."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model("builtin:tiny", "~/.cache/flowrl"), model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    run = flowrl(f"model.path={model}", timeout=100)
    assert run.code == 2 and "model.safetensors cannot be read" in run.err and "Ray" not in run.out, run.err
    assert not run.folder.exists()
