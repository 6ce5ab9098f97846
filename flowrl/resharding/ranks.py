"""Which rank is where in training and in generation, when both live on the same ranks.

Pure integers. Ranks are numbered along the common refinement of both layouts: with X a common multiple of the two
tensor-parallel sizes, Y one of the two pipeline sizes and coordinates x in X, y in Y, z over the rest,
rank = x + X * (y + Y * z). A rank's tensor-parallel place is floor(x tp / X) on either side, its pipeline place
floor(y pp / Y). So a generation shard lies inside a training shard or contains it on every rank, no rank lacks more of
its generation shard than the layouts force it to, and the ranks of every group ascend. The stage of an interleaved
pipeline is that of chunk floor(y pp vpp / Y) where Y is a multiple of pp vpp; else its shards do not nest.

Where experts want another order than the rest of the model, `Order` moves digits of the same numbering.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt

Ranks = npt.NDArray[np.int64]
Side = Literal["train", "experts", "rollout"]
Axis = Literal["tp", "ep", "etp"]


@dataclass(frozen=True)
class ParallelSizes:
    """A layout. In training `ep` and `etp` regroup the ranks of a pipeline stage for the experts.

    In generation `ep` is 1 (every tensor-parallel rank keeps a slice of every expert) or `tp` (whole experts, spread
    over the tensor-parallel ranks); `cp`, `etp` and `vpp` stay 1.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    first_stage_layers: int | None = None

    def __str__(self) -> str:
        named = ((field.name, getattr(self, field.name)) for field in fields(self)[:-1])
        return "".join(f"{name}{size}" for name, size in named if size > 1) or "tp1"


@dataclass(frozen=True)
class TrainPlace:
    """Training coordinates of a rank: (tp, cp, dp, pp) for most weights, (etp, ep, edp, pp) for experts."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class RolloutPlace:
    """Generation coordinates of a rank."""

    tp: int
    pp: int
    replica: int


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is; None on a side that it takes no part in."""

    rank: int
    train: TrainPlace | None
    rollout: RolloutPlace | None


@dataclass(frozen=True)
class Order:
    """How ranks are numbered; the default is the numbering of this module's docstring.

    `aligned`: the training axis that generation's tensor-parallel shards nest with. `inner`: this many replicas are
    neighbours, inside x. Strides count positions among the ascending ranks of a pipeline stage, from one place on an
    axis to the next. None: for `tp_stride` the numbering's own where tp is aligned, else 1; for `ep_stride` next to etp.
    """

    aligned: Axis = "tp"
    inner: int = 1
    tp_stride: int | None = None
    ep_stride: int | None = None
    etp_stride: int = 1


@dataclass(frozen=True)
class _Digits:
    """Of every rank [world]: pipeline stage of training and, in its stage, the aligned axis; generation's coordinates."""

    aligned: Ranks
    pp: Ranks
    rollout_tp: Ranks
    rollout_pp: Ranks


AXES: dict[Side, tuple[str, ...]] = {
    "train": ("pp", "dp", "cp", "tp"),
    "experts": ("pp", "edp", "ep", "etp"),
    "rollout": ("replica", "pp", "tp"),
}
"""Axes of `grid` by side."""


def check_world(world: int, train: ParallelSizes, rollout: ParallelSizes) -> None:
    """Errors: `ValueError` with the numbers where the ranks cannot be cut into these layouts."""
    sizes = [size for layout in (train, rollout) for size in _sizes(layout)]
    if min(sizes) < 1:
        raise ValueError(f"sizes of a layout are at least 1; got train {train}, rollout {rollout}")
    if rollout.ep not in (1, rollout.tp) or rollout.cp != 1 or rollout.etp != 1 or rollout.vpp != 1:
        raise ValueError(
            f"rollout layout {rollout}: generation has tp, pp and ep, and ep is 1 or tp={rollout.tp} (experts are spread over "
            f"the tensor-parallel ranks)"
        )
    for what, count in (
        ("train tp x cp x pp", train.tp * train.cp * train.pp),
        ("train etp x ep x pp", train.etp * train.ep * train.pp),
        ("rollout tp x pp", rollout.tp * rollout.pp),
    ):
        if world % count:
            raise ValueError(
                f"{world} ranks cannot be cut into {what} = {count}; nearest: {_nearest(world, count)} ranks"
            )


def _sizes(layout: ParallelSizes) -> list[int]:
    return [layout.tp, layout.pp, layout.cp, layout.ep, layout.etp, layout.vpp]


