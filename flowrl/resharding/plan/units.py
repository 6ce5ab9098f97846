"""Units of a move: the elements that the same ranks hold before it and the same ranks need after it.

Sets of ranks are bit masks of Python integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flowrl.resharding.families import EMBEDDING, Box
from flowrl.resharding.plan.cells import Cell, Part, Place
from flowrl.resharding.plan.tables import ModelTable
from flowrl.resharding.ranks import RankPlace

Key = tuple[bool, int, int, Place]


@lru_cache(maxsize=1 << 16)
def bits(mask: int) -> tuple[int, ...]:
    """The set bits of a mask, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)


def mask_of(ranks: Iterable[int]) -> int:
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


@dataclass(frozen=True)
class Unit:
    """`parts` of the tensors of these layers (and experts), held by the ranks `holders` and needed by `needers`.

    `columns` are the ranks that hold the same shard of their own pipeline stage's layers. `elements` counts all of it.
    """

    layers: tuple[int, ...]
    experts: range | None
    parts: tuple[Part, ...]
    elements: int
    holders: int
    needers: int
    columns: int

    @property
    def missing(self) -> int:
        """The ranks that need the unit and do not hold it."""
        return self.needers & ~self.holders

    @cached_property
    def max_row_elements(self) -> int:
        return max(part.max_row_elements for part in self.parts)

    def pieces(self) -> Iterator[tuple[Key, str, Box]]:
        """(key, tensor, box) of every piece; keys put pieces in the order of training's buffers (see `buffer`): experts
        apart, the last layer first."""
        for layer in self.layers:
            for part in self.parts:
                name, placed = part.kind.name, part.placed
                for expert in self.experts or (0,):
                    tensor = name.format(layer=layer, expert=expert)
                    for place, box in placed:
                        yield (self.experts is not None, -layer, -expert, place), tensor, box


class _Masks:
    """Ranks by coordinate."""

    def __init__(self, places: Sequence[RankPlace], table: ModelTable) -> None:
        trains = [(1 << place.rank, place.train) for place in places if place.train is not None]
        rollouts = [(1 << place.rank, place.rollout) for place in places if place.rollout is not None]
        self.train_stage: dict[int, int] = {}
        self.tp: dict[int, int] = {}
        self.expert: dict[tuple[int, int], int] = {}
        self.rollout_stage: dict[int, int] = {}
        self.rollout_tp: dict[int, int] = {}
        for bit, train in trains:
            self.train_stage[train.pp] = self.train_stage.get(train.pp, 0) | bit
            self.tp[train.tp] = self.tp.get(train.tp, 0) | bit
            self.expert[train.ep, train.etp] = self.expert.get((train.ep, train.etp), 0) | bit
        for bit, rollout in rollouts:
            self.rollout_stage[rollout.pp] = self.rollout_stage.get(rollout.pp, 0) | bit
            self.rollout_tp[rollout.tp] = self.rollout_tp.get(rollout.tp, 0) | bit


def _either(masks: dict[int, int], keys: Iterable[int]) -> int:
    found = 0
    for key in keys:
        found |= masks[key]
    return found


def make_units(places: Sequence[RankPlace], table: ModelTable) -> list[Unit]:
    """All units of a model on these ranks, layers ascending."""
    masks = _Masks(places, table)
    units: list[Unit] = []
    held_at = {layer: stage for stage, layers in enumerate(table.train_stages) for layer in layers}
    kept_at = {layer: stage for stage, layers in enumerate(table.rollout_stages) for layer in layers}
    for kind in table.kinds:
        classes: dict[tuple[int, int], list[int]] = {}
        for layer in kind.layers:
            classes.setdefault((held_at[layer], kept_at[layer]), []).append(layer)
        for (here, there), layers in classes.items():
            stages = masks.train_stage[here], masks.rollout_stage[there]
            units += [_unit(tuple(layers), cell, stages, masks) for cell in kind.cells]
            units += _expert_units(tuple(layers), kind.expert_cells, stages, masks, table)
    last = len(held_at)
    for cell in table.ends:
        name = cell.parts[0].kind.name
        here_stages, there_stages = table.end_stages[name]
        stages = _either(masks.train_stage, here_stages), _either(masks.rollout_stage, there_stages)
        units.append(_unit((-1 if name == EMBEDDING else last,), cell, stages, masks))
    return units


def _unit(layers: tuple[int, ...], cell: Cell, stages: tuple[int, int], masks: _Masks) -> Unit:
    columns, rows = _either(masks.tp, bits(cell.train)), _either(masks.rollout_tp, bits(cell.rollout))
    elements = cell.elements * len(layers)
    return Unit(layers, None, cell.parts, elements, stages[0] & columns, stages[1] & rows, columns)


def _expert_units(
    layers: tuple[int, ...], cells: Sequence[Cell], stages: tuple[int, int], masks: _Masks, table: ModelTable
) -> Iterator[Unit]:
    """Units of routed experts: runs of experts that one expert-parallel rank of either side has."""
    whole_experts = len(table.rollout_experts) > 1
    for ep, kept in enumerate(table.train_experts):
        for rank, wanted in enumerate(table.rollout_experts):
            common = range(max(kept.start, wanted.start), min(kept.stop, wanted.stop))
            if not common:
                continue
            for cell in cells:
                columns = 0
                for etp in bits(cell.train):
                    columns |= masks.expert[ep, etp]
                rows = masks.rollout_tp[rank] if whole_experts else _either(masks.rollout_tp, bits(cell.rollout))
                elements = cell.elements * len(layers) * len(common)
                yield Unit(layers, common, cell.parts, elements, stages[0] & columns, stages[1] & rows, columns)
