"""What the processes of the checkpoint tests do: roles that learn, save, load in another layout, and learn on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenarios import Cell, actor, call, check_replicas, figures, whole_weights

from flowrl.protocol import DataProto
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker


def saved(role: ActorWorker | CriticWorker, folder: Path) -> list[Any]:
    """Save and finish; the digests of all ranks."""
    role.save_state(str(folder))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, role.finish_save())
    return found


def next_step(role: ActorWorker, batch: DataProto) -> dict[str, Any]:
    """Metrics, and weights afterwards."""
    metrics = figures(call(role, role.update, batch))
    check_replicas(role._engine)
    return {"metrics": metrics, "weights": whole_weights(role._engine)}


def write_cells(folder: Path, cells: Sequence[Cell], batch: DataProto, target: Path) -> list[dict[str, Any]]:
    """Per cell: an actor takes two steps and is written to `target/N`; its digests, and its third step."""
    results = []
    for number, cell in enumerate(cells):
        role = actor(folder, cell)
        for _ in range(2):
            call(role, role.update, batch)
        digests = saved(role, target / str(number))
        results.append({"digests": digests, **next_step(role, batch)})
    return results


def read_cells(
    folder: Path, cells: Sequence[Cell], batch: DataProto, sources: Sequence[Path], target: Path
) -> list[dict[str, Any]]:
    """Per cell: a new actor reads the source, is written to `target/N` as it is, and takes a step."""
    results = []
    for number, (cell, source) in enumerate(zip(cells, sources, strict=True)):
        role = actor(folder, cell)
        said = role.load_state(str(source))
        check_replicas(role._engine)
        saved(role, target / str(number))
        results.append({"said": said, **next_step(role, batch)})
    return results


def write_and_read(
    folder: Path, pairs: Sequence[tuple[Cell, Cell]], batch: DataProto, target: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Both on the same ranks: written to `target/written/N`, and again to `target/read/N`."""
    sources = [target / "written" / str(number) for number in range(len(pairs))]
    written = write_cells(folder, [pair[0] for pair in pairs], batch, target / "written")
    return written, read_cells(folder, [pair[1] for pair in pairs], batch, sources, target / "read")


def hashes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Of each tensor its type, shape and bits."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} "
        + hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors
    }
