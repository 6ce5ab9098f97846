"""The process behind one device: it hosts the roles of a pool and runs their methods on one thread."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import ray

from flowrl.single_controller.failures import log_header
from flowrl.single_controller.host_memory import allocation_failures_with_figures
from flowrl.single_controller.link import LinkArgument, Links, connect_store, open_store
from flowrl.single_controller.network import GlooInterface
from flowrl.single_controller.stacks import Stack, stack_of

if TYPE_CHECKING:
    from flowrl.single_controller.device_memory import DeviceMemory

_on_thread = threading.local()


@dataclass(frozen=True)
class ProcessSpec:
    """What a process is told when it starts."""

    rank: int
    world_size: int
    local_rank: int
    device: str
    pool_name: str
    run_name: str
    log_dir: str | None
    collective_timeout_seconds: float


@dataclass(frozen=True)
class RoleArgument:
    """Stands for a worker group given as an argument; becomes the role object of this process."""

    pool_key: int
    role: str


@dataclass(frozen=True)
class Command:
    """One method call. ``answer``: whether the driver wants this rank's result."""

    role: str
    method: str
    result: str
    answer: bool
    same_rows: bool


@dataclass(frozen=True)
class Answer:
    """What a rank returns; times in seconds since the epoch. `memory` is that of a method's call on a GPU."""

    value: Any
    start: float
    end: float
    memory: DeviceMemory | None = None


