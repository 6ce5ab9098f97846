"""ResourcePool: one process per device, reserved as a Ray placement group and joined by one process group."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowrl.single_controller.call import PROCESS
from flowrl.single_controller.failures import ClusterError, ProcessInfo, WorkerError
from flowrl.single_controller.placement import bundle_for, shortfall
from flowrl.single_controller.process import Answer, Process, ProcessSpec
from flowrl.single_controller.ray_private import control_store_answers
from flowrl.single_controller.stacks import Stack

if TYPE_CHECKING:
    from flowrl.single_controller.cluster import Cluster
    from flowrl.single_controller.group import WorkerGroup

logger = logging.getLogger("flowrl")
_RemoteProcess: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(Process)
_MESSAGE_SECONDS = 30
_SHUTDOWN_SECONDS = 10
_STACK_SECONDS = 5


class ResourcePool:
    """Devices of one kind, a process on each. Ranks go node by node; their order is the same after a restart."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        name: str = "main",
        devices: int = 1,
        device: str = "cpu",
        env: Mapping[str, str] | None = None,
        shared: Mapping[str, str] | None = None,
        cpus_per_device: float | None = None,
        placement_timeout_seconds: float = 300.0,
        collective_timeout_seconds: float = 600.0,
    ) -> None:
        """Start the processes and their default process group (gloo on cpu, nccl on cuda).

        env: environment of the processes. shared: path by configuration key of what every node must see.
        cpus_per_device: Ray CPUs that a process reserves; None divides all CPUs of the cluster by ``devices``, so give
        it when several pools are to live side by side.

        Errors: ValueError with the arithmetic when the devices can never fit, or not within the placement timeout;
        ValueError naming the node that does not see a shared path.
        """
        if devices < 1 or device not in ("cpu", "cuda"):
            raise ValueError(f"a pool needs at least 1 device of kind cpu or cuda, got {devices} of {device!r}")
        cluster.claim_pool_name(self, name)
        self.cluster, self.name, self.devices, self.device = cluster, name, devices, device
        self.roles: dict[str, WorkerGroup] = {}
        self._failure: WorkerError | ClusterError | None = None
        self._closed = False
        self._group: PlacementGroup | None = None
        self._processes: list[Any] = []
        self._infos: list[ProcessInfo] = []
        self._watch: dict[int, Any] = {}
        try:
            self._start(dict(env or {}), cpus_per_device, placement_timeout_seconds, collective_timeout_seconds)
            self._rendezvous(dict(shared or {}))
        except BaseException:
            self._kill()
            raise

    def _start(
        self, env: dict[str, str], cpus: float | None, placement_timeout: float, collective_timeout: float
    ) -> None:
        bundle = self._bundle_that_fits(cpus, placement_timeout if self.cluster.awaits_nodes else 0)
        self._group = placement_group([bundle] * self.devices, strategy="PACK")
        self._await_placement(bundle, placement_timeout)
        places = self._places()
        env_vars = _environment(self.device, bundle["CPU"], env) | self.cluster.mark
        self.cluster.calls.nodes.add(self.cluster.raylets({node for _, _, node in places}))
        for rank, (index, local_rank, node) in enumerate(places):
            spec = ProcessSpec(
                rank=rank,
                world_size=self.devices,
                local_rank=local_rank,
                device=self.device,
                pool_name=self.name,
                run_name=self.cluster.run_name,
                log_dir=self.cluster.log_dir,
                collective_timeout_seconds=collective_timeout,
            )
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0.0), "scheduling_strategy": strategy}
            self._processes.append(_RemoteProcess.options(**options, runtime_env={"env_vars": env_vars}).remote(spec))
            self._infos.append(ProcessInfo(rank, node, 0, None))
        self._watch = {
            rank: process.watch.options(concurrency_group="control").remote()
            for rank, process in enumerate(self._processes)
        }
        self.cluster.calls.watch(self)

    def _rendezvous(self, shared: dict[str, str]) -> None:
        for rank, answer in self._on_all("start").items():
            self._infos[rank] = ProcessInfo(rank, *answer.value)
        for rank, answer in self._on_all("missing", shared).items():
            for key, path in answer.value.items():
                raise ValueError(
                    f"{key}: node {self._infos[rank].node} (rank {rank} of pool {self.name!r}) does not see {path}, which "
                    "the driver sees: put it on storage that all nodes mount at the same path"
                )
        host = self._address_for(self)
        self._on_all("join", host, self._on_first("open_store", host))

    def _address_for(self, *pools: ResourcePool) -> str:
        """Where processes of these pools reach this pool's rank 0."""
        one_node = len({info.node for pool in (self, *pools) for info in pool._infos}) == 1
        return "127.0.0.1" if one_node else self._infos[0].node

    def host_link(self, other: ResourcePool) -> tuple[str, int]:
        """Open a store on rank 0 for the processes of both pools; host and port at which they reach it."""
        host = self._address_for(other)
        return host, self._on_first("host_link", host, self.devices + other.devices)

    def _on_first(self, method: str, *args: Any) -> Any:
        process = self._processes[0]
        calls = self.cluster.calls
        call = calls.submit(self, PROCESS, method, lambda: {0: getattr(process, method).remote(*args)})
        return calls.wait(call)[0].value

    def _on_all(self, method: str, *args: Any) -> dict[int, Answer]:
        refs = {r: getattr(p, method).remote(*args) for r, p in enumerate(self._processes)}
        return self.cluster.calls.wait(self.cluster.calls.submit(self, PROCESS, method, lambda: refs))

    def _bundle_that_fits(self, cpus: float | None, timeout: float) -> dict[str, float]:
        """Resources of one device. Errors: ValueError when so many devices do not fit on the nodes that there are."""
        deadline = time.monotonic() + timeout
        while True:
            nodes = self.cluster.nodes()
            bundle = bundle_for(self.device, self.devices, nodes, cpus)
            problem = shortfall(self.name, self.devices, bundle, nodes, free=False)
            if problem is None:
                return bundle
            if time.monotonic() >= deadline:
                raise ValueError(problem)
            logger.info("waiting for nodes, %.0f s more\n%s", deadline - time.monotonic(), problem)
            time.sleep(1)

    def _await_placement(self, bundle: Mapping[str, float], timeout: float) -> None:
        assert self._group is not None
        start, told = time.monotonic(), 0
        while not self._group.wait(1):
            waited = time.monotonic() - start
            problem = shortfall(self.name, self.devices, bundle, self.cluster.nodes(), free=True)
            if waited >= timeout:
                raise ValueError(
                    f"{problem or 'the devices were not granted'}\n  waited {waited:.0f} s for pool {self.name!r}"
                )
            if waited // _MESSAGE_SECONDS > told:
                told = int(waited // _MESSAGE_SECONDS)
                logger.warning("waiting for devices, %.0f of %.0f s\n%s", waited, timeout, problem or "")

    def _places(self) -> list[tuple[int, int, str]]:
        """(bundle index, local rank, node address) by rank: nodes by address, bundles of a node by index."""
        assert self._group is not None
        address = {node.node_id: node.address for node in self.cluster.nodes()}
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        places: list[tuple[int, int, str]] = []
        seen: dict[str, int] = {}
        for index in sorted(node_of, key=lambda i: (address[node_of[i]], node_of[i], i)):
            places.append((index, seen.get(node_of[index], 0), address[node_of[index]]))
            seen[node_of[index]] = places[-1][1] + 1
        return places

    # For worker groups and the waiting driver

    @property
    def key(self) -> int:
        return id(self)

    @property
    def failed(self) -> bool:
        """Whether a process of the cluster failed since this pool started; such a pool is gone."""
        return self._failure is not None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [info.pid for info in self._infos]

    def process(self, rank: int) -> ProcessInfo:
        return self._infos[rank]

    def actor(self, rank: int) -> Any:
        """Ray's handle of a process."""
        return self._processes[rank]

    def watch_refs(self) -> dict[int, Any]:
        """By rank, a reference that becomes ready when the process dies."""
        return self._watch

    def check_usable(self) -> None:
        """Errors: what ended the pool; ValueError after shutdown."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ValueError(f"pool {self.name!r} is shut down")

    def fail(self, error: WorkerError) -> None:
        """Note why the pool ended and kill what is left of it, without waiting."""
        self._failure = error
        self._kill()

    def lose(self, error: ClusterError) -> None:
        """Note that Ray is gone; nothing more is asked of it."""
        self._failure, self._closed = error, True
        self.cluster.release_pool_name(self)

    def dump_stacks(self) -> dict[int, Stack]:
        """Write the stacks of all processes to their logs, also while they hang; by rank where a method stands.

        Ranks that do not answer within some seconds are left out.
        """
        refs = [p.dump_stacks.options(concurrency_group="control").remote() for p in self._processes]
        ready, _ = ray.wait(refs, num_returns=self.devices, timeout=_STACK_SECONDS)
        stacks = {}
        for rank, ref in enumerate(refs):
            if ref in ready:
                with suppress(RayError):  # it died meanwhile
                    stacks[rank] = ray.get(ref)
        return stacks

    def shutdown(self) -> None:
        """Close the roles in good order (bounded), then end the processes. Idempotent."""
        if self._closed:
            return
        self.cluster.calls.forget(self)
        if self._failure is None:
            ray.wait(
                [p.shut_down.remote() for p in self._processes], num_returns=self.devices, timeout=_SHUTDOWN_SECONDS
            )
        self._kill()

    def wait_until_gone(self, seconds: float) -> None:
        """Until the processes of a pool that ended are gone, those on the driver's node, but not longer than this."""
        here = ray.util.get_node_ip_address()
        pids = [info.pid for info in self._infos if info.node == here and psutil.pid_exists(info.pid)]
        deadline = time.monotonic() + seconds
        while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.1)

    def kill(self) -> None:
        """End the processes at once. Idempotent."""
        if not self._closed:
            self.cluster.calls.forget(self)
            self._kill()

    def _kill(self) -> None:
        self._closed = True
        self.cluster.release_pool_name(self)
        for process in self._processes:
            ray.kill(process, no_restart=True)
        self._watch = {}
        if self._group is not None:
            if control_store_answers():
                remove_placement_group(self._group)
            self._group = None

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.kill()


def _environment(device: str, cpus: float, env: Mapping[str, str]) -> dict[str, str]:
    # The driver's import path, so that classes that it pickles by name are found.
    paths = [os.path.abspath(path) for path in sys.path if not path.endswith(".zip")]
    variables = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": str(max(1, int(cpus)))}
    if device == "cuda":
        # Every process sees all GPUs of its node and selects its own: peer-to-peer set-up needs to see the others.
        variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 8))
    return {**variables, **env}
