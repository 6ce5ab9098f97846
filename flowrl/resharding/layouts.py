"""Layouts as a configuration gives them, and the place of every rank in the layout of one role.

A role that trains or generates alone keeps a simple order of its own. Where both live on the same ranks each is told
the sizes of the other, and both find the same common numbering without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import RolloutConfig, TrainLayout
from flowrl.resharding.plan import choose_order
from flowrl.resharding.ranks import ParallelSizes, RankPlace, TrainPlace, check_world, disaggregated, numbering


@dataclass(frozen=True)
class Layouts:
    """Both sides of a move, and the place of every rank in them."""

    train: ParallelSizes
    rollout: ParallelSizes
    places: tuple[RankPlace, ...]

    @classmethod
    def join(
        cls, train: ParallelSizes, trainers: Sequence[RankPlace], rollout: ParallelSizes, engines: Sequence[RankPlace]
    ) -> Layouts:
        """Of trainers and engines that know their own side each, on the same ranks."""
        pairs = zip(trainers, engines, strict=True)
        places = tuple(RankPlace(here.rank, here.train, there.rollout) for here, there in pairs)
        return cls(train, rollout, places)

    @classmethod
    def apart(
        cls, train: ParallelSizes, trainers: Sequence[RankPlace], rollout: ParallelSizes, engines: Sequence[RankPlace]
    ) -> Layouts:
        """Of trainers, and of engines on other ranks, which are numbered after those of the trainers."""
        return cls(train, rollout, tuple(disaggregated(trainers, engines)))


def train_sizes(layout: TrainLayout) -> ParallelSizes:
    return ParallelSizes(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        vpp=layout.vpp,
        first_stage_layers=layout.first_stage_layers,
    )


def rollout_sizes(config: RolloutConfig) -> ParallelSizes:
    layout = config.layout
    return ParallelSizes(tp=layout.tp, pp=layout.pp, ep=layout.tp if config.expert_parallel else 1)


def common_places(shape: ModelShape, world: int, train: ParallelSizes, rollout: ParallelSizes) -> tuple[RankPlace, ...]:
    """Ranks in the order in which a move between these layouts carries the fewest bytes.

    Errors: `ValueError` where ranks, layouts and model do not fit, with the numbers.
    """
    return tuple(numbering(world, train, rollout, choose_order(shape, world, train, rollout).chosen.order))


def train_places(world: int, train: ParallelSizes) -> tuple[RankPlace, ...]:
    """Training's own order: tensor parallel fastest, then context, then data, then pipeline.

    For experts the ranks of a stage are numbered anew: `etp` fastest, then `ep`, then replicas of the experts.

    Errors: `ValueError` with the layout equation where the world does not divide.
    """
    model, experts = train.tp * train.cp * train.pp, train.etp * train.ep * train.pp
    if world % model or world % experts:
        raise ValueError(
            f"{world} ranks cannot hold replicas of tp={train.tp} x cp={train.cp} x pp={train.pp} = {model} ranks "
            f"(experts: ep={train.ep} x etp={train.etp} x pp={train.pp} = {experts}); use a multiple of both"
        )
    places = []
    for rank in range(world):
        pp, slot = divmod(rank, world // train.pp)
        rest, tp = divmod(slot, train.tp)
        dp, cp = divmod(rest, train.cp)
        rest, etp = divmod(slot, train.etp)
        edp, ep = divmod(rest, train.ep)
        places.append(RankPlace(rank, TrainPlace(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=edp), None))
    return tuple(places)


def rollout_places(world: int, rollout: ParallelSizes) -> tuple[RankPlace, ...]:
    """Generation's own order: engines are consecutive, tensor parallel fastest, then pipeline stage.

    Errors: `ValueError` with the layout equation where the world does not divide.
    """
    size = rollout.tp * rollout.pp
    if world % size:
        raise ValueError(
            f"{world} ranks cannot hold engines of rollout.layout tp={rollout.tp} x pp={rollout.pp} = {size} ranks; "
            f"use a multiple of {size} devices"
        )
    alone = ParallelSizes()
    check_world(world, alone, rollout)
    return tuple(RankPlace(place.rank, None, place.rollout) for place in numbering(world, alone, rollout))
