"""What the processes of the tests of moves do: exact moves between many layouts, a death, a corrupted bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rollout_scenarios import Setup, engine_config, pair, rollout
from safetensors.torch import load_file, save_file
from scenarios import Cell, actor, sizes_of

from flowrl.config.model_shape import read_model_shape
from flowrl.resharding import exchange
from flowrl.resharding import transfer as transfer_module
from flowrl.resharding.copies import BufferCopies, Copies
from flowrl.resharding.layouts import Layouts, common_places, rollout_sizes
from flowrl.resharding.recorder import place_of
from flowrl.resharding.transfer import MoveReport, Transfer
from flowrl.resharding.world import World
from flowrl.workers.actor import ActorWorker
from flowrl.workers.rollout import RolloutWorker

Pair = tuple[Cell, Setup]


def number_elements(folder: Path) -> Path:
    """Give every element of the model a value of its own: its number in the folder, exact in float32."""
    tensors, first = load_file(folder / "model.safetensors"), 1
    for tensor in tensors.values():
        tensor.copy_(torch.arange(first, first + tensor.numel(), dtype=torch.float64).view(tensor.shape))
        first += tensor.numel()
    assert first < 1 << 24, "float32 counts no further"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def exact_moves(folder: Path, pairs: Sequence[Pair], bucket_bytes: int) -> dict[Pair, tuple[list[str], MoveReport]]:
    """Per pair: parameters that differ from what vLLM's own loader made of the folder, and the report of the move."""
    results = {}
    sources: dict[Any, ActorWorker] = {}
    by_engine: dict[Any, list[tuple[Cell, Any]]] = {}
    shape, world = read_model_shape(folder), dist.get_world_size()
    for cell, setup in pairs:
        places = common_places(shape, world, sizes_of(cell), rollout_sizes(engine_config(setup)))
        key = setup, tuple(at.rollout for at in places)
        by_engine.setdefault(key, []).append((cell, tuple(at.train for at in places)))
    for (setup, _), cells in by_engine.items():
        role = rollout(folder, setup, cells[0][0])
        loaded = {name: parameter.detach().clone() for name, parameter in role._parameters.items()}
        for cell, places in cells:
            if (cell, places) not in sources:
                sources[cell, places] = actor(folder, cell, beside=rollout_sizes(engine_config(setup)))
            report = _move(role, sources[cell, places], bucket_bytes)
            wrong = [name for name, kept in loaded.items() if not torch.equal(kept, role._parameters[name])]
            results[cell, setup] = wrong, report
        role.close()
    return results


def views_over_time(folder: Path) -> list[str]:
    """What is wrong with the views of a trainer's parameters: they stay where nothing changes and where a storage goes and
    comes back, and are made anew where a parameter has other memory."""
    source = actor(folder, Cell())
    first, wrong = source.held_regions(), []
    if source.held_regions() is not first:
        wrong.append("made anew without reason")
    storages = {region.tensor.untyped_storage()._cdata: region.tensor.untyped_storage() for region in first}
    kept = [(storage, storage.clone()) for storage in storages.values()]
    for storage, _ in kept:
        storage.resize_(0)
    for storage, content in kept:
        storage.resize_(content.nbytes())
        storage.copy_(content)
    if source.held_regions() is not first:
        wrong.append("made anew though storages came back")
    for name, parameter in source._engine.weights._parameters.items():
        before = source.held_regions()
        parameter.data = torch.full_like(parameter, 7.0)
        again = source.held_regions()
        news = [
            region
            for region, old in zip(again, before, strict=True)
            if region.tensor.data_ptr() != old.tensor.data_ptr()
        ]
        if again is before or not news or any(not bool((region.tensor == 7).all()) for region in news):
            wrong.append(f"{name} is read where it was")
    return wrong


def transfer_of(role: RolloutWorker, source: ActorWorker, bucket_bytes: int) -> Transfer:
    layouts = Layouts.join(source.sizes(), source.places(), role._sizes, role._places)
    return Transfer(
        role._recording, role._parameters, role._shape, layouts, source.held_regions(), bucket_bytes=bucket_bytes
    )


