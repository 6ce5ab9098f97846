"""Checks before a long run: `python -m flowrl.doctor [overrides as of main_ppo] [step=false]`.

Looks at what the run of this configuration would use: one line for each check, with what was measured and, where it is
not well, the remedy. Exit code 0, or 1 when something failed (a warning is no failure); 2 for a wrong configuration.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn, TypeVar, cast

from flowrl.builtin.model import resolve_model
from flowrl.checks import judgement
from flowrl.checks.judgement import Finding
from flowrl.checks.node import NodeCheck
from flowrl.config.cli import run_main
from flowrl.config.paths import user_path
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError
from flowrl.config.units import all_devices
from flowrl.signals import Stopped, stop_signals
from flowrl.single_controller import Cluster, ResourcePool, WorkerError, WorkerGroup
from flowrl.workers.environment import process_environment

T = TypeVar("T")
_LOCK = Path(__file__).parent.parent / "requirements" / "cpu.lock"
_SENT_BYTES = 64 << 20
_CLOCK_ROUNDS = 5
_MEETING_SECONDS = 60.0
_STEP_SECONDS = 600
_STEP = (
    "algorithm=grpo", "kl=none", "model.path=builtin:tiny", "trainer.total_steps=1", "trainer.eval_every=0",
    "trainer.loggers=[]", "data.prompts_per_step=8", "actor.minibatch_prompts=8", "actor.layout.tp=1",
)  # fmt: skip


class Doctor:
    """Says findings as they come and keeps them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.findings: list[Finding] = []

    def say(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            sys.stdout.write(f"{finding}\n")
            sys.stdout.flush()

    def examine(self, step: bool) -> None:
        """All checks; what depends on one that failed is left out."""
        folder = _existing(user_path(self.config.run.dir))
        with TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
            num_nodes = self._cluster(Path(scratch))
            if step and not judgement.exit_code(self.findings):
                self._step(Path(scratch), num_nodes)

    def _cluster(self, scratch: Path) -> int:
        """The number of nodes that the devices lie on."""
        cluster = self.config.cluster
        model = resolve_model(self.config.model.path, self.config.model.cache_dir)
        try:
            with Cluster(cluster.address, object_store_bytes=cluster.object_store_bytes, run_name="doctor") as joined:
                self.say(Finding("ok", "cluster", f"{joined.banner}, {len(joined.nodes())} node(s)"))
                with self._pool(joined) as pool:
                    return self._pool_checks(pool, model, scratch)
        except WorkerError as error:
            lines = str(error).splitlines()
            remedy = "see the node's log; where ranks did not meet: firewalls, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
            self.say(Finding("fail", "processes", lines[-1], remedy))
        except ValueError as error:
            self.say(Finding("fail", "cluster", str(error)))
        return 0

    def _pool(self, cluster: Cluster) -> ResourcePool:
        ours, devices = self.config.cluster, all_devices(self.config)
        return ResourcePool(
            cluster, name="doctor", devices=devices, device=ours.device, env=process_environment(ours.device, devices),
            cpus_per_device=0.1 if ours.device == "cuda" else min(1.0, int(cluster.num_cpus * 100 / devices) / 100),
            placement_timeout_seconds=ours.placement_timeout_seconds,
            collective_timeout_seconds=min(_MEETING_SECONDS, ours.collective_timeout_seconds),
        )  # fmt: skip

    def _pool_checks(self, pool: ResourcePool, model: Path, scratch: Path) -> int:
        ranks = WorkerGroup.spawn(pool, NodeCheck)
        node_of = [pool.process(rank).node for rank in range(pool.devices)]
        first = {node: node_of.index(node) for node in dict.fromkeys(node_of)}
        on_cpu = pool.device == "cpu"
        locked = judgement.locked_versions(_LOCK.read_text()) if on_cpu and _LOCK.is_file() else {}
        by_rank = _by_rank(ranks.facts(list(locked or judgement.STACK), str(model)))
        facts = {node: by_rank[rank] for node, rank in first.items()}
        kinds = {
            node: [by_rank[rank].device for rank in range(pool.devices) if node_of[rank] == node] for node in first
        }
        self.say(*judgement.versions(facts, locked, _LOCK.name), judgement.devices(kinds))
        start = time.perf_counter()
        sums = _by_rank(ranks.all_reduce())
        self.say(judgement.rendezvous(sums, time.perf_counter() - start, "gloo" if on_cpu else "nccl"))
        self.say(judgement.bandwidth(_bandwidth(ranks, _pairs(node_of), node_of), pool.device))
        self.say(_skew(ranks, first), judgement.environment(facts), judgement.model(facts, str(model)))
        wrote, reads = _by_rank(ranks.write(str(scratch))), _by_rank(ranks.reads(str(scratch)))
        own = [rank for rank in range(pool.devices) if (scratch / f"rank-{rank}").is_file()]
        self.say(judgement.shared(str(scratch.parent), node_of, wrote, reads, own))
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        self.say(judgement.disk(shutil.disk_usage(scratch).free, weights), *judgement.memory(facts))
        return len(first)

    def _step(self, scratch: Path, num_nodes: int) -> None:
        ours = self.config.cluster
        where = [f"cluster.device={ours.device}", f"cluster.devices={all_devices(self.config)}"]
        where += ["rollout.cuda_graphs=false"] if ours.device == "cuda" else []
        where += [] if ours.address is None else [f"cluster.address={ours.address}"]
        # Where the nodes have no home in common, the built-in model has to lie in the run's folder.
        cache = user_path(self.config.model.cache_dir) if num_nodes == 1 else scratch / "model"
        command = [
            sys.executable,
            "-m",
            "flowrl.main_ppo",
            *_STEP,
            *where,
            f"model.cache_dir={cache}",
            f"run.dir={scratch / 'step'}",
        ]
        start = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_SECONDS)
        except subprocess.TimeoutExpired:
            self.say(Finding("fail", "step", f"the built-in model's step was not done in {_STEP_SECONDS} s"))
            return
        seconds = time.perf_counter() - start
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            self.say(Finding("fail", "step", f"the built-in model's step ended with {done.returncode}: {last}"))
        else:
            self.say(Finding("ok", "step", f"the built-in model made a step; {seconds:.0f} s with start and end"))


