"""The proof of a move: checksums of what the trainer holds against those of everything that engines keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.resharding.fingerprint import Checksums
from flowrl.resharding.recorder import Region
from flowrl.resharding.steps import Counts
from flowrl.resharding.world import World


def prove(counts: Counts, trained: Checksums, kept: Sequence[Region], engine: Checksums, world: World) -> int:
    """Compare what the trainer holds, by cells, with the engine's regions `kept`; returns the extra bytes that it took.

    Each element counts once on the trainer's side; on the engine's side every copy of every rank is compared, in
    the engine's type. Collective over `world`.

    Error: on all ranks alike, a `ValueError` that names rank, tensor and box of the first differences.
    """
    cells = world.all_reduce(trained.run(), "the comparison of weights")
    index = torch.tensor([cell for part in counts.sums for cell in part], dtype=torch.int64)
    owner = torch.tensor([region for region, part in enumerate(counts.sums) for _ in part], dtype=torch.int64)
    expected = torch.zeros(len(kept), dtype=torch.int64).index_add_(0, owner, cells.cpu()[index])
    wrong = (engine.run().cpu() != expected).nonzero().flatten().tolist()
    _agree([kept[number] for number in wrong], world)
    return max(trained.temporary_bytes, engine.temporary_bytes)


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
