"""Runs over several hosts, which are namespaces of this machine: see `hosts`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Finished
from tests.end_to_end.test_failures import ENDLESS
from tests.multinode.hosts import Host, Hosts, why_not
from tests.multinode.ray_on_hosts import RayOnHosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"needs hosts of its own: {why_not()}"),
    pytest.mark.timeout(900),
]

SMALL = (
    "trainer.total_steps=2",
    "trainer.eval_every=2",
    "data.prompts_per_step=8",
    "actor.minibatch_prompts=4",
    "data.eval_prompts=8",
)
BY_NATURE = re.compile(r"seconds|tokens_per_second|memory")


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayOnHosts]:
    with Hosts(3) as made:
        yield RayOnHosts(made, NCCL_DEBUG="WARN")


@pytest.fixture
def pair() -> Iterator[RayOnHosts]:
    """Two hosts, one of which the test may lose."""
    with Hosts(2) as made:
        yield RayOnHosts(made)


def numbers(run: Finished, but: str = "none") -> list[dict[str, float]]:
    """The metrics of a run that depend on what it computed alone, without those that begin with `but`."""
    assert run.code == 0, run.err[-3000:]
    assert run.left_behind == ()
    rows = [{key: value for key, value in row.items() if not BY_NATURE.search(key)} for row in run.metrics]
    return [{key: value for key, value in row.items() if not key.startswith(but)} for row in rows]


def test_a_run_over_hosts_computes_what_it_computes_on_one(hosts: RayOnHosts, tmp_path: Path) -> None:
    """Every metric is the same number: tensor-parallel over two hosts, and with the engine on a third, whose weights
    come over the network."""
    apart = hosts.start(*SMALL, f"run.dir={tmp_path / 'two'}")
    seen: set[str] = set()
    while apart.poll() is None and len(seen) < 2:
        seen |= hosts.workers().keys()
        time.sleep(0.2)
    two = hosts.finish(apart, tmp_path / "two")
    assert len(seen) == 2, seen
    one = hosts.run(tmp_path / "one", *SMALL, "cluster.address=local")
    assert [row["step"] for row in one.metrics] == [0, 1, 2]
    assert numbers(one) == numbers(two)
    three = hosts.run(
        tmp_path / "three", *SMALL, "cluster.devices=2", "placement=standalone_rollout", "cluster.rollout_devices=1"
    )
    assert numbers(one, but="reshard/") == numbers(three, but="reshard/")
    assert all(row["reshard/fingerprint_ok"] == 1.0 for row in three.metrics[1:])


def test_the_doctor_names_hosts_that_do_not_share_the_folder_of_the_run(hosts: RayOnHosts) -> None:
    """And sees what was in the environment of `ray start`."""
    run = hosts.run(hosts.local, "cluster.devices=3", "step=false", module="flowrl.doctor")
    lines = {line.split()[1]: line for line in run.out.splitlines()}
    assert run.code == 1 and run.left_behind == (), run.out + run.err
    assert lines.pop("run.dir").startswith("fail") and "10.77.0.2, 10.77.0.3 do not share" in run.out
    assert not [line for line in lines.values() if line.startswith("fail")], run.out
    assert "3 ranks met over gloo" in lines["rendezvous"] and "10.77.0.3 -> 10.77.0.1" in lines["bandwidth"]
    assert "node 10.77.0.2: GLOO_SOCKET_IFNAME=eth0 NCCL_DEBUG=WARN" in lines["environment"]


def wait_for_rows(process: subprocess.Popen[str], folder: Path, rows: int) -> None:
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= rows):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def lose(hosts: RayOnHosts, how: Callable[[], None], folder: Path) -> Finished:
    """A run on both hosts, of which one is lost in a step."""
    layout = ("cluster.devices=2", "actor.layout.tp=1", "algorithm=grpo")
    process = hosts.start(*ENDLESS, *layout, f"run.dir={folder}")
    wait_for_rows(process, folder, 1)
    how()
    return hosts.finish(process, folder, timeout=120)


def names(run: Finished, host: Host) -> bool:
    """Whether the last line says where it happened, and when."""
    last = run.err.strip().splitlines()[-1]
    return f"node {host.address}" in last and bool(re.search(r"rank \d", last)) and "phase" in last and "step" in last


def test_a_host_whose_processes_are_killed_ends_the_run_with_its_name(pair: RayOnHosts, tmp_path: Path) -> None:
    lost = pair.others[0]
    run = lose(pair, lost.kill, tmp_path / "run")
    assert run.code == 1 and run.left_behind == () and names(run, lost), run.err


def test_a_host_is_named_by_a_ray_that_hangs(pair: RayOnHosts, tmp_path: Path) -> None:
    """The survivor's collective raises at once; the GCS, which has stopped, neither tells of the loss nor answers what is
    asked of it to end the run."""
    lost, store = pair.others[0], pair.control_store()

    def kill() -> None:
        os.kill(store, signal.SIGSTOP)
        lost.kill()

    run = lose(pair, kill, tmp_path / "run")
    assert run.code == 1 and run.left_behind == () and names(run, lost), run.err
    assert f"Ray on node {lost.address} is gone" in run.err.splitlines()[-1]


def test_a_host_that_is_cut_off_ends_the_run_with_its_name(pair: RayOnHosts, tmp_path: Path) -> None:
    lost = pair.others[0]
    run = lose(pair, lost.cut_off, tmp_path / "run")
    assert run.code == 1 and run.left_behind == () and names(run, lost), run.err
