"""Which numbering of ranks moves the fewest bytes of a model with experts.

The shards of generation nest with training's tensor-parallel shards in one numbering and with its expert-parallel ones
in another. Candidates move digits of the numbering (`ranks.Order`); all keep the ranks of every group ascending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.plan.tables import ModelTable, model_table
from flowrl.resharding.plan.units import bits, make_units
from flowrl.resharding.ranks import Axis, Frame, Order, ParallelSizes, RankPlace, Ranks, check_world, numbering

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OrderFigures:
    """Bytes that all ranks together must receive under an order, of experts and of everything else."""

    order: Order
    dense_bytes: int
    expert_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + self.expert_bytes


@dataclass(frozen=True)
class OrderChoice:
    """`dense` is the best order for all but experts, `expert` the best for experts, `chosen` the smallest total."""

    dense: OrderFigures
    expert: OrderFigures
    chosen: OrderFigures


@dataclass(frozen=True)
class _Candidate:
    """An order; `dense` and `expert` are mean shares of the model that ranks hold already of what they need."""

    order: Order
    dense: float
    expert: float
    tp_nodes: int
    ep_nodes: int


def choose_order(
    shape: ModelShape,
    world: int,
    train: ParallelSizes,
    rollout: ParallelSizes,
    *,
    element_bytes: int = 2,
    gpus_per_node: int = 8,
) -> OrderChoice:
    """The order of the smallest total, among those that spread no tensor-parallel group over more nodes than need be;
    of equals the one whose expert-parallel groups lie on the fewest nodes.

    A dense model has one order, that of `numbering`. Errors: as `numbering` and `tables.model_table`.
    """
    check_world(world, train, rollout)
    table = model_table(shape, train, rollout)
    if not shape.num_experts:
        only = _figures(table, numbering(world, train, rollout), Order(), element_bytes)
        return OrderChoice(only, only, only)
    dense_weight, expert_weight = _weights(table)
    tried = list(_candidates(_Overlaps(table, train, rollout), world, train, rollout, gpus_per_node))
    fewest = min(candidate.tp_nodes for candidate in tried)
    near = [candidate for candidate in tried if candidate.tp_nodes == fewest]

    def total(candidate: _Candidate) -> float:
        return round(candidate.dense * dense_weight + candidate.expert * expert_weight, 9)

    best = (
        max(near, key=lambda c: (c.dense, -c.ep_nodes)),
        max(near, key=lambda c: (c.expert, total(c), -c.ep_nodes)),
        max(near, key=lambda c: (total(c), -c.ep_nodes)),
    )
    known: dict[Order, OrderFigures] = {}
    for order in (candidate.order for candidate in best):
        if order not in known:
            known[order] = _figures(table, numbering(world, train, rollout, order), order, element_bytes)
    dense, expert, chosen = (known[candidate.order] for candidate in best)
    return OrderChoice(dense, expert, min((chosen, dense, expert), key=lambda figures: figures.total_bytes))


def _figures(table: ModelTable, places: list[RankPlace], order: Order, element_bytes: int) -> OrderFigures:
    dense = expert = 0
    for unit in make_units(places, table):
        size = unit.elements * element_bytes * len(bits(unit.missing))
        if unit.experts:
            expert += size
        else:
            dense += size
    return OrderFigures(order, dense, expert)


def _weights(table: ModelTable) -> tuple[float, float]:
    """Shares of the model outside experts and in experts."""
    dense = sum(cell.elements for cell in table.ends)
    expert = 0
    num_experts = sum(len(experts) for experts in table.train_experts)
    for kind in table.kinds:
        dense += len(kind.layers) * sum(cell.elements for cell in kind.cells)
        expert += len(kind.layers) * num_experts * sum(cell.elements for cell in kind.expert_cells)
    return dense / (dense + expert), expert / (dense + expert)


class _Overlaps:
    """Share of what two places have in common, by (training place, generation place)."""

    def __init__(self, table: ModelTable, train: ParallelSizes, rollout: ParallelSizes) -> None:
        self.layers = _common(table.train_stages, table.rollout_stages)
        self.tp = _common_shares(train.tp, rollout.tp)
        whole = rollout.ep > 1
        self.experts = _common(table.train_experts, table.rollout_experts)
        self.slices = _common_shares(train.etp, 1 if whole else rollout.tp)
        self.whole_experts = whole


def _common(here: Iterable[Iterable[int]], there: Iterable[Iterable[int]]) -> Shares:
    kept = [set(items) for items in there]
    counts = np.array([[len(items & mine) for items in kept] for mine in map(set, here)], dtype=np.float64)
    shares: Shares = counts / counts.sum()
    return shares


def _common_shares(here: int, there: int) -> Shares:
    """Common part of share a of `here` equal ones and share b of `there` equal ones of the same thing."""
    a, b = np.arange(here)[:, None] / here, np.arange(there)[None, :] / there
    shares: Shares = np.clip(np.minimum(a + 1 / here, b + 1 / there) - np.maximum(a, b), 0, None)
    return shares


def _candidates(
    overlaps: _Overlaps, world: int, train: ParallelSizes, rollout: ParallelSizes, gpus_per_node: int
) -> Iterator[_Candidate]:
    """For every frame of ranks the best axes inside its stages, the simplest frames first."""
    expert_axis: Axis = "ep" if overlaps.whole_experts else "etp"
    axes: list[Axis] = ["tp", expert_axis] if {"ep": train.ep, "etp": train.etp}[expert_axis] > 1 else ["tp"]
    node = np.arange(world) // gpus_per_node
    for aligned in axes:
        for inner in _divisors(world):
            try:
                frame = Frame(world, train, rollout, aligned, inner)
            except ValueError:
                continue
            yield _best_axes(frame, overlaps, node)


def _best_axes(frame: Frame, overlaps: _Overlaps, node: Ranks) -> _Candidate:
    train, steps = frame.train, _divisors(frame.stage_size)
    layers = overlaps.layers[frame.pp, frame.rollout_pp]
    engine_nodes = _most_nodes(node, frame.replica, frame.rollout_pp)
    dense = []
    for stride in [None] if frame.aligned == "tp" or train.tp == 1 else steps:
        try:
            tp, replica = frame.dense(stride)
        except ValueError:
            continue
        nodes = max(engine_nodes, _most_nodes(node, replica, frame.pp))
        share = float(round((layers * overlaps.tp[tp, frame.rollout_tp]).mean(), 9))
        dense.append((-nodes, share, stride))
    expert = []
    for etp_stride in steps if train.etp > 1 else [1]:
        for ep_stride in steps if train.ep > 1 else [None]:
            if ep_stride is not None and train.etp > 1 and ep_stride < etp_stride:
                # Megatron-core's dispatcher reads what it gathered from a stage's experts as [ep, etp].
                continue
            try:
                ep, etp, edp = frame.experts(ep_stride, etp_stride)
            except ValueError:
                continue
            zero = np.zeros_like(ep)
            kept, part = (frame.rollout_tp, zero) if overlaps.whole_experts else (zero, frame.rollout_tp)
            share = float(round((layers * overlaps.experts[ep, kept] * overlaps.slices[etp, part]).mean(), 9))
            expert.append((share, -_most_nodes(node, edp, frame.pp), ep_stride, etp_stride))
    tp_nodes, dense_share, tp_stride = max(dense, key=lambda found: found[:2])
    expert_share, ep_nodes, ep_stride, etp_stride = max(expert, key=lambda found: found[:2])
    order = Order(frame.aligned, frame.inner, tp_stride, ep_stride, etp_stride)
    return _Candidate(order, dense_share, expert_share, -tp_nodes, -ep_nodes)


def _most_nodes(node: Ranks, *keys: Ranks) -> int:
    """Most nodes that one of the groups of ranks with equal keys lies on."""
    pairs = np.unique(np.stack([*keys, node]), axis=1)
    return int(np.unique(pairs[:-1], axis=1, return_counts=True)[1].max())


def _divisors(number: int) -> list[int]:
    return [step for step in range(1, number + 1) if number % step == 0]