def _by_rank(answers: T) -> Sequence[T]:
    """A driver gets the answers of all ranks where the method, as a type checker sees it, gives one."""
    return cast(Sequence[T], answers)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _pairs(node_of: Sequence[str]) -> list[tuple[int, int]]:
    """Ranks that are measured: a ring over the first ranks of all nodes, and one pair inside each node."""
    first = [node_of.index(node) for node in dict.fromkeys(node_of)]
    ring = [(rank, first[(place + 1) % len(first)]) for place, rank in enumerate(first)] if len(first) > 1 else []
    inside = [(rank, rank + 1) for rank in first if rank + 1 < len(node_of) and node_of[rank + 1] == node_of[rank]]
    return [*ring, *inside]


def _bandwidth(ranks: NodeCheck, pairs: list[tuple[int, int]], node_of: Sequence[str]) -> dict[str, float]:
    """GB/s by pair, in words."""
    if not pairs:
        return {}
    seconds = _by_rank(ranks.send_around(pairs, _SENT_BYTES))
    return {
        f"{node_of[one]} -> {node_of[two]}" if node_of[one] != node_of[two] else f"inside {node_of[one]}": _SENT_BYTES
        / 1e9
        / seconds[one][number]
        for number, (one, two) in enumerate(pairs)
    }


def _skew(ranks: NodeCheck, first: dict[str, int]) -> Finding:
    """From the fastest of some rounds."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        start = time.time()
        answers = _by_rank(ranks.now())
        rounds.append((time.time() - start, start, answers))
    lasted, start, answers = min(rounds, key=lambda each: each[0])
    return judgement.skew({node: answers[rank] - start - lasted / 2 for node, rank in first.items()}, lasted / 2)


def _step_wanted(argv: list[str]) -> bool:
    """Takes `step=...` out of the arguments. Error: `ConfigError` for a value other than true and false."""
    wanted = True
    for text in [text for text in argv if text.startswith("step=")]:
        argv.remove(text)
        if text not in ("step=true", "step=false"):
            raise ConfigError(f"{text} is not legal; legal: step=true | step=false")
        wanted = text == "step=true"
    return wanted


def _examine(step: bool, config: Config) -> int:
    doctor = Doctor(config)
    doctor.examine(step)
    return judgement.exit_code(doctor.findings)


def main(argv: Sequence[str]) -> NoReturn:
    """Ends the process with the exit code."""
    overrides = list(argv)
    try:
        step = _step_wanted(overrides)
        with stop_signals():
            run_main(partial(_examine, step), overrides)
    except ConfigError as error:
        sys.stderr.write(f"configuration error: {error}\n")
        sys.exit(2)
    except Stopped as stopped:
        sys.stderr.write(f"{stopped}\n")
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
