"""Moves planned before any of them runs: layers that fit, bytes by pair of devices, and seconds at a link's rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowrl.resharding.measure.options import parse_options
from flowrl.resharding.plan import choose_order, plan_move
from flowrl.resharding.plan.move import MovePlan
from flowrl.resharding.ranks import numbering
from flowrl.resharding.shapes import planned_shape
from recipes.multi_gpu.cases import MOVES, Move, move_bytes, move_layers, move_words

LINK_GB_S = 338.0
"""The most that two H200 of one host were seen to receive, each from the other at once."""
MEMORY_BYTES = 150_000_000_000
"""Of one H200."""


def planned_move(
    model: str, move: Move, devices: int, memory_bytes: int, link_gb_s: float, most_layers: int
) -> dict[str, Any]:
    """A row: bytes that must move, by pair, and the seconds of the busiest device at the link's rate, stage by stage.

    Errors: `ValueError` as `move_layers` and the planner.
    """
    whole = planned_shape(model)
    options = parse_options(move_words(model, move, devices, whole.num_layers))
    layers = min(most_layers, move_layers(whole, options, memory_bytes))
    shape = replace(whole, num_layers=layers)
    train, rollout = options.train.sizes, options.rollouts[0].sizes
    order = choose_order(shape, devices, train, rollout).chosen.order
    plan = plan_move(shape, train, rollout, numbering(devices, train, rollout, order))
    busiest = [max(max(stage.received), max(stage.sent)) for stage in plan.stages]
    return {
        "name": move.name,
        "devices": devices,
        "model": model,
        "layers": layers,
        "layers_of_model": whole.num_layers,
        "against": move.against,
        "train": move.train,
        "rollout": move.rollout,
        "device_bytes": move_bytes(shape, options),
        "received_bytes_max": max(plan.received),
        "bound_bytes_max": max(plan.bound),
        "pair_bytes": pair_bytes(plan),
        "seconds": sum(busiest) / link_gb_s / 1e9,
    }


def pair_bytes(plan: MovePlan) -> dict[str, int]:
    """Bytes from one rank to another over all stages, as `source>target`; pairs without any are left out."""
    found: dict[str, int] = {}
    for stage in plan.stages:
        for number, source, target in stage.shipments:
            pair = f"{source}>{target}"
            found[pair] = found.get(pair, 0) + plan.units[number].elements * plan.element_bytes
    return dict(sorted(found.items()))


def predicted(
    devices: tuple[int, ...], models: Mapping[str, str], memory_bytes: int, link_gb_s: float, most_layers: int = 1 << 30
) -> dict[str, Any]:
    """All moves on so many devices; `models` by family. Errors: as `planned_move`."""
    rows = [
        planned_move(models[move.family], move, number, memory_bytes, link_gb_s, most_layers)
        for number in devices
        for move in MOVES[number]
    ]
    return {"memory_bytes": memory_bytes, "link_gb_s": link_gb_s, "rows": rows}
