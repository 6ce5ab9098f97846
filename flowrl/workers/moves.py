"""Weight moves as roles carry them out: between roles of one process, or between the processes of two pools."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flowrl.config.model_shape import ModelShape
from flowrl.protocol import DataProto, Metric
from flowrl.resharding.layouts import Layouts
from flowrl.resharding.ranks import ParallelSizes, RankPlace
from flowrl.resharding.recorder import Recording, check_names
from flowrl.resharding.transfer import Held, Transfer
from flowrl.resharding.world import join_world
from flowrl.single_controller import Link

Tensors = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor of a model, in the folder's terms."""


@dataclass(frozen=True)
class Side:
    """What the ranks of one pool tell those of the other: layout, places, tensors, and the dtype that they are in."""

    sizes: ParallelSizes
    places: tuple[RankPlace, ...]
    tensors: Tensors
    dtype: torch.dtype


def check_tensors(engines: Tensors, trainers: Tensors) -> None:
    """Error: `ValueError` listing names and shapes in which the trainer's tensors are not the engine's."""
    check_names(dict(engines), trainers)


def transfer_from_trainer(
    link: Link, side: Side, shape: ModelShape, held: Sequence[Held], device: torch.device
) -> Transfer:
    """The trainer's end of moves to engines of another pool. Collective over both pools.

    Errors: as `check_tensors` and `Transfer`, on both pools; `RuntimeError` where a rank does not come.
    """
    return _transfer(link, side, shape, held, None, {}, device)


def transfer_to_engine(
    link: Link,
    side: Side,
    shape: ModelShape,
    recording: Recording,
    parameters: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Transfer:
    """The engine's end of moves from a trainer of another pool; as `transfer_from_trainer`."""
    return _transfer(link, side, shape, [], recording, parameters, device)


def _transfer(
    link: Link,
    side: Side,
    shape: ModelShape,
    held: Sequence[Held],
    recording: Recording | None,
    parameters: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Transfer:
    world = join_world(link.store, link.pools, link.rank, device=device, timeout_seconds=link.timeout_seconds)
    first_engine = link.pools[0][1]
    told = side if link.rank in (0, first_engine) else None
    sides: list[Side] = world.gather(told, "the exchange of layouts")
    trainers, engines = sides[0], sides[first_engine]
    check_tensors(engines.tensors, trainers.tensors)
    return Transfer(
        recording or Recording((), engines.dtype),
        parameters,
        shape,
        Layouts.apart(trainers.sizes, trainers.places, engines.sizes, engines.places),
        held,
        world=world,
        held_dtype=trainers.dtype,
    )


def carry_out(transfer: Transfer, held: Sequence[Held], *, prove: bool) -> DataProto:
    """Move the weights, and prove it where any rank asks for that; no rows, metrics of the move (maxima over ranks).

    Collective over the transfer's ranks. Errors: as `Transfer.move` and `Transfer.verify`.
    """
    world = transfer.world
    asked = torch.tensor(int(prove), device=world.device)
    proven = bool(world.all_reduce(asked, "the start of the move", dist.ReduceOp.MAX))
    report = transfer.move(held)
    figures = {
        "reshard/received_bytes_max": float(report.received_bytes),
        "reshard/bound_bytes_max": float(report.bound_bytes),
        "reshard/peak_extra_bytes_max": float(report.peak_extra_bytes),
        "reshard/num_collectives_max": float(report.num_collectives),
        "reshard/packed_bytes_max": float(report.packed_bytes),
        "reshard/move_seconds": report.seconds,
    }
    # By the plan, which all ranks share: a rank may have no part in some of them.
    parts = ("local", *(stage.name for stage in transfer.plan.stages), "install", "meet")
    figures |= {f"reshard/{part}_seconds": report.stage_seconds.get(part, 0.0) for part in parts}
    if proven:
        start = time.perf_counter()
        extra = float(transfer.verify(held))
        figures["reshard/peak_extra_bytes_max"] = max(figures["reshard/peak_extra_bytes_max"], extra)
        figures["reshard/fingerprint_seconds"] = time.perf_counter() - start
    largest = torch.tensor(list(figures.values()), dtype=torch.float64, device=world.device)
    world.all_reduce(largest, "the figures of the move", dist.ReduceOp.MAX)
    metrics = {name: Metric.max(value) for name, value in zip(figures, largest.tolist(), strict=True)}
    if proven:
        metrics["reshard/fingerprint_ok"] = Metric.min(1.0)
    return DataProto(metrics=metrics)
