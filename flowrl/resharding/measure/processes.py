"""Real processes, one per rank: forked from one server that has imported what all of them need."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
EXIT_SECONDS = 30


class RankFailed(RuntimeError):
    """A rank's function raised, or its process died."""


def end_with_the_parent() -> None:
    """Start watching: this process ends with its parent, however that ends, also when it could not say so. A rank would wait
    for the others until its time is up."""
    threading.Thread(target=_watch_the_parent, daemon=True).start()


def _watch_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _main(rank: int, world: int, store: str, backend: str, work: bytes, out: Any) -> None:
    # The parent ends its ranks; a terminal's Ctrl-C reaches them too, and would make each of them print where it was.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_the_parent()
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
    )
    try:
        name, arguments = pickle.loads(work)
        module, _, function = name.partition(":")
        out.send_bytes(pickle.dumps((True, vars(importlib.import_module(module))[function](*arguments))))
    except BaseException:  # noqa: B036 - reported by the parent, whatever it is
        out.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise
    dist.barrier()
    dist.destroy_process_group()


def _start(processes: Sequence[BaseProcess]) -> None:
    """Start all of them."""
    with _signals_later():
        for process in processes:
            process.start()


@contextmanager
def _signals_later() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the block's end: in the middle of a start they would leave a rank that nobody knows.

    A mask would not do: it is one thread's, and any other may take the signal and have Python act on it here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    stops = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, lambda signum, _: noted.append(signum)) for each in stops}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        # Also where the block failed: what the same signal ended elsewhere is why.
        for signum in noted:
            signal.raise_signal(signum)


def run_ranks(world: int, backend: str, preload: Sequence[str], function: str, *arguments: Any) -> list[Any]:
    """Results of `function` (as `module:name`) of `arguments` by rank, inside a process group over `backend`.

    `preload` names modules that the server imports before it forks. Error: `RankFailed` with the traceback of the
    first rank that fails; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    work = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes: list[BaseProcess] = [
            context.Process(target=_main, args=(rank, world, f"{folder}/store", backend, work, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        try:
            _start(processes)
            for _, sender in pipes:
                sender.close()
            results = _collect([receiver for receiver, _ in pipes])
            for process in processes:
                process.join(EXIT_SECONDS)
        finally:
            for process in processes:
                if process.pid is not None and process.is_alive():
                    process.terminate()
        return results


def _collect(receivers: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = {pipe: rank for rank, pipe in enumerate(receivers) if rank not in results}
        failures: list[str] = []
        for pipe in wait(list(pending)):
            assert isinstance(pipe, Connection)
            rank = pending[pipe]
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                # The others fail because of it, and may have said so in the same moment.
                raise RankFailed(f"the process of rank {rank} died") from None
            if not good:
                failures.append(f"rank {rank} failed:\n{value}")
            results[rank] = value
        if failures:
            raise RankFailed(failures[0])
    return [results[rank] for rank in range(len(receivers))]
