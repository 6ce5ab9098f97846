"""The proof of a move: checksums of what the trainer holds against those of everything that engines keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flowrl.resharding.fingerprint import checksums, temporary_bytes
from flowrl.resharding.recorder import Region
from flowrl.resharding.steps import Counts
from flowrl.resharding.world import World


def prove(
    counts: Counts,
    shapes: Mapping[str, tuple[int, ...]],
    held: Sequence[tuple[str, torch.Tensor]],
    kept: Sequence[tuple[Region, torch.Tensor]],
    dtype: torch.dtype,
    world: World,
) -> int:
    """Compare the trainer's views `held` (tensor name, view) with the engine's; returns the extra bytes that it took.

    Each element counts once on the trainer's side; on the engine's side every copy of every rank is compared, in
    the engine's `dtype`. Collective over `world`.

    Error: on all ranks alike, a `ValueError` that names rank, tensor and box of the first differences.
    """
    device = world.device
    mine = ((count, *held[count.held]) for count in counts.mine)
    cells = checksums(
        ((count.cell, view[count.there], count.box, shapes[name]) for count, name, view in mine),
        counts.cells, dtype, device,
    )  # fmt: skip
    world.all_reduce(cells, "the comparison of weights")
    index = torch.tensor([cell for part in counts.sums for cell in part], dtype=torch.int64, device=device)
    owner = torch.tensor(
        [region for region, part in enumerate(counts.sums) for _ in part], dtype=torch.int64, device=device
    )
    expected = torch.zeros(len(kept), dtype=torch.int64, device=device).index_add_(0, owner, cells[index])
    found = checksums(
        ((number, place, region.box, shapes[region.tensor]) for number, (region, place) in enumerate(kept)),
        len(kept), dtype, device,
    )  # fmt: skip
    _agree([kept[number][0] for number in (found != expected).nonzero().flatten().tolist()], world)
    visited = [view for _, view in (*kept, *held)]
    return max(temporary_bytes(view.numel(), view.numel() // max(1, len(view))) for view in visited)


def _agree(wrong: Sequence[Region], world: World) -> None:
    what = "the verdict on the weights"
    count = int(world.all_reduce(torch.tensor(len(wrong), device=world.device), what))
    if not count:
        return
    everyone = world.gather([f"{region.tensor} {region.box} in {region.parameter}" for region in wrong[:3]], what)
    places = [f"{name}: {place}" for name, there in zip(world.names, everyone, strict=True) for place in there]
    raise ValueError(
        f"the engine's weights differ from the trainer's in {count} regions after a transfer; {'; '.join(places)}"
    )
