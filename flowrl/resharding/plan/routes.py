"""Which rank sends which unit to whom, in which stage.

Every rank receives each unit that it lacks exactly once. Where ranks of one micro data-parallel group lack the same
unit, one of them imports it and hands it on; where a whole node lacks it, one rank of the node does. The importer is a
rank that holds the same shard of its own pipeline stage, if there is one, so imports run inside pipeline groups.

A unit that every rank of a group could import alike (norms) is imported inside the same pipeline groups everywhere, so
that what a rank sends in a stage is the same for all that it sends to.

Stages run one after another: `pp` (inside pipeline groups), `ep` (experts between expert-parallel ranks), `p2p`
(irregular: between any ranks), `node` (what one rank of a node imported for all) and `tp` (inside micro data-parallel
groups). Only what arrived in an earlier stage is handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flowrl.resharding.plan.units import Unit, bits, mask_of
from flowrl.resharding.ranks import RankPlace, TrainPlace, micro_groups

STAGES = ("pp", "ep", "p2p", "node", "tp")


class Shipment(NamedTuple):
    """Unit number `unit` goes from rank `source` to rank `target`."""

    unit: int
    source: int
    target: int


@dataclass(frozen=True)
class Routing:
    """Shipments by stage; `import_bound` are the fewest elements that must enter each node from outside."""

    shipments: dict[str, list[Shipment]]
    import_bound: tuple[int, ...]


class Router:
    """Routes units one after another, keeping what each rank sends and imports even."""

    def __init__(self, places: Sequence[RankPlace], gpus_per_node: int) -> None:
        world = len(places)
        self._sent, self._imported = [0] * world, [0] * world
        self._node_of = [rank // gpus_per_node for rank in range(world)]
        nodes = range(self._node_of[-1] + 1)
        self._node = [mask_of(r for r in range(world) if self._node_of[r] == node) for node in nodes]
        self._micro = [0] * world
        for group in micro_groups(places):
            for rank in group:
                self._micro[rank] = mask_of(group)
        self._own = [
            _members(places, lambda train: (train.tp, train.dp, train.cp)),
            _members(places, lambda train: (train.dp, train.cp)),
        ]
        self._own_experts = [
            _members(places, lambda train: (train.ep, train.etp, train.edp)),
            _members(places, lambda train: (train.etp, train.edp)),
            _members(places, lambda train: (train.edp,)),
        ]
        # Elements imported inside each pipeline group, before the unit that is being routed and by that unit.
        self._pulled: dict[int, int] = {}
        self._pulled_now: dict[int, int] = {}
        self._shipments: dict[str, list[Shipment]] = {stage: [] for stage in STAGES}
        self._import_bound = [0] * len(nodes)

    def route(self, units: Sequence[Unit]) -> Routing:
        for number, unit in enumerate(units):
            missing = unit.missing
            for node in {self._node_of[rank] for rank in bits(missing)} if missing else ():
                self._route_node(number, unit, missing & self._node[node], unit.holders & self._node[node])
            for column, elements in self._pulled_now.items():
                self._pulled[column] = self._pulled.get(column, 0) + elements
            self._pulled_now.clear()
        if self._shipments["ep"]:
            # Experts that come from other pipeline stages of the same column join the others: fewer, fuller buckets.
            moved = [shipment for shipment in self._shipments["pp"] if units[shipment.unit].experts]
            self._shipments["pp"] = [shipment for shipment in self._shipments["pp"] if not units[shipment.unit].experts]
            self._shipments["ep"] += moved
        return Routing(self._shipments, tuple(self._import_bound))

    def _route_node(self, number: int, unit: Unit, missing: int, holders: int) -> None:
        """`missing` and `holders` are ranks of one node."""
        lacking = []
        while missing:
            group = missing & self._micro[bits(missing & -missing)[0]]
            missing &= ~group
            partners = holders & self._micro[bits(group & -group)[0]]
            if partners:
                for rank in bits(group):
                    self._ship("ep" if unit.experts else "tp", number, unit, self._sender(unit, partners, rank), rank)
            else:
                lacking.append(group)
        if holders:
            for group in lacking:
                self._import(number, unit, group, holders)
        elif lacking:
            everyone = 0
            for group in lacking:
                everyone |= group
            self._import_bound[self._node_of[bits(everyone)[0]]] += unit.elements
            self._import(number, unit, everyone, unit.holders)

    def _import(self, number: int, unit: Unit, group: int, holders: int) -> None:
        """One rank of the group receives the unit from one of `holders`, the others receive it from that rank."""
        related = group & unit.columns
        importer = self._importer(unit, related) if related else min(bits(group), key=self._imported.__getitem__)
        self._imported[importer] += unit.elements
        source = self._sender(unit, holders, importer)
        others = group & ~(1 << importer)
        if self._micro[importer] >> source & 1 and not others:
            stage = "tp"
        elif related:
            stage = "pp"
        else:
            stage = "ep" if unit.experts else "p2p"
        self._ship(stage, number, unit, source, importer)
        for rank in bits(others):
            stage = "tp" if self._micro[importer] >> rank & 1 else "node"
            self._ship(stage, number, unit, importer, rank)

    def _importer(self, unit: Unit, related: int) -> int:
        """The rank whose pipeline group has imported least in earlier units: the same one for all that lack this unit."""
        column = (self._own_experts if unit.experts else self._own)[0]

        def load(rank: int) -> tuple[int, int, int]:
            return self._pulled.get(column[rank], 0), column[rank] & -column[rank], self._imported[rank]

        importer = min(bits(related), key=load)
        self._pulled_now[column[importer]] = self._pulled_now.get(column[importer], 0) + unit.elements
        return importer

    def _sender(self, unit: Unit, holders: int, target: int) -> int:
        """The least busy of the holders nearest to the target: in its pipeline group, else its replica of the model."""
        for near in self._own_experts if unit.experts else self._own:
            if own := holders & near[target]:
                return min(bits(own), key=self._sent.__getitem__)
        return min(bits(holders), key=self._sent.__getitem__)

    def _ship(self, stage: str, number: int, unit: Unit, source: int, target: int) -> None:
        self._sent[source] += unit.elements
        self._shipments[stage].append(Shipment(number, source, target))


def _members(places: Sequence[RankPlace], key: Callable[[TrainPlace], tuple[int, ...]]) -> list[int]:
    """By rank, the ranks whose training place has the same key; none for a rank that does not train."""
    members: dict[tuple[int, ...], int] = {}
    for place in places:
        if place.train is not None:
            members[key(place.train)] = members.get(key(place.train), 0) | 1 << place.rank
    return [members[key(place.train)] if place.train is not None else 0 for place in places]


def components(shipments: Sequence[Shipment], world: int) -> list[tuple[int, ...]]:
    """Groups of ranks between which nothing travels, each ascending; ranks that take no part are in none."""
    parent = list(range(world))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    active: set[int] = set()
    for _, source, target in shipments:
        active.update((source, target))
        a, b = root(source), root(target)
        if a != b:
            parent[max(a, b)] = min(a, b)
    found: dict[int, list[int]] = {}
    for rank in sorted(active):
        found.setdefault(root(rank), []).append(rank)
    return [tuple(group) for group in found.values()]