class Process:
    """Ray actor with a concurrency group ``control``.

    Calls of the default group run in order on one thread of the actor; the control group stays free.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        # The libraries that come with a role's class are half a million objects: while they are imported the garbage
        # collector costs a quarter of the time and finds nothing. So it is off until a role is made, and leaves them alone.
        gc.disable()
        self._log = _redirect_output(spec)
        self._thread: int | None = None
        self._closing = threading.Event()
        self._spec = spec
        self._roles: dict[str, Any] = {}
        self._frozen: set[str] = set()
        self._links = Links()
        self._store: Any = None
        self._device = spec.device
        self._interface = GlooInterface(ray.util.get_node_ip_address())

    def start(self) -> Answer:
        """(node address, pid, log path) once torch is imported and the device is chosen."""
        start = time.time()
        # Ray runs __init__ on another thread than the calls; from here on there is one.
        self._thread = threading.get_ident()
        _on_thread.marked = True
        import torch

        if self._spec.device == "cuda":
            index = device_index(
                ray.get_runtime_context().get_accelerator_ids()["GPU"][0], os.environ.get("CUDA_VISIBLE_DEVICES")
            )
            torch.cuda.set_device(index)
            os.environ["LOCAL_RANK"] = str(index)
            self._device = f"cuda:{index}"
        else:
            os.environ["LOCAL_RANK"] = str(self._spec.local_rank)
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(self._spec.rank), str(self._spec.world_size)
        facts = (ray.util.get_node_ip_address(), os.getpid(), self._log.name if self._log else None)
        return Answer(facts, start, time.time())

    def missing(self, paths: Mapping[str, str]) -> Answer:
        """Which of these files and folders, path by key, this node does not see."""
        start = time.time()
        return Answer({key: path for key, path in paths.items() if not os.path.exists(path)}, start, time.time())

    def open_store(self, host: str) -> Answer:
        """Rank 0: open the pool's store at an address of this node; the answer is its port."""
        start = time.time()
        self._store = open_store(host, self._spec.world_size)
        return Answer(int(self._store.port), start, time.time())

    def join(self, host: str, port: int) -> Answer:
        """Initialise the pool's default process group over the published store."""
        import torch
        import torch.distributed as dist

        start, spec = time.time(), self._spec
        self._interface.choose(host)
        if self._store is None:
            self._store = connect_store(host, port)
        timeout = datetime.timedelta(seconds=spec.collective_timeout_seconds)
        self._store.set_timeout(timeout)
        device = torch.device(self._device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._store,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        return Answer(None, start, time.time())

    def host_link(self, host: str, num_processes: int) -> Answer:
        """Open a store for the processes of two pools; the answer is its port."""
        start = time.time()
        return Answer(self._links.host(host, num_processes), start, time.time())

    def construct(self, role: str, worker: type[Any], arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Answer:
        """Make a role; the answer is its position in every mesh."""
        import torch

        from flowrl.single_controller.worker import Place, construct, libraries

        self._check_thread()
        gc.disable()
        spec = self._spec
        place = Place(
            rank=spec.rank,
            world_size=spec.world_size,
            local_rank=spec.local_rank,
            device=torch.device(self._device),
            pool_name=spec.pool_name,
            run_name=spec.run_name,
            log_dir=Path(spec.log_dir) if spec.log_dir else None,
        )
        args, kwargs = self._received(arguments)
        new = [module for module in libraries(worker) if module not in sys.modules]
        if new and self._roles:
            gc.collect()  # What they have left in circles is not to be frozen with them.
        for module in new:
            importlib.import_module(module)
        if new or gc.get_freeze_count() == 0:
            self._freeze()
        frozen = gc.get_freeze_count()
        gc.enable()
        start = time.time()
        with allocation_failures_with_figures():
            self._roles[role] = construct(worker, place, *args, **kwargs)
        gc.disable()
        if gc.get_freeze_count() > frozen:
            # An engine does so after its imports: all roles that exist are among what the collector passes over.
            self._frozen = set(self._roles)
        return Answer(self._roles[role].meshes(), start, time.time())

    def call(self, command: Command, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Answer:
        """Run one method of one role."""
        import torch

        from flowrl.single_controller import device_memory

        self._check_thread()
        trace_crashes(self._log)
        gc.enable()
        args, kwargs = self._received(arguments)
        role = self._roles[command.role]
        method = getattr(role, command.method)
        device = torch.device(self._device)
        start = time.time()
        device_memory.begin(device)
        with allocation_failures_with_figures():
            value = method(*args, **kwargs)
        if command.result == "batch":
            value = _checked_batch(f"{type(role).__name__}.{command.method}", command, value, [*args, *kwargs.values()])
        shown = value if command.answer and command.result != "nothing" else None
        return Answer(shown, start, time.time(), device_memory.read(device))

    def drop(self, role: str) -> Answer:
        """Close a role and let it go."""
        self._check_thread()
        start = time.time()
        self._close(role)
        # Beside a GPU vLLM freezes and thaws as it likes.
        thaws = role in self._frozen or self._device != "cpu"
        if thaws:
            gc.unfreeze()
        gc.collect()
        if thaws:
            self._freeze()
        return Answer(None, start, time.time())

    def _close(self, role: str) -> None:
        self._roles.pop(role).close()
        self._links.drop(self._spec.pool_name, role)

    def _freeze(self) -> None:
        """Take all that exists, libraries above all, out of the collector's sight: to look through it takes most of a second."""
        gc.freeze()
        self._frozen = set(self._roles)

    def shut_down(self) -> None:
        """Close all roles, last made first, and leave the process group. What they held ends with the process."""
        import torch.distributed as dist

        self._check_thread()
        for role in reversed(list(self._roles)):
            self._close(role)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._closing.set()

    def watch(self) -> None:
        """Returns when the process is shut down; fails as soon as it dies. The driver's liveness signal."""
        self._closing.wait()

    def dump_stacks(self) -> Stack:
        """Write the stacks of all threads to the log, also while a call runs; the answer is that of the call's thread."""
        faulthandler.dump_traceback(file=self._log or sys.__stderr__ or sys.stderr)
        return stack_of(self._thread)

    def _check_thread(self) -> None:
        # Both: Python's thread-local values vanish when Ray makes the interpreter's state anew for every call.
        assert threading.get_ident() == self._thread and _on_thread.marked, "a call left the process's one thread"

    def _received(self, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = arguments
        return [self._one(a) for a in args], {name: self._one(a) for name, a in kwargs.items()}

    def _one(self, argument: Any) -> Any:
        if isinstance(argument, LinkArgument):
            self._interface.choose(argument.host)
            return self._links.find(argument, self._spec.rank, self._spec.collective_timeout_seconds)
        return self._roles[argument.role] if isinstance(argument, RoleArgument) else argument


def device_index(assigned: str, visible: str | None) -> int:
    """torch's index of the GPU that Ray assigned, which it names as ``CUDA_VISIBLE_DEVICES`` does where that is set."""
    names = [name.strip() for name in visible.split(",")] if visible else []
    return names.index(assigned) if assigned in names else int(assigned)


def trace_crashes(log: TextIO | None) -> None:
    """From now on a crash leaves its signal and stacks in the log, or on stderr where there is none.

    To be repeated: libraries that come with vLLM take SIGSEGV for themselves when they are imported.
    """
    faulthandler.disable()
    faulthandler.enable(log or sys.__stderr__ or sys.stderr)


def _redirect_output(spec: ProcessSpec) -> TextIO | None:
    """Send everything that this process writes, C++ libraries included, to its own log file."""
    if spec.log_dir is None:
        trace_crashes(None)
        return None
    os.makedirs(spec.log_dir, exist_ok=True)
    log = open(os.path.join(spec.log_dir, f"{spec.pool_name}-rank{spec.rank}.log"), "a", buffering=1)  # noqa: SIM115
    log.write(log_header(os.getpid()) + "\n")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    trace_crashes(log)
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # flowrl's own records, from INFO on, without those of libraries that share the process.
    logger = logging.getLogger("flowrl")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return log


def _checked_batch(where: str, command: Command, value: Any, arguments: list[Any]) -> Any:
    """The answer with its columns put into the object store. Errors: no DataProto, or other rows than were given."""
    from flowrl.protocol import DataProto
    from flowrl.single_controller.blocks import store_columns

    if not isinstance(value, DataProto):
        raise ValueError(f"{where} is annotated -> DataProto but returned {type(value).__name__}")
    if command.same_rows:
        given = next(a for a in arguments if isinstance(a, DataProto))
        if value.row_ids != given.row_ids:
            raise ValueError(
                f"{where} must return the rows it was given, in their order: expected {len(given)} rows "
                f"{list(given.row_ids[:3])}..., received {len(value)} rows {list(value.row_ids[:3])}... "
                f"(build the result with DataProto(..., row_ids=batch.row_ids))"
            )
    return store_columns(value) if command.answer else None
