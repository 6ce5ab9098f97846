"""What a plan costs: bytes, ratios, memory and time, for one row of a table and for JSON."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.plan.move import MovePlan, Stage, plan_move
from flowrl.resharding.plan.options import Layout, Options
from flowrl.resharding.plan.orders import OrderChoice, choose_order
from flowrl.resharding.plan.units import bits
from flowrl.resharding.ranks import disaggregated, numbering


@dataclass(frozen=True)
class Row:
    """One generation layout. Bytes are per rank, over the ranks that generate; seconds are estimates but `plan_seconds`.

    `ratio_to_bound` is the largest of any rank. `floor_seconds`: the bound at full speed; `predicted_seconds`: every
    stage at the speed of its busiest rank. `plan_seconds`: what one rank computes, its own schedule included.
    """

    engine: str
    model: str
    world: int
    train: str
    rollout: str
    received_bytes_max: int
    received_bytes_mean: float
    bound_bytes_max: int
    bound_bytes_mean: float
    ratio_to_bound: float
    node_import_ratio: float
    peak_extra_bytes_max: int
    largest_temporary_bytes: int
    num_collectives: int
    num_copies: int
    plan_seconds: float
    floor_seconds: float
    predicted_seconds: float
    full_gather_bytes_mean: float
    stage_bytes: dict[str, dict[str, Any]]
    order: dict[str, Any]


def plan_row(shape: ModelShape, options: Options, rollout: Layout) -> Row:
    """Plans one layout. Errors: `ValueError` as `plan_move` and `choose_order`."""
    train, sizes = options.train.sizes, rollout.sizes
    common: dict[str, int] = dict(element_bytes=options.element_bytes, gpus_per_node=options.gpus_per_node)
    start = time.perf_counter()
    choice = None
    if options.rollout_world is not None:
        places = disaggregated(options.world, options.rollout_world, train, sizes)
    else:
        choice = choose_order(shape, options.world, train, sizes, **common)
        places = numbering(options.world, train, sizes, choice.chosen.order)
    plan = plan_move(shape, train, sizes, places, bucket_bytes=options.bucket_bytes, **common)
    busiest = max(range(plan.world), key=plan.received.__getitem__)
    schedule = plan.schedule(busiest)
    seconds = time.perf_counter() - start
    copies = sum(len(parcel.pieces) for bucket in schedule.buckets for parcel in bucket.receives)
    generating = [place.rank for place in places if place.rollout is not None]
    received = [plan.received[rank] for rank in generating]
    bound = [plan.bound[rank] for rank in generating]
    import_bound = sum(plan.import_bound)
    return Row(
        engine="flowrl",
        model=options.model,
        world=plan.world,
        train=options.train.text,
        rollout=rollout.text,
        received_bytes_max=max(received),
        received_bytes_mean=sum(received) / len(received),
        bound_bytes_max=max(bound),
        bound_bytes_mean=sum(bound) / len(bound),
        ratio_to_bound=max(_ratio(got, least) for got, least in zip(received, bound, strict=True)),
        node_import_ratio=_ratio(plan.imported, import_bound),
        peak_extra_bytes_max=max(plan.peak_extra(rank) for rank in range(plan.world)),
        largest_temporary_bytes=max((max(stage.largest_bucket) for stage in plan.stages), default=0),
        num_collectives=max(plan.num_buckets(rank) for rank in range(plan.world)),
        num_copies=copies + len(schedule.local),
        plan_seconds=seconds,
        floor_seconds=floor_seconds(plan, options),
        predicted_seconds=sum(stage_seconds(stage, options) for stage in plan.stages),
        full_gather_bytes_mean=_full_gather(plan, generating),
        stage_bytes={stage.name: _stage_figures(stage, generating) for stage in plan.stages},
        order=_order(choice, plan.world),
    )


def _ratio(got: int, least: int) -> float:
    if got == least:
        return 1.0
    return got / least if least else float("inf")


def _full_gather(plan: MovePlan, ranks: list[int]) -> float:
    """Bytes that a rank receives, in the mean, when every rank gathers every tensor."""
    model = sum(unit.elements for unit in plan.units)
    held = [0] * plan.world
    for unit in plan.units:
        for rank in bits(unit.holders):
            held[rank] += unit.elements
    return plan.element_bytes * sum(model - held[rank] for rank in ranks) / len(ranks)


def _stage_figures(stage: Stage, ranks: list[int]) -> dict[str, Any]:
    received = [stage.received[rank] for rank in ranks]
    return {
        "received_bytes_max": max(received),
        "received_bytes_mean": sum(received) / len(received),
        "sent_bytes_max": max(stage.sent),
        "form": " + ".join(stage.forms),
        "group_ranks_max": max(len(group.ranks) for group in stage.groups),
        "num_buckets_max": max(group.num_buckets for group in stage.groups),
    }


def _order(choice: OrderChoice | None, world: int) -> dict[str, Any]:
    """Mean bytes per rank under the best order for everything but experts, the best for experts and the chosen one."""
    if choice is None:
        return {}
    named = {"dense": choice.dense, "expert": choice.expert, "chosen": choice.chosen}
    return {
        name: {
            **asdict(found.order),
            "dense_bytes_mean": found.dense_bytes / world,
            "expert_bytes_mean": found.expert_bytes / world,
        }
        for name, found in named.items()
    }


def floor_seconds(plan: MovePlan, options: Options) -> float:
    """No plan is faster: the busiest rank's bound over its link, the busiest node's over all its network cards."""
    node = options.gpus_per_node
    sizes = [min(node, plan.world - first) for first in range(0, plan.world, node)]
    network = max(bound / size for bound, size in zip(plan.import_bound, sizes, strict=True))
    return max(max(plan.bound) / options.link_gb_s, network / options.nic_gb_s) / 1e9


def stage_seconds(stage: Stage, options: Options) -> float:
    """The busiest rank of a stage; links and network work at the same time, latency counts nothing."""
    slowest = 0.0
    traffic = zip(stage.received, stage.sent, stage.received_network, stage.sent_network, strict=True)
    for received, sent, received_network, sent_network in traffic:
        inside = max(received - received_network, sent - sent_network) / options.link_gb_s
        slowest = max(slowest, inside, max(received_network, sent_network) / options.nic_gb_s)
    return slowest / 1e9
