"""What the processes of the checkpoint tests do: roles that learn, save, load in another layout, and learn on."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenarios import OPTIM, Cell, actor, call, check_replicas, critic, figures, local_state, reference, whole_weights

from flowrl.protocol import DataProto, Ragged
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker

LINEAR = replace(OPTIM, schedule="linear", weight_decay=0.1)
Role = ActorWorker | CriticWorker


@dataclass(frozen=True)
class Trip:
    """A state that `written` saves and `read` takes over; `kind`: of role."""

    written: Cell
    read: Cell
    kind: str = "actor"


def make(kind: str, folder: Path, cell: Cell) -> Role:
    """With a learning rate that changes in every step."""
    return (critic if kind == "critic" else actor)(folder, cell, optim=LINEAR)


def flat(batch: DataProto) -> DataProto:
    """The batch with a gradient that is exactly zero."""
    lengths = batch.lengths("response_ids")
    zeros = Ragged.from_lengths(torch.zeros(int(lengths.sum())), lengths)
    return batch.drop("advantages").with_columns(advantages=zeros)


def learn(role: Role, batch: DataProto) -> dict[str, float]:
    """One step; the advantages are a critic's returns."""
    if isinstance(role, CriticWorker):
        batch = batch.union(call(role, role.values, batch)).with_columns(returns=batch["advantages"])
    return figures(call(role, role.update, batch))


def two_steps(role: Role, batch: DataProto) -> dict[str, Any]:
    """Metrics of each, and the weights after each."""
    metrics, weights = [], []
    for _ in range(2):
        metrics.append(learn(role, batch))
        check_replicas(role._engine)
        head = role._engine.whole_value_head()
        weights.append(whole_weights(role._engine) | ({} if head is None else {"head": head}))
    return {"metrics": metrics, "weights": weights}


def equal(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two roles went the same way, to the last bit."""
    pairs = zip(one["weights"], two["weights"], strict=True)
    return one["metrics"] == two["metrics"] and all(
        set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)
        for first, second in pairs
    )


def gathered(value: Any) -> list[Any]:
    """By rank, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def write_trips(folder: Path, trips: Sequence[Trip], batch: DataProto, target: Path) -> list[dict[str, Any]]:
    """Per trip: a role takes a step that moves it and, an actor, one that does not, and is saved to `target/N` while it
    goes on; the digests, and its next two steps."""
    results = []
    for number, trip in enumerate(trips):
        role = make(trip.kind, folder, trip.written)
        learn(role, batch)
        learn(role, flat(batch) if trip.kind == "actor" else batch)
        torch.manual_seed(1000 + number)
        role.save_state(str(target / str(number)))
        drawn = torch.rand(3)
        steps = two_steps(role, batch)
        digests = role.finish_save()
        assert role.finish_save() == digests
        results.append({"digests": gathered(digests), "drawn": drawn, **steps})
    return results


def read_trips(
    folder: Path, trips: Sequence[Trip], batch: DataProto, source: Path, target: Path
) -> list[dict[str, Any]]:
    """Per trip: a new role reads `source/N` (and another is made after it), is written to `target/N` as it is, and takes
    two steps."""
    results = []
    for number, trip in enumerate(trips):
        role = make(trip.kind, folder, trip.read)
        said = role.load_state(str(source / str(number)))
        reference(folder, Cell())
        drawn = torch.rand(3)
        check_replicas(role._engine)
        role.save_state(str(target / str(number)))
        role.finish_save()
        results.append({"said": said, "drawn": drawn, **two_steps(role, batch)})
    return results


def round_trips(
    folder: Path, trips: Sequence[Trip], batch: DataProto, target: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Both on the same ranks."""
    written = write_trips(folder, trips, batch, target / "written")
    return written, read_trips(folder, trips, batch, target / "written", target / "read")


def fresh_round_trip(folder: Path, cells: Sequence[Cell], batch: DataProto, target: Path) -> list[bool]:
    """Per cell: whether a role that read the state of one without any step learns as that one does."""
    same = []
    for number, cell in enumerate(cells):
        first, second = make("actor", folder, cell), make("actor", folder, cell)
        first.save_state(str(target / str(number)))
        first.finish_save()
        learn(second, batch)
        second.load_state(str(target / str(number)))
        same.append(equal(two_steps(first, batch), two_steps(second, batch)))
    return same


def take_over(asked: Sequence[tuple[Path, str, str, Path]]) -> list[str]:
    """Why a role of (model folder, kind, type) cannot read a folder; it is then as it was."""
    found = []
    for folder, kind, dtype, stored in asked:
        role = make(kind, folder, Cell(dtype=dtype))
        before = local_state(role._engine)
        try:
            found.append(role.load_state(str(stored)))
        except ValueError as error:
            found.append(str(error))
        assert all(torch.equal(*pair) for pair in zip(before, local_state(role._engine), strict=True))
    return found


def refusals(folder: Path, target: Path) -> dict[str, str]:
    """Errors of saves that cannot succeed, on this rank."""
    found = {}

    def note(name: str, role: Role, where: Path) -> None:
        try:
            role.save_state(str(where))
            role.finish_save()
        except (OSError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    role = make("actor", folder, Cell(tp=dist.get_world_size()))
    (target / "file").write_text("")
    note("no folder", role, target / "file" / "inside")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, limits[1]))
    note("disk full", role, target / "full")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if dist.get_rank() == dist.get_world_size() - 1:
        held = next(held for held in role.held_regions() if held.name == "model.layers.1.mlp.up_proj.weight")
        held.tensor.view(-1)[5] = float("inf")
    note("not finite", role, target / "infinite")
    found["left"] = str((target / "infinite").exists())
    return found


def hashes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Of each tensor its type, shape and bits; of random-number generators none."""
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} "
        + hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors
        if not name.startswith("rng.")
    }


def write_roles(folder: Path, batch: DataProto, checkpoint: Path, exports: Path) -> list[Any]:
    """An actor and a critic that have learned, saved as a run saves them at the same time, and exported by themselves;
    the digests of this rank, relative to `checkpoint`."""
    digests: list[Any] = []
    roles = {"actor": make("actor", folder, Cell(tp=2)), "critic": make("critic", folder, Cell(pp=2))}
    for name, role in roles.items():
        learn(role, batch)
        role.save_state(str(checkpoint / name))
    for name, role in roles.items():
        digests += [digest.under(name) for digest in role.finish_save()]
        role.export(str(exports / name))
    return digests