def _nearest(world: int, unit: int) -> str:
    below = world // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _nests(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def _digits(world: int, aligned: int, train: ParallelSizes, rollout: ParallelSizes, inner: int) -> _Digits | None:
    """The numbering, or None where `inner` replicas are not to be had."""
    ranks, pp = np.arange(world, dtype=np.int64), train.pp
    x_size, y_size = math.lcm(aligned, rollout.tp), math.lcm(pp, rollout.pp)
    if world % (x_size * y_size) == 0:
        if world // (x_size * y_size) % inner:
            return None
        rest, x = np.divmod(ranks // inner, x_size)
        y = rest % y_size
        chunks = pp * train.vpp if y_size % (pp * train.vpp) == 0 else pp
        stage = y * chunks // y_size % pp
        return _Digits(x * aligned // x_size, stage, x * rollout.tp // x_size, y * rollout.pp // y_size)
    if inner > 1:
        return None
    if _nests(aligned, rollout.tp) and _nests(pp, rollout.pp):
        return _crossed(ranks, (aligned, pp), (rollout.tp, rollout.pp))
    stage, slot = np.divmod(ranks, aligned)
    engine, column = np.divmod(ranks, rollout.tp)
    return _Digits(slot, stage % pp, column, engine % rollout.pp)


def _crossed(ranks: Ranks, train: tuple[int, int], rollout: tuple[int, int]) -> _Digits:
    """One side has the larger tensor-parallel size and the other the larger pipeline size, and ranks do not suffice for
    both: the extra tensor-parallel places come from replicas and then from pipeline stages of the other side."""
    if train[0] > rollout[0]:
        swapped = _crossed(ranks, rollout, train)
        return _Digits(swapped.rollout_tp, swapped.rollout_pp, swapped.aligned, swapped.pp)
    (tp, pp), (more, fewer) = train, rollout
    factor = more // tp
    from_replicas = math.gcd(factor, len(ranks) // (tp * pp))
    from_stages = factor // from_replicas
    rest, extra = np.divmod(ranks, factor)
    rest, column = np.divmod(rest, tp)
    stage = rest % (pp // from_stages) * from_stages + extra // from_replicas
    return _Digits(column, stage, column * factor + extra, stage * fewer // pp)


def _digit(position: Ranks, stride: int, size: int) -> tuple[Ranks, Ranks]:
    """(the digit of this size at `stride`, what is left of the position without it)."""
    high, low = np.divmod(position, stride)
    high, digit = np.divmod(high, size)
    return digit, low + stride * high


def _position_in(*keys: Ranks) -> Ranks:
    """Position of every rank among the ascending ranks that agree with it in all keys."""
    seen: dict[tuple[int, ...], int] = {}
    positions = np.empty(len(keys[0]), dtype=np.int64)
    for rank, key in enumerate(zip(*(part.tolist() for part in keys), strict=True)):
        positions[rank] = seen.get(key, 0)
        seen[key] = seen.get(key, 0) + 1
    return positions


class Frame:
    """A numbering of ranks before tensor- and expert-parallel axes are chosen inside the pipeline stages.

    Arrays are by rank: `pp` of training, `rollout_tp`, `rollout_pp` and `replica` of generation. An axis inside a stage
    is a digit, given by its stride, of the position of a rank among its stage's ascending ranks.

    Error: `ValueError` where there are not `inner` replicas.
    """

    def __init__(self, world: int, train: ParallelSizes, rollout: ParallelSizes, aligned: Axis, inner: int) -> None:
        sizes = {"tp": train.tp, "ep": train.ep, "etp": train.etp}
        digits = _digits(world, sizes[aligned], train, rollout, inner)
        if digits is None:
            raise ValueError(f"{world} ranks of train {train} and rollout {rollout} have no {inner} replicas inside")
        self.train, self.aligned, self.inner, self.stage_size = train, aligned, inner, world // train.pp
        self.pp, self.rollout_tp, self.rollout_pp = digits.pp, digits.rollout_tp, digits.rollout_pp
        self.replica = _position_in(digits.rollout_tp, digits.rollout_pp)
        self._position = _position_in(digits.pp)
        ones = self._position[digits.aligned == 1]
        self.aligned_stride = int(ones.min()) if ones.size else 1

    def dense(self, stride: int | None) -> tuple[Ranks, Ranks]:
        """(tensor-parallel place, replica) of every rank. Error: `ValueError` where the stride does not fit."""
        stride = stride or (self.aligned_stride if self.aligned == "tp" else 1)
        self._check("tp", stride, self.train.tp)
        return _digit(self._position, stride, self.train.tp)

    def experts(self, ep_stride: int | None, etp_stride: int) -> tuple[Ranks, Ranks, Ranks]:
        """(ep, etp, edp) of every rank. Error: `ValueError` where the strides do not fit."""
        etp_axis = (etp_stride, self.train.etp)
        ep_axis = (ep_stride or etp_stride * self.train.etp, self.train.ep)
        self._check("ep", *ep_axis)
        self._check("etp", *etp_axis)
        (low, size), (high, other) = sorted((ep_axis, etp_axis))
        if size > 1 and other > 1 and high % (low * size):
            raise ValueError(f"ep at stride {ep_axis[0]} overlaps etp={self.train.etp} at stride {etp_axis[0]}")
        # The axis of the larger stride is taken out first, so that the other's stride stays valid.
        if ep_axis[0] >= etp_axis[0]:
            ep, rest = _digit(self._position, *ep_axis)
            etp, edp = _digit(rest, *etp_axis)
        else:
            etp, rest = _digit(self._position, *etp_axis)
            ep, edp = _digit(rest, *ep_axis)
        return ep, etp, edp

    def _check(self, name: str, stride: int, size: int) -> None:
        if size > 1 and self.stage_size % (stride * size):
            raise ValueError(f"{name}={size} at stride {stride} does not fit the {self.stage_size} ranks of a stage")


def numbering(world: int, train: ParallelSizes, rollout: ParallelSizes, order: Order | None = None) -> list[RankPlace]:
    """The place of every rank in both layouts, by rank.

    Errors: as `check_world`; `ValueError` where `order` does not fit the layouts.
    """
    check_world(world, train, rollout)
    order = order or Order()
    frame = Frame(world, train, rollout, order.aligned, order.inner)
    tp, replica = frame.dense(order.tp_stride)
    columns = [tp, replica, frame.pp, *frame.experts(order.ep_stride, order.etp_stride)]
    columns += [frame.rollout_tp, frame.rollout_pp, frame.replica]
    table = zip(*(column.tolist() for column in columns), strict=True)
    return [
        RankPlace(
            rank,
            TrainPlace(tp=t, cp=r % train.cp, dp=r // train.cp, pp=p, ep=e, etp=et, edp=ed),
            RolloutPlace(tp=g, pp=gp, replica=rep),
        )
        for rank, (t, r, p, e, et, ed, g, gp, rep) in enumerate(table)
    ]


def disaggregated(trainers: Sequence[RankPlace], engines: Sequence[RankPlace]) -> list[RankPlace]:
    """Training on the first ranks and generation on as many others after them; each side keeps its order."""
    first = len(trainers)
    return [RankPlace(place.rank, place.train, None) for place in trainers] + [
        RankPlace(first + place.rank, None, place.rollout) for place in engines
    ]


def _coordinates(places: Sequence[RankPlace], side: Side) -> Iterator[tuple[int, tuple[int, ...]]]:
    for place in places:
        at = place.rollout if side == "rollout" else place.train
        if at is not None:
            yield place.rank, tuple(int(getattr(at, axis)) for axis in AXES[side])


def grid(places: Sequence[RankPlace], side: Side) -> Ranks:
    """Ranks by coordinates, axes in the order of `AXES[side]`; along every axis they ascend."""
    table = list(_coordinates(places, side))
    shape = tuple(max(values) + 1 for values in zip(*(at for _, at in table), strict=True))
    ranks = np.full(shape, -1, dtype=np.int64)
    for rank, at in table:
        ranks[at] = rank
    assert math.prod(shape) == len(table) and (ranks >= 0).all(), "the numbering is a bijection"
    return ranks


def groups(places: Sequence[RankPlace], side: Side, *axes: str) -> list[tuple[int, ...]]:
    """Rank lists, each ascending, of all groups whose members differ in `axes` (of `AXES[side]`) only."""
    unknown = [axis for axis in axes if axis not in AXES[side]]
    if unknown:
        raise ValueError(f"{side} has no axis {unknown[0]}; known: {', '.join(AXES[side])}")
    found: dict[tuple[int, ...], list[int]] = {}
    kept = [number for number, axis in enumerate(AXES[side]) if axis not in axes]
    for rank, at in _coordinates(places, side):
        found.setdefault(tuple(at[number] for number in kept), []).append(rank)
    return [tuple(sorted(ranks)) for ranks in found.values()]


def micro_groups(places: Sequence[RankPlace]) -> list[tuple[int, ...]]:
    """Micro data-parallel groups: ranks of one training tensor-parallel group that generate with the same shard.

    They hold different slices of what each of them needs, and exchange them. A rank without partners is alone.
    """
    found: dict[object, list[int]] = {}
    for place in places:
        train, rollout = place.train, place.rollout
        if train is None or rollout is None:
            found[place.rank] = [place.rank]
        else:
            key = (train.pp, train.dp, train.cp, rollout.tp, rollout.pp)
            found.setdefault(key, []).append(place.rank)
    return [tuple(ranks) for ranks in found.values()]


def num_nodes(groups_: Sequence[Sequence[int]], gpus_per_node: int) -> int:
    """Most nodes that one of the groups lies on."""
    return max((len({rank // gpus_per_node for rank in ranks}) for ranks in groups_), default=0)
