"""Cluster: the Ray that a run works on, its own or one that it joins."""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ray

from flowrl.single_controller import reaper
from flowrl.single_controller.blocks import liveness
from flowrl.single_controller.call import Span
from flowrl.single_controller.calls import Calls
from flowrl.single_controller.failures import ClusterError, WorkerError
from flowrl.single_controller.health import JoinedRay, OwnRay, RayWatch
from flowrl.single_controller.placement import NodeResources
from flowrl.single_controller.ray_private import (
    confined,
    control_store_answers,
    ended_processes,
    forget_token,
    free_resources,
    keep_ray_off_the_console,
    leave_lost_ray,
    pids_of_own_ray,
    raylet_address,
)
from flowrl.single_controller.reaper import reap

if TYPE_CHECKING:
    from flowrl.single_controller.pool import ResourcePool

logger = logging.getLogger("flowrl")
_CONNECT_SECONDS = 5
_MIN_OBJECT_STORE_BYTES = 80_000_000
_MAX_OBJECT_STORE_BYTES = 2 << 30
_MAX_TEMP_PATH = 40
_MARK, _RUN_MARK = "FLOWRL_CLUSTER", "FLOWRL_RUN"
_LOOPBACK = "127.0.0.1"


class Cluster:
    """Context manager: starts a local Ray or joins one, and leaves nothing behind.

    ``awaits_nodes``: nodes that are missing may come back, so a pool that does not fit now waits for its devices.

    A joined Ray stays up; only the processes of this run end. ``banner`` says which it is, with versions. A local one
    listens on the loopback interface only, and answers only those who have its token: processes that it started.
    """

    def __init__(
        self,
        address: str | None = None,
        num_cpus: int | None = None,
        object_store_bytes: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        run_name: str = "run",
        call_timeout_seconds: float | None = None,
        lock: Path | None = None,
    ) -> None:
        """address: ``host:port`` or ``auto``; None takes RAY_ADDRESS if set and else starts a new local cluster.

        num_cpus, object_store_bytes: of a new local cluster; None takes what this process may use, and a quarter of
        free shared memory (at most 2 GiB). log_dir: folder for the logs of workers, made where they run.
        call_timeout_seconds: a method that runs longer is a failure; None is no limit. lock: a file that this run holds
        locked, removed when the driver is killed.

        Errors: ValueError when nothing answers at the address or versions differ.
        """
        self.run_name = run_name
        self.log_dir = os.path.abspath(log_dir) if log_dir is not None else None
        self.mark = {_RUN_MARK: uuid.uuid4().hex}
        self._lock = lock
        self._pools: dict[str, ResourcePool] = {}
        self._temp_dir: str | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._ray_watch: RayWatch | None = None
        self._owned = self._joined = False
        self.awaits_nodes = False
        keep_ray_off_the_console()
        address = address or os.environ.get("RAY_ADDRESS") or None
        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", connected):
                raise ValueError(f"cannot use Ray at {address}: this process is connected to {connected} already")
            where = f"joined {connected} (this process was connected)"
        elif address is None or address == "local":
            self._start_local(num_cpus or usable_cpus(), object_store_bytes or default_object_store_bytes())
            where = "new local cluster"
        else:
            join(address)
            self._joined = True
            self._reaper = self._start_reaper()
            where = f"joined {ray.get_runtime_context().gcs_address}"
        self._ray_watch = ray_watch = RayWatch(self._ray_processes(), self._leave_to_say)
        self.calls = Calls(call_timeout_seconds, ray_watch, ray.util.get_node_ip_address())
        liveness.check = self.calls.poll
        self.banner = f"Ray: {where}, ray {ray.__version__}, Python {platform.python_version()}, {self.num_cpus:g} CPUs"
        logger.info(self.banner)

    def _start_local(self, num_cpus: int, object_store_bytes: int) -> None:
        # Sockets lie in this folder and their paths are limited to 107 bytes.
        base = tempfile.gettempdir()
        self._temp_dir = tempfile.mkdtemp(prefix="flowrl-", dir=base if len(base) <= _MAX_TEMP_PATH else "/tmp")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Idle workers, of which no pool can make use: its processes have an environment of their own.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        self._owned, self.mark = True, {_MARK: self._temp_dir}
        self._reaper = self._start_reaper()
        try:
            # In the environment of Ray's processes only, so that the reaper knows exactly those.
            os.environ.update(self.mark)
            try:
                with confined():
                    _init_ray(
                        address="local",
                        num_cpus=num_cpus,
                        object_store_memory=object_store_bytes,
                        include_dashboard=False,
                        _temp_dir=self._temp_dir,
                        _node_ip_address=_LOOPBACK,
                    )
            finally:
                del os.environ[_MARK]
        except BaseException:
            self.close()
            raise

    def _start_reaper(self) -> subprocess.Popen[bytes]:
        paths = [str(path) for path in (self._temp_dir, self._lock) if path is not None]
        command = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), self._marked, *paths]
        # Its own session: a Ctrl-C meant for the driver must not end it.
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, bufsize=0
        )

    def _leave_to_say(self, words: str) -> None:
        """The reaper says it, should this process end without a word."""
        if self._reaper is not None and self._reaper.stdin is not None:
            with suppress(OSError):
                self._reaper.stdin.write(f"{words}\n".encode())

    @property
    def _marked(self) -> str:
        """The entry that the environments of this run's processes hold: all of an own Ray's, else of the workers."""
        return "=".join(*self.mark.items())

    def _ray_processes(self) -> OwnRay | JoinedRay:
        if self._owned:
            return OwnRay(ended_processes, pids_of_own_ray())
        context = ray.get_runtime_context()
        return JoinedRay({"GCS": _endpoint(context.gcs_address), "raylet": raylet_address(context.get_node_id())})

    # What it offers

    def nodes(self) -> list[NodeResources]:
        """Live nodes by address, with their total and free resources."""
        free = free_resources()
        nodes = [
            NodeResources(n["NodeID"], n["NodeManagerAddress"], dict(n["Resources"]), dict(free.get(n["NodeID"], {})))
            for n in ray.nodes()
            if n["Alive"]
        ]
        return sorted(nodes, key=lambda node: (node.address, node.node_id))

    @property
    def num_cpus(self) -> float:
        """CPUs of the nodes that live."""
        return sum(node.total.get("CPU", 0.0) for node in self.nodes())

    def lost_nodes(self) -> set[str]:
        """Addresses of nodes that do not answer while Ray counts them among the living."""
        return set(self.calls.nodes.silent()) & {node.address for node in self.nodes()}

    def raylets(self, addresses: Collection[str]) -> dict[str, tuple[str, int]]:
        """Host and port at which the raylets of these nodes listen, by address."""
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] in addresses]
        return {n["NodeManagerAddress"]: (n["NodeManagerAddress"], int(n["NodeManagerPort"])) for n in nodes}

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """Names the calls made inside, for errors and the timeline."""
        return self.calls.phase(name, step)

    def spans(self) -> list[Span]:
        """Calls that finished since the last time this was asked."""
        return self.calls.drain_spans()

    def wait(self) -> None:
        """Until all outstanding calls of all pools are done. Errors: WorkerError."""
        self.calls.wait_all()

    def claim_pool_name(self, pool: ResourcePool, name: str) -> None:
        """Errors: ValueError when a living pool has that name."""
        if name in self._pools:
            raise ValueError(f"there is a pool {name!r} already; living pools are {sorted(self._pools)}")
        self._pools[name] = pool

    def release_pool_name(self, pool: ResourcePool) -> None:
        self._pools = {name: other for name, other in self._pools.items() if other is not pool}

    # The end

    def close(self, graceful: bool = True) -> None:
        """End all pools; end Ray and remove its files if this run started it. Idempotent."""
        problem = None
        if self._ray_watch is not None:
            problem = self._ray_watch.problem(look=True)
            if problem is None and ray.is_initialized() and not control_store_answers():
                problem = "Ray's GCS hangs"
            self._ray_watch.close()
            self.calls.nodes.close()
        for pool in list(self._pools.values()):
            if problem is not None:
                pool.lose(ClusterError(problem, None, None))
            elif graceful:
                pool.shutdown()
            else:
                pool.kill()
        if problem is not None:
            leave_lost_ray()
        elif self._owned or self._joined:
            ray.shutdown()
        if self._owned:
            forget_token()
        reap(self._marked, [self._temp_dir] if self._temp_dir is not None else [])
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
        self._owned, self._joined, self._temp_dir, self._reaper = False, False, None, None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, WorkerError | ClusterError):
                # Whatever was asked of Ray at that moment, by whomever: if it is gone, that is the cause.
                self.calls.check_ray(look=True)
        finally:
            self.close(graceful=kind is None)


