"""The proof of a move: checksums of what the trainer holds against those of everything that engines keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from flowrl.resharding.fingerprint import checksums, temporary_bytes
from flowrl.resharding.recorder import Region
from flowrl.resharding.steps import Counts


def prove(
    counts: Counts,
    shapes: Mapping[str, tuple[int, ...]],
    held: Sequence[tuple[str, torch.Tensor]],
    kept: Sequence[tuple[Region, torch.Tensor]],
    dtype: torch.dtype,
) -> int:
    """Compare the trainer's views `held` (tensor name, view) with the engine's; returns the extra bytes that it took.

    Each element counts once on the trainer's side; on the engine's side every copy of every rank is compared, in
    the engine's `dtype`. Collective.

    Error: on all ranks alike, a `ValueError` that names rank, tensor and box of the first differences.
    """
    device = kept[0][1].device
    mine = ((count, *held[count.held]) for count in counts.mine)
    cells = checksums(
        ((count.cell, view[count.there], count.box, shapes[name]) for count, name, view in mine),
        counts.cells, dtype, device,
    )  # fmt: skip
    dist.all_reduce(cells)
    index = torch.tensor([cell for part in counts.sums for cell in part], device=device)
    owner = torch.tensor([region for region, part in enumerate(counts.sums) for _ in part], device=device)
    expected = torch.zeros(len(kept), dtype=torch.int64, device=device).index_add_(0, owner, cells[index])
    found = checksums(
        ((number, place, region.box, shapes[region.tensor]) for number, (region, place) in enumerate(kept)),
        len(kept), dtype, device,
    )  # fmt: skip
    _agree([kept[number][0] for number in (found != expected).nonzero().flatten().tolist()], device)
    return max(temporary_bytes(place.numel(), place.numel() // max(1, len(place))) for _, place in kept)


def _agree(wrong: Sequence[Region], device: torch.device) -> None:
    count = torch.tensor(len(wrong), device=device)
    dist.all_reduce(count)
    if not int(count):
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [f"{region.tensor} {region.box} in {region.parameter}" for region in wrong[:3]])
    places = [f"rank {rank}: {place}" for rank, there in enumerate(everyone) for place in there]
    raise ValueError(
        f"the engine's weights differ from the trainer's in {int(count)} regions after a transfer; {'; '.join(places)}"
    )
