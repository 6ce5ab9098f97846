"""What gloo lacks for CUDA tensors, through the host: sends, receives and coalesced reductions.

Several ranks on one GPU have no other backend, since NCCL wants a GPU for each.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_isend, _irecv = dist.isend, dist.irecv


class _Received:
    """The work of a receive that ends on the GPU."""

    def __init__(self, work: Any, host: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self) -> None:
        self._work.wait()
        # Pipeline stages receive into leaves of the autograd graph.
        self._target.detach().copy_(self._host)


class _Sent:
    """The work of a send, which keeps its copy alive."""

    def __init__(self, work: Any, host: torch.Tensor) -> None:
        self._work, self._host = work, host

    def wait(self) -> None:
        self._work.wait()


def _send(tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, **where: Any) -> Any:
    host = tensor.cpu()
    return _Sent(_isend(host, dst, group, tag, **where), host)


def _receive(tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, **where: Any) -> Any:
    host = torch.empty_like(tensor, device="cpu")
    return _Received(_irecv(host, src, group, tag, **where), host, tensor)


def _all(operations: list[Any]) -> list[Any]:
    return [operation.op(operation.tensor, operation.peer, operation.group) for operation in operations]


@contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[None]:
    yield None


def install() -> None:
    """In this process, before Megatron-core runs."""
    for module in (dist, dist.distributed_c10d):
        vars(module).update(isend=_send, irecv=_receive, batch_isend_irecv=_all)
    vars(importlib.import_module("megatron.core.distributed.param_and_grad_buffer"))["_coalescing_manager"] = (
        _one_by_one
    )
