"""Workers that the controller's tests dispatch to."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from flowrl.protocol import DataProto, Metric, Ragged
from flowrl.single_controller import Link, MeshPosition, Worker, broadcast, rank_zero, register, split_over


class Echo(Worker):
    """Answers with what identifies rows and ranks. `tensor_parallel` ranks share a slice; the last of them answers."""

    def __init__(self, tensor_parallel: int = 1) -> None:
        self.tensor_parallel = tensor_parallel
        self.seen_in_init = (self.rank, self.world_size, self.pool_name)
        self.thread = threading.get_ident()

    def meshes(self) -> dict[str, MeshPosition]:
        tp = self.tensor_parallel
        return {"train": MeshPosition(self.rank // tp, answers=self.rank % tp == tp - 1)}

    @register(dispatch=split_over("train"))
    def double(self, batch: DataProto) -> DataProto:
        return self._double(batch)

    @register(dispatch=split_over("train", balance="x"))
    def double_balanced(self, batch: DataProto) -> DataProto:
        return self._double(batch)

    def _double(self, batch: DataProto) -> DataProto:
        x = batch["x"]
        assert isinstance(x, Ragged)
        return DataProto(
            {"doubled": Ragged(x.values * 2, x.offsets), "rank": torch.full((len(batch),), self.rank)},
            values={"name": [f"{tag}!" for tag in batch.values["tag"]]},
            metrics={"tokens": Metric.sum(len(x.values)), "mean": Metric.mean(float(x.values.sum()), len(x.values))},
            row_ids=batch.row_ids,
        )

    @register(dispatch=broadcast(answers="all"))
    def facts(self) -> tuple[int, int, str]:
        return self.seen_in_init

    @register(dispatch=broadcast)
    def world_sum(self, x: float) -> float:
        total = torch.tensor(x + self.rank)
        dist.all_reduce(total)
        return float(total)

    @register(dispatch=rank_zero)
    def apply(self, function: Callable[[int], int], x: int) -> int:
        return function(x)

    @register(dispatch=broadcast(answers="all"))
    def same_thread(self) -> bool:
        return threading.get_ident() == self.thread

    @register(dispatch=broadcast(answers="all"))
    def calls_other(self, other: Echo) -> tuple[int, int, str]:
        return other.seen_in_init

    @register(dispatch=broadcast)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def not_registered(self) -> int:
        return 1


class Meeting(Worker):
    """Both sides of a paired call."""

    def __init__(self) -> None:
        self.links: set[int] = set()

    @register(dispatch=broadcast)
    def give(self, other: Link) -> None:
        if other.rank == 0:
            other.store.set("word", "hello")

    @register(dispatch=broadcast(answers="all"), partner="give")
    def take(self, other: Meeting | Link) -> tuple[object, ...]:
        if isinstance(other, Meeting):
            return ("here", other.rank)
        self.links.add(id(other))
        return (other.rank, other.pools, other.store.get("word").decode(), len(self.links))

    @register(dispatch=broadcast, partner="missing")
    def take_from_nobody(self, other: Meeting | Link) -> int:
        return 0


class Faulty(Worker):
    """Fails in the way it is asked to."""

    @register(dispatch=split_over("world"))
    def reads(self, batch: DataProto) -> DataProto:
        return DataProto({"y": batch["advantages"]}, row_ids=batch.row_ids)

    @register(dispatch=split_over("world"))
    def returns_none(self, batch: DataProto) -> DataProto:
        return None  # type: ignore[return-value]

    @register(dispatch=split_over("world"))
    def loses_a_row(self, batch: DataProto) -> DataProto:
        return batch.select("x").rows(range(len(batch) - 1))

    @register(dispatch=broadcast)
    def killed_in_collective(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    @register(dispatch=broadcast)
    def take_crashes(self, take: bool) -> None:
        """As libraries do that want SIGSEGV for themselves."""
        if take:
            faulthandler.disable()

    @register(dispatch=broadcast)
    def crash(self, signum: int) -> None:
        os.kill(os.getpid(), signum)
        time.sleep(60)

    @register(dispatch=broadcast)
    def hangs_in_collective(self, rank: int) -> None:
        """One rank sleeps, the others wait for it."""
        if self.rank == rank:
            time.sleep(600)
        dist.barrier()

    @register(dispatch=broadcast)
    def gives_up_on(self, rank: int, late: int) -> None:
        """One rank sleeps, the others wait for it; `late` comes a second later than they, and is the first to tell."""
        if self.rank == rank:
            time.sleep(600)
        if self.rank == late:
            time.sleep(1)
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError:
            if self.rank != late:
                time.sleep(0.5)
            raise

    @register(dispatch=broadcast)
    def ended_by_nccl(self, killed: int) -> None:
        """What NCCL's watchdog does to a rank when a peer is gone; the peer's end is told later."""
        if self.rank == killed:
            time.sleep(3)
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(2, b"terminated with exception: NCCL error: remote process exited or there was a network error\n")
        os.abort()

    @register(dispatch=broadcast)
    def exhausts_memory(self, rank: int) -> None:
        if self.rank == rank:
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
            torch.zeros(16 << 30)
        dist.barrier()


class Circle(Worker):
    """Holds something that only the garbage collector can free, and says when it is gone by removing a file."""

    libraries = ("flowrl.workers.export",)

    def __init__(self, file: str, *, freezes: bool = False, lets_go: bool = False) -> None:
        self.imported_before = [library in sys.modules for library in self.libraries]
        Path(f"{file}.{self.rank}").touch()
        circle = _Circle(f"{file}.{self.rank}")
        circle.itself = self.circle = circle
        if freezes:
            gc.freeze()
        if lets_go:
            del self.circle

    @register(dispatch=broadcast(answers="all"))
    def imported(self) -> list[bool]:
        return self.imported_before


class CircleBesideMore(Circle):
    libraries = ("mailbox",)  # which nobody has imported


class _Circle:
    itself: _Circle

    def __init__(self, file: str) -> None:
        self.file = file

    def __del__(self) -> None:
        Path(self.file).unlink()