def _move(role: RolloutWorker, source: ActorWorker, bucket_bytes: int) -> MoveReport:
    for region in role._recording.regions:
        place_of(region, role._parameters[region.parameter]).fill_(float("nan"))
    transfer = transfer_of(role, source, bucket_bytes)
    report = transfer.move(source.held_regions())
    transfer.verify(source.held_regions())
    assert report.peak_extra_bytes <= transfer.plan.peak_extra(dist.get_rank()) <= 2 * bucket_bytes
    return report


def die_in_a_bucket(folder: Path, cell: Cell, setup: Setup, victim: int, bucket: int) -> tuple[str, float] | None:
    """The error of a move in which rank `victim` dies before collective number `bucket`, and seconds until it came."""
    source, role = pair(folder, folder, cell, setup)
    transfer = transfer_of(role, source, 8192)
    count = 0

    def dying(exchange: Any) -> Any:
        def die(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > bucket:
                os._exit(1)
            return exchange(*arguments, **options)

        return die

    dist.barrier()
    if dist.get_rank() == victim:
        dist.all_to_all_single, dist.broadcast = dying(dist.all_to_all_single), dying(dist.broadcast)
    start = time.monotonic()
    try:
        transfer.move(source.held_regions())
        transfer.verify(source.held_regions())
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None


def copies_of_a_move(folder: Path, cell: Cell, setup: Setup, most_beside: float) -> list[tuple[str, bool, bool]]:
    """Of every copy: which it is, whether it was told of collectives beside it, and whether any were under way."""
    source, role = pair(folder, folder, cell, setup)
    transfer = transfer_of(role, source, 8192)
    found, under_way = [], set()

    def watched(make: Any) -> Any:
        def run(copies: Any, *arguments: Any, beside_collectives: bool = False) -> None:
            kind = "own" if isinstance(copies, Copies) else "pack" if copies._fills else "install"
            found.append((kind, beside_collectives, bool(under_way)))
            make(copies, *arguments, beside_collectives=beside_collectives)

        return run

    def start(*arguments: Any) -> list[Any]:
        works = exchange.start(*arguments)
        under_way.update(map(id, works))
        return works

    def wait(world: World, work: Any, what: str) -> None:
        waited(world, work, what)
        under_way.discard(id(work))

    waited = World.wait
    vars(transfer_module).update(start=start, _MOST_BESIDE=most_beside)
    for kind in (Copies, BufferCopies):
        kind.run = watched(kind.run)  # type: ignore[method-assign]
    World.wait = wait  # type: ignore[method-assign]
    transfer.move(source.held_regions())
    return found


class _Corrupted:
    """The work of an exchange that changes one bit of what arrived."""

    def __init__(self, work: Any, incoming: torch.Tensor) -> None:
        self._work, self._incoming = work, incoming

    def wait(self, timeout: Any) -> None:
        self._work.wait(timeout)
        self._incoming.view(torch.int32)[len(self._incoming) // 2] ^= 1


def corrupt_a_bucket(folder: Path, cell: Cell, setup: Setup, victim: int) -> tuple[str, str]:
    """The error of a move in which one bit of a bucket to `victim` changes, and what is wrong on this rank by name."""
    source, role = pair(folder, folder, cell, setup)
    loaded = {name: parameter.detach().clone() for name, parameter in role._parameters.items()}
    exchange = dist.all_to_all_single

    def corrupt(incoming: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return _Corrupted(exchange(incoming, *arguments, **options), incoming)

    if dist.get_rank() == victim:
        dist.all_to_all_single = corrupt
    try:
        role.receive_weights(source)
    except ValueError as error:
        wrong = [name for name, kept in loaded.items() if not torch.equal(kept, role._parameters[name])]
        return str(error), ", ".join(wrong)
    finally:
        dist.all_to_all_single = exchange
        role.close()
    raise AssertionError("the proof did not notice")
