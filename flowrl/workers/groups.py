"""Which ranks work together: pure rank arithmetic, and the process groups of one role made from it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-untyped]

from flowrl.config.schema import TrainLayout

Ranks = npt.NDArray[np.int64]

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Coordinates:
    """Place of a rank in a training layout. For experts the ranks of a stage are numbered anew: `etp` fastest, then
    `ep`, then replicas of the experts."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int = 0
    etp: int = 0


def data_parallel_size(world_size: int, layout: TrainLayout) -> int:
    """Replicas of the model. Errors: `ValueError` with the layout equation where the world does not divide."""
    model = layout.tp * layout.cp * layout.pp
    experts = layout.ep * layout.etp * layout.pp
    if world_size % model or world_size % experts:
        raise ValueError(
            f"{world_size} ranks cannot hold replicas of tp={layout.tp} x cp={layout.cp} x pp={layout.pp} = {model} ranks "
            f"(experts: ep={layout.ep} x etp={layout.etp} x pp={layout.pp} = {experts}); use a multiple of both"
        )
    return world_size // model


def coordinates(rank: int, world_size: int, layout: TrainLayout) -> Coordinates:
    """The numbering of training ranks: tensor parallel fastest, then context, then data, then pipeline."""
    dp = data_parallel_size(world_size, layout)
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, replica = divmod(rest, dp)
    ep = rank // layout.etp % layout.ep
    return Coordinates(tp=tp, cp=cp, dp=replica, pp=pp, ep=ep, etp=rank % layout.etp)


def rank_grid(world_size: int, layout: TrainLayout) -> Ranks:
    """Ranks [pp, dp, cp, tp] by coordinates; every line along an axis ascends."""
    grid = np.empty((layout.pp, data_parallel_size(world_size, layout), layout.cp, layout.tp), dtype=np.int64)
    for rank in range(world_size):
        at = coordinates(rank, world_size, layout)
        grid[at.pp, at.dp, at.cp, at.tp] = rank
    return grid


def expert_grid(world_size: int, layout: TrainLayout) -> Ranks:
    """Ranks [pp, expert replica, ep, etp]: the ranks of a stage regrouped for experts."""
    return rank_grid(world_size, layout).reshape(layout.pp, -1, layout.ep, layout.etp)


def lines(grid: Ranks, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rank lists of all groups that span `axes` (ascending) of the grid."""
    others = [axis for axis in range(grid.ndim) if axis not in axes]
    size = int(np.prod([grid.shape[axis] for axis in axes]))
    table = grid.transpose(*others, *axes).reshape(-1, size)
    return [tuple(sorted(int(rank) for rank in row)) for row in table]


def embedding_ranks(grid: Ranks) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Rank lists (first and last stage, first stage alone) of every pipeline."""
    columns = grid.transpose(1, 2, 3, 0).reshape(-1, grid.shape[0])
    ends = [tuple(sorted({int(column[0]), int(column[-1])})) for column in columns]
    return ends, [(int(column[0]),) for column in columns]


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of these ranks, made once per process: all ranks must ask for all groups in one order."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks), timeout=_timeout())
    return _groups[ranks]


def _timeout() -> timedelta:
    """How long the default group waits: new groups would take the backend's default instead."""
    device = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    timeout: timedelta = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device)).options._timeout
    return timeout


def _mine(rank_lists: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """Make all groups and return the one this rank is in."""
    rank, found = dist.get_rank(), None
    for ranks in rank_lists:
        group = _group(ranks)
        if rank in ranks:
            found = group
    return found


def process_groups(layout: TrainLayout) -> ProcessGroupCollection:
    """Groups of one role over the whole default group, for Megatron-core. Collective: every rank calls it.

    Megatron-core's own global state stays untouched, so roles of different layouts live in one process.
    """
    world_size = dist.get_world_size()
    grid, experts = rank_grid(world_size, layout), expert_grid(world_size, layout)
    pp, dp, cp, tp = range(4)
    expert_dp, ep, etp = 1, 2, 3
    groups = ProcessGroupCollection()
    groups.tp, groups.cp = _mine(lines(grid, (tp,))), _mine(lines(grid, (cp,)))
    groups.dp, groups.pp = _mine(lines(grid, (dp,))), _mine(lines(grid, (pp,)))
    groups.mp = _mine(lines(grid, (pp, tp)))
    groups.tp_cp = _mine(lines(grid, (cp, tp)))
    groups.dp_cp = groups.intra_dp_cp = _mine(lines(grid, (dp, cp)))
    groups.tp_dp_cp = _mine(lines(grid, (dp, cp, tp)))
    groups.intra_dist_opt = _mine(lines(grid, (pp, dp, cp, tp)))
    groups.ep, groups.expt_tp = _mine(lines(experts, (ep,))), _mine(lines(experts, (etp,)))
    groups.expt_dp = groups.intra_expt_dp = _mine(lines(experts, (expert_dp,)))
    groups.tp_ep = _mine(lines(experts, (ep, etp)))
    groups.tp_ep_pp = _mine(lines(experts, (pp, ep, etp)))
    ends, firsts = embedding_ranks(grid)
    groups.embd, groups.pos_embd = _mine(ends), _mine(firsts)
    # One optimizer instance and flat context parallelism; Megatron-core insists on seeing the names.
    groups.inter_dist_opt = groups.hcp = None
    return groups
