"""The process groups of one role that trains, from the place of every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-untyped]

from flowrl.resharding.process_groups import process_group
from flowrl.resharding.ranks import RankPlace, Ranks, grid, groups


def embedding_ranks(ranks: Ranks) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Rank lists (first and last stage, first stage alone) of every pipeline of a grid [pp, dp, cp, tp]."""
    columns = ranks.transpose(1, 2, 3, 0).reshape(-1, ranks.shape[0])
    ends = [tuple(sorted({int(column[0]), int(column[-1])})) for column in columns]
    return ends, [(int(column[0]),) for column in columns]


def _mine(rank_lists: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """Make all groups and return the one this rank is in."""
    rank, found = dist.get_rank(), None
    for ranks in rank_lists:
        group = process_group(ranks)
        if rank in ranks:
            found = group
    return found


def process_groups(places: Sequence[RankPlace]) -> ProcessGroupCollection:
    """Groups of one role over the whole default group, for Megatron-core. Collective: every rank calls it.

    Megatron-core's own global state stays untouched, so roles of different layouts live in one process.
    """

    def dense(*axes: str) -> dist.ProcessGroup | None:
        return _mine(groups(places, "train", *axes))

    def experts(*axes: str) -> dist.ProcessGroup | None:
        return _mine(groups(places, "experts", *axes))

    made = ProcessGroupCollection()
    made.tp, made.cp, made.dp, made.pp = dense("tp"), dense("cp"), dense("dp"), dense("pp")
    made.mp, made.tp_cp = dense("pp", "tp"), dense("cp", "tp")
    made.dp_cp = made.intra_dp_cp = dense("dp", "cp")
    made.tp_dp_cp = dense("dp", "cp", "tp")
    made.intra_dist_opt = dense("pp", "dp", "cp", "tp")
    made.ep, made.expt_tp = experts("ep"), experts("etp")
    made.expt_dp = made.intra_expt_dp = experts("edp")
    made.tp_ep = experts("ep", "etp")
    made.tp_ep_pp = experts("pp", "ep", "etp")
    ends, firsts = embedding_ranks(grid(places, "train"))
    made.embd, made.pos_embd = _mine(ends), _mine(firsts)
    # One optimizer instance and flat context parallelism; Megatron-core insists on seeing the names.
    made.inter_dist_opt = made.hcp = None
    return made
