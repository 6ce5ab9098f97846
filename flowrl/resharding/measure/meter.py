"""What a move really does, seen from below: every tensor operation and every collective that it issues."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_WEIGHTS = frozenset({"allreduce_", "barrier", "monitored_barrier_", "send"})
"""Collectives that bring no weights to a rank: verdicts, and the sending side."""


def _group_of(arguments: Sequence[Any]) -> Any:
    """The process group among a collective's arguments, and this process's rank in it."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument)
    raise AssertionError("a collective names its group")


def _nbytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))


def received_bytes(name: str, arguments: Sequence[Any]) -> int:
    """Bytes of the receive buffers of one c10d operation, less this rank's own part.

    Error: `ValueError` for an operation that the meter does not know.
    """
    if name in _NO_WEIGHTS:
        return 0
    group = _group_of(arguments)
    if name == "broadcast_":
        return 0 if arguments[2] == group.rank() else _nbytes(arguments[0])
    if name in ("recv_", "recv_any_source_"):
        return _nbytes(arguments[0])
    if name in ("allgather_", "_allgather_base_"):
        return _nbytes(arguments[0]) - _nbytes(arguments[1])
    if name == "alltoall_base_":
        output, sizes = arguments[0], arguments[3]
        row = output.nbytes // max(1, output.shape[0])
        own = sizes[group.rank()] if len(sizes) else output.shape[0] // group.size()
        return int(output.nbytes - own * row)
    if name == "alltoall_":
        return _nbytes(arguments[0]) - _nbytes(arguments[0][group.rank()])
    raise ValueError(f"the meter does not know the collective {name}")


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, while it is entered, in this thread: received bytes, collectives, copies, and temporary memory.

    Storages of `existing` tensors are no temporaries. `peak_bytes` is the largest sum of temporaries alive at once,
    `largest_bytes` the largest single one.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.received = self.num_collectives = self.num_copies = 0
        self.peak_bytes = self.largest_bytes = self._alive_bytes = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in existing}
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.received += received_bytes(name, args)
            self.num_collectives += name not in ("barrier", "monitored_barrier_")
            return result
        self.num_copies += name in ("copy_", "cat", "clone", "_to_copy", "index_copy_", "index")
        self.num_copies += len(args[0]) if name == "_foreach_copy_" else 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        pointer = storage.data_ptr()
        if not pointer or pointer in self._known or pointer in self._alive:
            return
        size = storage.nbytes()
        self._alive[pointer] = size
        self._alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
        self.largest_bytes = max(self.largest_bytes, size)
        forget: Callable[[int], None] = self._forget
        weakref.finalize(storage, forget, pointer)

    def _forget(self, pointer: int) -> None:
        self._alive_bytes -= self._alive.pop(pointer)
