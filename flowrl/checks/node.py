"""The measurements of one process of a pool: what its node has, and how fast it reaches the others."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from flowrl.checks.judgement import ABSENT
from flowrl.single_controller import Worker, broadcast, register

_SAMPLE_BYTES = 1 << 20
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_")


@dataclass(frozen=True)
class NodeFacts:
    """What one rank found on its node. Sizes in bytes; `digest` of the model folder, `ABSENT` where there is none."""

    python: str
    versions: dict[str, str]
    device: str
    free_memory: int
    free_shared_memory: int
    open_files: int
    environment: dict[str, str]
    digest: str


class NodeCheck(Worker):
    """A role that measures and changes nothing but a file that it is told to write."""

    @register(dispatch=broadcast(answers="all"))
    def facts(self, packages: Sequence[str], model: str) -> NodeFacts:
        """packages: names whose versions are asked for. model: a Hugging Face folder."""
        return NodeFacts(
            python=platform.python_version(),
            versions={name: _version(name) for name in packages},
            device=_device(self.device),
            free_memory=psutil.virtual_memory().available,
            free_shared_memory=shutil.disk_usage("/dev/shm").free,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
            digest=folder_digest(Path(model)),
        )

    @register(dispatch=broadcast(answers="all"))
    def now(self) -> float:
        """This node's clock, seconds since the epoch."""
        return time.time()

    @register(dispatch=broadcast(answers="all"))
    def write(self, folder: str) -> bool:
        """Write the file `rank-N` into a folder; whether that was possible."""
        try:
            (Path(folder) / f"rank-{self.rank}").write_text("here")
        except OSError:
            return False
        return True

    @register(dispatch=broadcast(answers="all"))
    def reads(self, folder: str) -> list[int]:
        """Ranks whose file is in the folder, as this node sees it."""
        return [rank for rank in range(self.world_size) if (Path(folder) / f"rank-{rank}").is_file()]

    @register(dispatch=broadcast(answers="all"))
    def all_reduce(self) -> float:
        """The sum of all ranks' numbers 1, 2, ... over the default group."""
        number = torch.tensor([self.rank + 1.0], device=self.device)
        dist.all_reduce(number)
        return float(number)

    @register(dispatch=broadcast(answers="all"))
    def send_around(self, pairs: Sequence[tuple[int, int]], num_bytes: int) -> list[float]:
        """Seconds that this rank took to send `num_bytes` to the second rank of each pair, 0 where it is not the first.

        One pair after the other, the second of two rounds, until the receiver says that it has them. Collective.
        """
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        receipt = torch.zeros(1, device=self.device)
        seconds = [0.0] * len(pairs)
        for number, (sender, receiver) in enumerate(pairs):
            for _ in range(2):
                start = time.perf_counter()
                if self.rank == sender:
                    dist.send(data, receiver)
                    dist.recv(receipt, receiver)
                    seconds[number] = float(receipt) + time.perf_counter() - start
                elif self.rank == receiver:
                    dist.recv(data, sender)
                    dist.send(receipt, sender)
        dist.barrier()
        return seconds


def folder_digest(folder: Path) -> str:
    """Of the names and sizes of all files in a folder, and of the first, middle and last MiB of each.

    Enough to tell another revision or a copy that was cut off, at a cost that does not grow with the model.
    """
    if not folder.is_dir():
        return ABSENT
    found = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(offset)
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return "CPU device"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} ({found.total_memory / 2**30:.0f} GiB)"
