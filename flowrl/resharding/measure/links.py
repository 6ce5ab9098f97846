"""What the links between the devices of one host carry, by kind of collective and size: the ceiling of any move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flowrl.resharding.measure.device import copy_gb_per_second, median_seconds, own_device
from flowrl.resharding.measure.rounds import gather

RUN = "flowrl.resharding.measure.links:run_links"
"""What a process does with a `LinkJob`."""


@dataclass(frozen=True)
class LinkJob:
    """`device`: cpu, or cuda with a GPU for each rank. `sizes`: bytes that a rank receives in one collective."""

    device: str
    sizes: tuple[int, ...]
    repeat: int


def part_bytes(size: int, world: int) -> int:
    """What each of the other ranks sends of the `size` bytes that a rank receives."""
    return size // (world - 1)


def _all_gather(part: int, rank: int, world: int, device: torch.device) -> Callable[[], object]:
    own = torch.randint(0, 255, (part,), dtype=torch.uint8, device=device)
    found = torch.empty(part * world, dtype=torch.uint8, device=device)
    return lambda: dist.all_gather_into_tensor(found, own)


def _all_to_all(part: int, rank: int, world: int, device: torch.device) -> Callable[[], object]:
    """Between others alone, as a move does: what a rank holds does not travel."""
    parts = [part * (peer != rank) for peer in range(world)]
    sent = torch.randint(0, 255, (sum(parts),), dtype=torch.uint8, device=device)
    found = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(found, sent, parts, parts)


def _send_receive(part: int, rank: int, world: int, device: torch.device) -> Callable[[], object]:
    """Each to the next rank, all at once; the whole size comes from one rank."""
    sent = torch.randint(0, 255, (part * (world - 1),), dtype=torch.uint8, device=device)
    found = torch.empty_like(sent)

    def work() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, found, (rank - 1) % world),
        ]
        for going in dist.batch_isend_irecv(operations):
            going.wait()

    return work


KINDS = {"all_gather": _all_gather, "all_to_all": _all_to_all, "send_receive": _send_receive}


def run_links(job: LinkJob) -> dict[str, Any]:
    """Rows of kind, bytes that a rank receives and the rate of the slowest rank; and a copy within a device. Collective.

    A time is the median of a rank's times, the largest of any rank; a rate is received bytes over it, 1e9 a second.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    device = own_device(job.device)
    # gloo sends no tensors of a GPU from one rank to another.
    kinds = [kind for kind in KINDS if kind != "send_receive" or device.type == "cpu" or dist.get_backend() == "nccl"]
    rows = []
    for kind in kinds:
        make = KINDS[kind]
        for size in job.sizes:
            part = part_bytes(size, world)
            dist.barrier()
            seconds = max(gather(median_seconds(make(part, rank, world, device), device, job.repeat)))
            received = part * (world - 1)
            rows.append(
                {"kind": kind, "bytes": received, "seconds": seconds, "gb_per_second": received / seconds / 1e9}
            )
    copies = gather(copy_gb_per_second(device))
    return {"world": world, "links": rows, "copy_gb_per_second": None if None in copies else min(copies)}
