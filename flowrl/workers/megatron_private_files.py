"""Megatron-core's distributed checkpoints, written by a thread and read without trusting a pickle.

Read against Megatron-core 0.16.1. Its own asynchronous save forks the process, and starts another one that runs the
main module again; neither suits a process with a runtime of its own (docs/decisions/0009-asynchronous-checkpoints.md).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core.dist_checkpointing as mdc  # type: ignore[import-untyped]
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies import filesystem_async  # type: ignore[import-untyped]
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

from flowrl.resharding.families import Box
from flowrl.workers.stored_files import StoredReader, plain_errors

# The function below its decorator, which would keep the garbage collector of the whole process off while a thread writes.
_write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data.__wrapped__


@dataclass(frozen=True)
class Shard:
    """`tensor` is `box` of a tensor of `shape` that the checkpoint calls `key`."""

    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True)
class Writing:
    """A save that is planned. `write` needs no other rank and may run in any thread; `conclude` is collective and comes
    after it. `files`: names of those that `write` makes."""

    files: tuple[str, ...]
    write: Callable[[], None]
    conclude: Callable[[], None]


def _state_dict(shards: list[Shard]) -> dict[str, Any]:
    """Without a grid: boxes of one tensor may differ in size."""
    return {
        str(number): ShardedTensor(
            shard.key, shard.tensor, shard.tensor.dtype, tuple(shard.tensor.shape), shard.shape,
            tuple(low for low, _ in shard.box), None,
        )
        for number, shard in enumerate(shards)
    }  # fmt: skip


def plan_write(shards: list[Shard], common: dict[str, Any], folder: str) -> Writing:
    """Agree on who writes what, and write `common`. Collective; `shards` of all ranks cover each tensor once.

    Tensors are on the host, and nobody changes them before `write` has returned.
    """
    results: queue.Queue[Any] = queue.Queue()
    # Writers take this queue where it exists, and otherwise start a process that serves one.
    filesystem_async._results_queue = results
    strategy = torch_strategies.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    state: dict[str, Any] = {"shards": _state_dict(shards), "common": common}
    request = mdc.save(state, folder, strategy, validate_access_integrity=False, async_sharded_save=True)

    def conclude() -> None:
        with plain_errors(f"{folder} cannot be completed"):
            for step in request.finalize_fns:
                step()

    if request.async_fn is None:
        return Writing((), lambda: None, conclude)
    transforms = request.async_fn.args[0]
    _, buckets, mine = request.async_fn_args
    assert mine is results, "the writer reports to the queue that it was given"

    def write() -> None:
        results.put({number: _written(transforms, number, bucket) for number, bucket in enumerate(buckets)})

    return Writing(tuple(name for _, name, _ in buckets), write, conclude)


def _written(transforms: list[Any], number: int, bucket: Any) -> Any:
    """One file, synced. Error: what went wrong."""
    done: queue.Queue[Any] = queue.Queue()
    running: queue.Queue[int] = queue.Queue()
    running.put(number)
    _write_bucket(transforms, number, bucket, done, running, True)
    _, result = done.get()
    if isinstance(result, Exception):
        raise result
    return result


def read(shards: list[Shard], folder: str) -> None:
    """Fill the shards, wherever they lie, from the tensors of a checkpoint. Collective.

    The keys, shapes and types are known to be there. Error: `ValueError` where a file is damaged.
    """
    torch_strategies._get_filesystem_reader = _reader
    strategy = torch_strategies.TorchDistLoadShardedStrategy()
    with plain_errors(f"{folder} cannot be read"):
        mdc.load({"shards": _state_dict(shards)}, folder, strategy, validate_access_integrity=False)


def _reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> StoredReader:
    return StoredReader(checkpoint_dir)
