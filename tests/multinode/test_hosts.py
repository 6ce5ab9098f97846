"""Runs over several hosts, which are namespaces of this machine: see `hosts`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Finished
from tests.multinode.hosts import Hosts, why_not
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
        yield RayOnHosts(made)


def numbers(run: Finished) -> list[dict[str, float]]:
    """The metrics of a run that depend on what it computed alone."""
    assert run.code == 0, run.err[-3000:]
    assert run.left_behind == ()
    return [{key: value for key, value in row.items() if not BY_NATURE.search(key)} for row in run.metrics]


def test_a_run_over_two_hosts_computes_what_it_computes_on_one(hosts: RayOnHosts, tmp_path: Path) -> None:
    """Tensor-parallel over the hosts' network: every metric is the same number."""
    apart = hosts.start(*SMALL, f"run.dir={tmp_path / 'apart'}")
    seen: set[str] = set()
    while apart.poll() is None and len(seen) < 2:
        seen |= hosts.workers().keys()
        time.sleep(0.2)
    two = hosts.finish(apart, tmp_path / "apart")
    assert len(seen) == 2, seen
    one = hosts.run(tmp_path / "together", *SMALL, "cluster.address=local")
    assert numbers(one) == numbers(two)
    assert [row["step"] for row in two.metrics] == [0, 1, 2]
    assert hosts.processes_of_runs() == []
