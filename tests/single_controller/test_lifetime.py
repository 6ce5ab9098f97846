"""Starting, joining and ending: what a run leaves behind, and how it says that it cannot start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from flowrl.single_controller import Cluster, ResourcePool, ray_private
from flowrl.single_controller import cluster as cluster_module
from flowrl.single_controller.reaper import marked_processes, reap

SCRIPT = Path(__file__).with_name("driver_script.py")
ROOT = SCRIPT.parents[2]
OPEN = {"RAY_AUTH_MODE": "disabled"}


def start_driver(mode: str, mark: str, **env: str) -> subprocess.Popen[str]:
    name, _, value = mark.partition("=")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **env, name: value}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), mode],
        env=variables,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def new_mark() -> str:
    return f"FLOWRL_TEST={uuid.uuid4().hex}"


def shared_memory(pid: int) -> set[str]:
    """Files in shared memory that a process has mapped or open."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        mapped = {line.split(maxsplit=5)[-1].strip() for line in lines}
        opened = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return set()
    return {path for path in mapped | opened if path.startswith("/dev/shm/")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "signum", "code"),
    [("stay", signal.SIGINT, 130), ("stay", signal.SIGTERM, 143), ("stay", signal.SIGKILL, -9), ("raise", None, 1)],
)
def test_nothing_is_left_however_the_driver_ends(mode, signum, code):
    """RAY-03: one signal is enough; soon no process of the run and none of its files in shared memory or /tmp."""
    mark = new_mark()
    driver = start_driver(mode, mark, RAY_ADDRESS="")
    assert "new local cluster" in driver.stdout.readline()
    assert "sum 3.0" in driver.stdout.readline()
    folders = {
        e.split("=", 1)[1]
        for pid in marked_processes(mark)
        for e in environment(pid)
        if e.startswith("FLOWRL_CLUSTER=")
    }
    ours = {path for pid in marked_processes(mark) for path in shared_memory(pid)}
    if signum is not None:
        driver.send_signal(signum)
    start = time.monotonic()
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == code, errors
    while (left := marked_processes(mark)) and time.monotonic() - start < 60:
        time.sleep(0.2)
    assert not left
    assert not [path for path in ours if os.path.exists(path)]
    deadline = time.monotonic() + 30
    while any(map(os.path.exists, folders)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert folders and not any(map(os.path.exists, folders))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "words"),
    [
        ("raylet", "Ray's raylet of this run was killed by SIGKILL"),
        ("gcs_server", "Ray's gcs_server of this run was killed by SIGKILL"),
    ],
)
def test_a_ray_that_is_gone_ends_the_driver_with_its_name_and_leaves_nothing(process, words):
    """RAY-01: the whole node; Ray itself tells of its raylet late, and of its GCS never."""
    mark = new_mark()
    driver = start_driver("stay", mark, RAY_ADDRESS="")
    assert "new local cluster" in driver.stdout.readline() and "sum 3.0" in driver.stdout.readline()
    os.kill(
        next(pid for pid in marked_processes(mark) if f"/{process}" in command(pid).partition(" ")[0]), signal.SIGKILL
    )
    _, errors = driver.communicate(timeout=60)
    assert driver.returncode == 1, errors
    assert words in errors.splitlines()[-1]
    deadline = time.monotonic() + 60
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not marked_processes(mark)


@pytest.mark.slow
def test_a_ray_that_hangs_while_the_driver_ends_does_not_hold_it():
    """Its GCS lives and answers nothing: some of the requests that end a run wait for it without a limit."""
    mark = new_mark()
    driver = start_driver("hang", mark, RAY_ADDRESS="")
    _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 1
    assert errors.splitlines()[-1] == "ValueError: the driver fails"
    deadline = time.monotonic() + 60
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not marked_processes(mark)


@pytest.fixture(scope="module")
def started_ray():
    """Address of a Ray that somebody else has started, which anybody on this machine may join."""
    folder, mark = tempfile.mkdtemp(prefix="flowrl-test-", dir="/tmp"), new_mark()
    name, _, value = mark.partition("=")
    ray_start = ("start", "--head", "--port=0", "--num-cpus=4", "--include-dashboard=false", f"--temp-dir={folder}")
    try:
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *ray_start, "--object-store-memory=100000000"],
            env={**os.environ, name: value, **OPEN}, check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        yield (Path(folder) / "ray_current_cluster").read_text().strip()
    finally:
        reap(mark, [folder])


@pytest.mark.slow
def test_a_killed_driver_of_a_joined_ray_leaves_the_others_alone(started_ray: str):
    """RAY-03: its workers go, though they are busy; another job's and Ray itself stay."""
    marks = new_mark(), new_mark()
    drivers = [start_driver("stay", mark, RAY_ADDRESS=started_ray, **OPEN) for mark in marks]
    workers = []
    for driver, mark in zip(drivers, marks, strict=True):
        assert "joined" in driver.stdout.readline() and "sum 3.0" in driver.stdout.readline()
        watcher = next(words for pid in marked_processes(mark) if "reaper.py" in (words := command(pid)))
        run = next(word for word in watcher.split() if word.startswith("FLOWRL_RUN="))
        workers.append(run)
        assert len(marked_processes(run)) == 2
    drivers[0].kill()
    drivers[0].communicate(timeout=60)
    deadline = time.monotonic() + 60
    while (left := marked_processes(marks[0]) + marked_processes(workers[0])) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    assert len(marked_processes(workers[1])) == 2 and drivers[1].poll() is None
    drivers[1].terminate()
    assert drivers[1].wait(60) == 143
    assert not marked_processes(marks[1]) + marked_processes(workers[1])


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") or " "
    except OSError:
        return " "


def environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return []


@pytest.mark.slow
def test_two_runs_join_one_ray_at_once_and_leave_it_up(started_ray: str):
    """RAY-02, RAY-06: same second, same names, one machine: both work, say what they joined, and Ray stays up."""
    mark = new_mark()
    for _ in range(2):
        drivers = [start_driver("once", mark, RAY_ADDRESS=started_ray, **OPEN) for _ in range(2)]
        for driver in drivers:
            output, errors = driver.communicate(timeout=120)
            assert driver.returncode == 0, errors
            assert f"joined {started_ray}, ray {ray.__version__}, Python" in output and "sum 3.0" in output
        assert not marked_processes(mark)


@pytest.mark.slow
def test_two_local_runs_start_in_the_same_second():
    """RAY-02, RAY-06: each starts its own Ray and its own process group; no port is chosen before it is bound, and that of
    a dashboard is of no matter."""
    mark = new_mark()
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else's is as good
            taken.bind(("127.0.0.1", 8265))
            taken.listen()
        drivers = [start_driver("once", mark, RAY_ADDRESS="") for _ in range(2)]
        for driver in drivers:
            output, errors = driver.communicate(timeout=180)
            assert driver.returncode == 0, errors
            assert "new local cluster" in output and "sum 3.0" in output
    assert not marked_processes(mark)


def test_held_devices_are_waited_for_and_then_named(pool, cluster: Cluster):
    """RAY-04: another pool holds CPUs: a bounded wait, then the arithmetic."""
    pool(1)
    with pytest.raises(ValueError, match=r"(?s)asks for 1 devices.*free\).*waited \d+ s"):
        ResourcePool(cluster, name="late", cpus_per_device=cluster.num_cpus, placement_timeout_seconds=1)
    with pytest.raises(ValueError, match="no node has a GPU: use cluster.device=cpu"):
        ResourcePool(cluster, name="gpu", device="cuda")
    with pytest.raises(ValueError, match="there is room for"):
        ResourcePool(cluster, name="wide", devices=3, cpus_per_device=cluster.num_cpus)


def test_dead_address_is_one_clear_error_in_seconds():
    """RAY-06: RAY_ADDRESS of a Ray that is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"no Ray cluster answers at '127.0.0.1:{port}'.*RAY_ADDRESS.*unset it"):
        cluster_module.join(f"127.0.0.1:{port}")
    assert time.monotonic() - start < 60
    for nonsense in ("nonsense", "fd00::1:6379", "h:6379:1", "h:65536", "h:²", ":6379", "[:6379"):
        with pytest.raises(ValueError, match="not host:port"):
            cluster_module.join(nonsense)
    with pytest.raises(ValueError, match="no Ray cluster answers at"):
        cluster_module.join(f"{'h' * 70}:6379")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        cluster_module._check_reachable(f"[::1]:{server.getsockname()[1]}")


@pytest.mark.parametrize("given", ["local", "junk", "ray://127.0.0.1:1"])
def test_auto_does_not_take_what_the_environment_says(given, monkeypatch):
    """RAY-06: Ray's own `auto` does, and of `local` it makes an open Ray of this process."""
    seen = []

    def init(**options: object) -> None:
        seen.append((options["address"], os.environ.get("RAY_ADDRESS")))
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="no Ray cluster answers at auto"):
        cluster_module.join("auto")
    assert seen == [("auto", None)] and os.environ["RAY_ADDRESS"] == given


def test_version_mismatch_is_one_line(monkeypatch):
    """RAY-06: joining a Ray of another version."""

    def mismatch(**options: object) -> None:
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\nThis process:\n    Ray: 2.60.0"
        )

    monkeypatch.setattr(cluster_module, "_check_reachable", lambda address: None)
    monkeypatch.setattr(ray, "init", mismatch)
    with pytest.raises(ValueError) as caught:
        cluster_module.join("10.0.0.1:6379")
    assert "2.9.0" in str(caught.value) and "2.60.0" in str(caught.value) and "\n" not in str(caught.value)


def test_ray_private_parts_are_what_they_were(cluster: Cluster):
    """Fails when Ray changes what `ray_private` relies on."""
    node = cluster.nodes()[0]
    assert set(ray_private.free_resources()) == {n.node_id for n in cluster.nodes()} and "CPU" in node.free
    assert not ray_private.ended_processes() and ray_private.raylet_address(node.node_id)[0] == node.address
    assert ray_private.serialized_bytes(bytes(100_000)) >= 100_000
    assert ray_private.control_store_answers()
    ray_private.keep_ray_off_the_console()