def join(address: str) -> None:
    """Connect this process to a running Ray. Errors: ValueError when none answers there or versions differ."""
    if address.startswith("ray://"):
        raise ValueError(f"cluster.address={address}: Ray's client mode is not supported; run on a node of the cluster")
    if address != "auto":
        _check_reachable(address)
    # Ray would take it before `auto`, whatever it says.
    given = os.environ.pop("RAY_ADDRESS", None)
    try:
        _init_ray(address=address)
    except ConnectionError as error:
        raise ValueError(
            f"no Ray cluster answers at {address} (cluster.address or RAY_ADDRESS): {error}; where the cluster asks for a "
            "token (ray start with RAY_AUTH_MODE=token), set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH here"
        ) from error
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise
        raise ValueError(f"cannot join Ray at {address}: {' '.join(str(error).split())}") from error
    finally:
        if given is not None:
            os.environ["RAY_ADDRESS"] = given


def _init_ray(**options: Any) -> None:
    """Ray replaces the handlers of signals; a driver that handles them keeps its own."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in handlers.items():
                # None: set outside Python, which cannot be put back from here.
                if handler is not None:
                    signal.signal(each, handler)


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, bounded by the control group's quota, at least 1."""
    cpus = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, math.floor(int(quota) / int(period))))


def default_object_store_bytes() -> int:
    """A quarter of free shared memory, between Ray's least (80 MB) and 2 GiB."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    return max(_MIN_OBJECT_STORE_BYTES, min(_MAX_OBJECT_STORE_BYTES, free // 4))


def _endpoint(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host stands in brackets. Errors: ValueError."""
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ValueError(f"cluster.address={address!r} is not host:port, auto or local; ports are 1 to 65535")
    return host, port


def _check_reachable(address: str) -> None:
    # Ray itself retries a dead address for a minute.
    endpoint = _endpoint(address)
    try:
        socket.create_connection(endpoint, timeout=_CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"no Ray cluster answers at {address!r} (cluster.address or RAY_ADDRESS): {error}; "
            f"unset it to start a local cluster"
        ) from error
