"""Groups of gloo processes for tests: forked from one server that has imported torch and Megatron-core already."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "tests.workers.engine_preload",
        "flowrl.workers.actor",
        "flowrl.workers.critic",
        "flowrl.workers.reference",
        "scenarios",
    ]
)

TIMEOUT_SECONDS = 300.0


def _main(rank: int, world_size: int, store: str, work: bytes, out: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        function, args = pickle.loads(work)
        # By value: tensors sent as such would be files that vanish with this process.
        out.send_bytes(pickle.dumps((True, function(*args))))
    except BaseException:  # noqa: B036 - handed to the test, whatever it is
        out.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise
    dist.barrier()
    dist.destroy_process_group()


def _result(pipe: Connection, rank: int, dying: Collection[int]) -> Any:
    try:
        good, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        assert rank in dying, f"rank {rank} died"
        return None
    assert good, f"rank {rank}:\n{value}"
    return value


def run(world_size: int, function: Callable[..., Any], *args: Any, dying: Collection[int] = ()) -> list[Any]:
    """Results of `function(*args)` by rank. The first rank that fails fails the test with its traceback.

    Ranks `dying` may end without a result, which is then None."""
    with tempfile.TemporaryDirectory() as folder:
        return _run([(world_size, f"{folder}/store", pickle.dumps((function, args)))], dying)


def run_apart(
    sizes: tuple[int, int],
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    *args: Any,
    dying: Collection[int] = (),
) -> list[Any]:
    """As `run`, of two pools of processes, each with a default group of its own and a function of its own.

    Functions are called with a path in a folder that both see, the sizes and `args`; ranks count over both pools."""
    with tempfile.TemporaryDirectory() as folder:
        work = [pickle.dumps((function, (f"{folder}/meeting", sizes, *args))) for function in functions]
        return _run([(size, f"{folder}/store{n}", work[n]) for n, size in enumerate(sizes)], dying)


def _run(pools: Sequence[tuple[int, str, bytes]], dying: Collection[int]) -> list[Any]:
    """Results by rank over all pools of (number of ranks, path of their store, pickled work)."""
    members = [(rank, size, store, work) for size, store, work in pools for rank in range(size)]
    pipes = [context.Pipe(duplex=False) for _ in members]
    processes = [
        context.Process(target=_main, args=(*member, pipe[1]), daemon=True)
        for member, pipe in zip(members, pipes, strict=True)
    ]
    for process, (_, written) in zip(processes, pipes, strict=True):
        process.start()
        # The process has its own; with ours closed its death ends the pipe.
        written.close()
    results: dict[int, Any] = {}
    try:
        while len(results) < len(members):
            pending = {pipe[0]: number for number, pipe in enumerate(pipes) if number not in results}
            ready = wait(list(pending), timeout=TIMEOUT_SECONDS)
            assert ready, f"ranks {sorted(pending.values())} said nothing for {TIMEOUT_SECONDS} s"
            for pipe in ready:
                results[pending[pipe]] = _result(pipe, pending[pipe], dying)
        for process in processes:
            # After a death the others would wait for it at their end.
            process.join(0 if dying else 20)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    return [results[number] for number in range(len(members))]
