"""What can be known of a failure beside the error itself: slow calls, stacks, memory, Ray's own processes. No Ray here."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from flowrl.single_controller import host_memory, reaper
from flowrl.single_controller.failures import death_cause
from flowrl.single_controller.health import JoinedRay, OwnRay
from flowrl.single_controller.patience import Patience
from flowrl.single_controller.stacks import Frame, Stack, stack_of, standing, suspects


@dataclass(eq=False)
class Running:
    """As much of a call as patience looks at."""

    role: str = "actor"
    method: str = "update"
    starts: bool = False


def test_a_slow_call_is_told_of_after_a_minute_and_then_every_minute():
    patience, call = Patience(limit_seconds=None), Running()
    told = []
    for now in range(0, 200, 10):
        patience.look([call], now)
        told += [(now, seconds) for _, seconds in patience.slow(now)]
    assert told == [(60, 60), (120, 120), (180, 180)]
    assert patience.overdue(10**6) is None


def test_a_call_as_long_as_the_one_before_is_not_told_of():
    """A run whose steps last minutes is silent from the second step on, and a call of another method has its own measure."""
    patience, first, second, other = Patience(None), Running(), Running(), Running(method="log_probs")
    patience.look([first], 0)
    patience.look([], 100)
    patience.look([second], 100)
    assert patience.slow(299) == [] and [call for call, _ in patience.slow(300)] == [second]
    patience.look([second, other], 300)
    assert [call for call, _ in patience.slow(360)] == [second, other]


def test_a_call_is_overdue_when_it_has_run_for_the_limit_not_when_it_has_waited():
    patience, running, queued = Patience(limit_seconds=30), Running(), Running()
    patience.look([running], 0)
    assert patience.overdue(29) is None
    patience.look([queued], 29)
    assert patience.overdue(58) is None and patience.overdue(59) is queued


def test_starts_of_processes_may_last_longer_than_a_short_limit_but_not_for_ever():
    patience, start = Patience(limit_seconds=6), Running(starts=True)
    patience.look([start], 0)
    assert patience.overdue(299) is None and patience.overdue(300) is start


WAITS = Stack(
    (Frame("recipes/x.py", 3, "f"), Frame("/site-packages/torch/distributed/distributed_c10d.py", 9, "barrier"))
)
HANDLE = Stack((Frame("/site-packages/megatron/core/param_and_grad_buffer.py", 3, "finish", "self.handle.wait()"),))
SLEEPS = Stack((Frame("recipes/x.py", 3, "f"), Frame("/site-packages/lib/y.py", 7, "g")))


def test_ranks_that_wait_in_a_collective_are_not_the_ones_that_hang():
    assert suspects([0, 1, 2, 3], {0: WAITS, 1: SLEEPS, 2: WAITS, 3: HANDLE}) == [1]
    assert suspects([0, 1], {0: WAITS, 1: WAITS}) == [], "all wait: nobody can be singled out"
    assert suspects([0, 1], {0: WAITS}) == [1], "a stopped process does not tell its stack"
    assert "waits for its peers in" in standing(0, {0: WAITS})
    assert standing(0, {0: SLEEPS}) == "stands in /site-packages/lib/y.py:7 in g, recipes/x.py:3 in f"
    assert "stopped" in standing(1, {0: WAITS})


def test_the_stack_of_a_thread_without_a_method_is_empty():
    assert stack_of(None) == stack_of(threading.get_ident()) == Stack(())


def test_failed_allocations_get_the_figures_of_process_and_node():
    """RAY-01: what was asked for, what the process holds, what the node has."""
    for error in (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
    ):
        with pytest.raises(type(error)) as caught, host_memory.allocation_failures_with_figures():
            raise error
        note = caught.value.__notes__[0]
        assert note.startswith(f"out of memory: {type(error).__name__}") and note.count("GiB") == 4
    with pytest.raises(RuntimeError) as other, host_memory.allocation_failures_with_figures():
        raise RuntimeError("shapes differ")
    assert "__notes__" not in vars(other.value)


def test_sizes_of_processes_are_those_last_seen():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    sizes = host_memory.ResidentSizes()
    sizes.look(process.pid)
    process.communicate(b"\n")
    sizes.look(process.pid)
    assert sizes.figures(process.pid).startswith("last seen with 0.0") and sizes.figures(1 << 22) == ""
    total, available = host_memory.node_bytes()
    assert 0 < available <= total


@pytest.mark.parametrize(
    ("message", "tail", "kills", "words"),
    [
        ("connection error code 2. End of file", ["Fatal Python error: Bus error"], 0, "SIGBUS"),
        ("connection error code 2. End of file", ["Fatal Python error: Aborted"], 0, "SIGABRT"),
        ("connection error code 2. End of file", [], 0, "SIGKILL (or it called os._exit); last seen with 1 GiB"),
        (
            "connection error code 2. End of file",
            [],
            1,
            "out-of-memory killer (SIGKILL; 1 such kill(s) here since the start; last",
        ),
        ("The actor died because its node has died. Node Id: 5f", [], 0, "its node is gone"),
    ],
)
def test_causes_have_signal_and_figures_where_they_are_known(message, tail, kills, words):
    """RAY-01."""
    assert words in death_cause(message, tail, kills, "last seen with 1 GiB")


def test_rays_own_processes_are_told_by_their_exit_codes():
    assert OwnRay(lambda: {"log_monitor": 1}).problem() is None
    assert OwnRay(lambda: {"raylet": -9}).problem() == "Ray's raylet of this run was killed by SIGKILL"
    assert OwnRay(lambda: {"gcs_server": 1}).problem() == "Ray's gcs_server of this run ended with code 1"


def test_a_joined_rays_processes_are_told_by_their_ports():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ray = JoinedRay({"GCS": ("127.0.0.1", port)})
        assert ray.problem() is None
    assert f"Ray's GCS at 127.0.0.1:{port} is gone" in (ray.problem() or "")


def test_a_driver_that_is_stuck_in_ray_when_it_is_gone_is_ended_with_one_line():
    """RAY-01: some of Ray's calls do not return then."""
    # A function of Ray's that takes long stands for one that does not return; the main thread may do anything else.
    program = (
        "import sys, time, ray; from flowrl.single_controller import health; health._STUCK_SECONDS = health._LOOK_SECONDS = 0.1\n"
        "say = lambda words: sys.stderr.write(words + '\\n')\n"
        "health.RayWatch(health.OwnRay(lambda: {'raylet': -9}), say); time.sleep(1); say('idle')\n"
        "exec(compile('time.sleep(100)', ray.__file__, 'exec'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    found = "Ray's raylet of this run was killed by SIGKILL"
    assert done.stderr.splitlines() == [
        f"{found}; Ray ended the driver with it",
        "idle",
        f"{found}; the driver waited for Ray meanwhile and was ended",
    ]


def test_a_process_of_ray_that_ends_wakes_the_watch():
    """RAY-01: Ray ends the driver soon after, and by then it must be known why."""
    with subprocess.Popen(["sleep", "100"]) as other, subprocess.Popen(["sleep", "100"]) as raylet:
        ray = OwnRay(dict, [raylet.pid, other.pid])
        raylet.kill()
        started = time.monotonic()
        ray.wait(60)
        ray.wait(0.1)
        ray.close()
        other.kill()
    assert time.monotonic() - started < 50


def test_the_reaper_says_what_a_driver_that_ends_without_a_word_has_left_to_say(tmp_path):
    """RAY-01: its last words only, and none of one that ends in order."""
    driver = (
        "import os, subprocess, sys; from flowrl.single_controller import reaper\n"
        "command = [sys.executable, '-I', '-S', reaper.__file__, str(os.getpid()), 'FLOWRL_RUN=nobody']\n"
        "watching = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)\n"
        "watching.stdin.write(b'first\\n'); watching.stdin.write(b'last\\n')\n"
        "os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == "last\n"


def test_the_reaper_ends_exactly_the_marked_processes_and_removes_what_it_was_given(tmp_path):
    """RAY-03: a lock that another run has taken meanwhile stays."""
    import fcntl

    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], env={"FLOWRL_RUN": mark})
        for mark in ("ours", "another")
    ]
    folder, free, held = tmp_path / "folder", tmp_path / ".free.lock", tmp_path / ".held.lock"
    folder.mkdir()
    (folder / "file").touch()
    free.touch()
    try:
        with held.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.2)
            reaper.reap("FLOWRL_RUN=ours", [str(folder), str(free), str(held), str(tmp_path / "absent")])
            assert sleepers[0].wait(10) == -9 and sleepers[1].poll() is None
        assert [path.name for path in tmp_path.iterdir()] == [".held.lock"]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_the_reaper_knows_rays_agents_by_their_files(tmp_path):
    """RAY-03: their titles overwrite their environment, marks included; whoever else reads a file there is left alone."""
    (tmp_path / "log").touch()
    program = (
        "import ctypes, sys, time; file = open(sys.argv[2]); ctypes.CDLL(None).prctl(15, sys.argv[1].encode()); "
        "print('there', flush=True); time.sleep(100)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, title, str(tmp_path / "log")], stdout=subprocess.PIPE)
        for title in ("ray::Agent", "tail")
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline()
        reaper.reap("FLOWRL_RUN=nobody", [str(tmp_path)])
        assert processes[0].wait(10) == -9 and processes[1].poll() is None and not tmp_path.exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
