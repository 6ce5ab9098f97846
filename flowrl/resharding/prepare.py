"""A plan and one rank's reads and writes of it, made once per process for the same layouts of the same model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.families import Box
from flowrl.resharding.layouts import Layouts
from flowrl.resharding.plan import MovePlan, plan_move
from flowrl.resharding.steps import Counts, Regions, Steps, check_sides, make_counts, make_steps

Keys = tuple[tuple[str, Box], ...]
"""(tensor, box) of the regions of one side, in their order."""


@dataclass(frozen=True)
class Prepared:
    """What a move and its proof need besides tensors."""

    plan: MovePlan
    steps: Steps
    counts: Counts


def prepare(
    shape: ModelShape,
    layouts: Layouts,
    rank: int,
    held: Keys,
    kept: Keys,
    *,
    element_bytes: int,
    bucket_bytes: int,
) -> Prepared:
    """For the rank whose trainer holds the regions `held` and whose engine has `kept`.

    Errors: as `plan_move`, `check_sides` and `make_counts`.
    """
    # How positions are stretched decides nothing here, and is a dict.
    return _prepare(replace(shape, rope_scaling=None), layouts, rank, held, kept, element_bytes, bucket_bytes)


@lru_cache(maxsize=8)
def _prepare(
    shape: ModelShape, layouts: Layouts, rank: int, held: Keys, kept: Keys, element_bytes: int, bucket_bytes: int
) -> Prepared:
    plan = plan_move(
        shape, layouts.train, layouts.rollout, layouts.places, element_bytes=element_bytes, bucket_bytes=bucket_bytes
    )
    here, there = Regions(held), Regions(kept)
    check_sides(plan, rank, here, there)
    return Prepared(plan, make_steps(plan, rank, here, there), make_counts(plan, rank, here, kept))
