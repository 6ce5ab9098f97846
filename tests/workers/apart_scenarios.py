"""What the processes of two pools do in the tests of moves between pools: exact moves, a death, an absence."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rollout_scenarios import Setup, rollout
from scenarios import Cell, actor

from flowrl.resharding import transfer as transfer_module
from flowrl.resharding.recorder import place_of
from flowrl.resharding.transfer import MoveReport, Transfer
from flowrl.resharding.world import World, join_world
from flowrl.single_controller import Link
from flowrl.single_controller.link import connect_store, open_store
from flowrl.workers.rollout import RolloutWorker

Pair = tuple[Path, Cell, Setup]


def make_link(meeting: str, sizes: tuple[int, int], *, trains: bool, seconds: float = 60) -> Link:
    """The link of two pools whose trainers' rank 0 writes the port of its store to the file `meeting`."""
    rank, path = dist.get_rank(), Path(meeting)
    if trains and rank == 0:
        store = open_store("127.0.0.1", sum(sizes))
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    else:
        while not path.exists():
            time.sleep(0.02)
        store = connect_store("127.0.0.1", int(path.read_text()))
    pools = (("trainers", sizes[0]), ("engines", sizes[1]))
    return Link(pools, rank if trains else sizes[0] + rank, store, seconds)


def send(meeting: str, sizes: tuple[int, int], pairs: Sequence[Pair], bucket_bytes: int) -> list[MoveReport]:
    """The report of a trainer's rank, by pair."""
    transfer_module.BUCKET_BYTES["cpu"] = bucket_bytes
    reports = []
    for number, (folder, cell, _) in enumerate(pairs):
        source = actor(folder, cell)
        source.send_weights(make_link(f"{meeting}{number}", sizes, trains=True))
        assert source._transfer is not None
        reports.append(source._transfer.move(source.held_regions()))
        _check(source._transfer, reports[-1], bucket_bytes)
        source.close()
    return reports


def receive(
    meeting: str, sizes: tuple[int, int], pairs: Sequence[Pair], bucket_bytes: int
) -> list[tuple[list[str], dict[str, float], MoveReport]]:
    """By pair: parameters of an engine's rank that differ from what vLLM's own loader made of the folder, the metrics of
    a proven move, and the report of another."""
    transfer_module.BUCKET_BYTES["cpu"] = bucket_bytes
    results = []
    for number, (folder, _, setup) in enumerate(pairs):
        role = rollout(folder, setup)
        loaded = {name: parameter.detach().clone() for name, parameter in role._parameters.items()}
        _poison(role)
        answer = role.receive_weights(make_link(f"{meeting}{number}", sizes, trains=False))
        _poison(role)
        assert role._transfer is not None
        report = role._transfer.move([])
        _check(role._transfer, report, bucket_bytes)
        wrong = [name for name, kept in loaded.items() if not kept.equal(role._parameters[name])]
        results.append((wrong, {name: metric.value for name, metric in answer.metrics.items()}, report))
        role.close()
    return results


def _poison(role: RolloutWorker) -> None:
    for region in role._recording.regions:
        place_of(region, role._parameters[region.parameter]).fill_(float("nan"))


def _check(transfer: Transfer, report: MoveReport, bucket_bytes: int) -> None:
    assert report.peak_extra_bytes <= transfer.plan.peak_extra(transfer.world.rank) <= 2 * bucket_bytes


def send_until_a_death(
    meeting: str, sizes: tuple[int, int], folder: Path, cell: Cell, setup: Setup, victim: int
) -> tuple[str, float]:
    """As `move_until_a_death`, of the trainers."""
    transfer_module.BUCKET_BYTES["cpu"] = 8192
    source, link = actor(folder, cell), make_link(meeting, sizes, trains=True)
    source.send_weights(link)
    assert source._transfer is not None
    return move_until_a_death(source._transfer, source.held_regions(), victim)


def receive_until_a_death(
    meeting: str, sizes: tuple[int, int], folder: Path, cell: Cell, setup: Setup, victim: int
) -> tuple[str, float]:
    """As `move_until_a_death`, of the engines."""
    transfer_module.BUCKET_BYTES["cpu"] = 8192
    role, link = rollout(folder, setup), make_link(meeting, sizes, trains=False)
    role.receive_weights(link)
    assert role._transfer is not None
    return move_until_a_death(role._transfer, [], victim)


def move_until_a_death(transfer: Transfer, held: Sequence[Any], victim: int) -> tuple[str, float]:
    """The error of a move in which rank `victim` of both pools dies inside a stage, and seconds until it came."""
    world = transfer.world
    if world.rank == victim:
        send, count = transfer._send, 0

        def die(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > 2:
                os._exit(1)
            return send(*arguments, **options)

        transfer._send = die  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        transfer.move(held)
        transfer.verify(held)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the move ended although a rank had died")


def join_late(meeting: str, sizes: tuple[int, int], seconds: float) -> tuple[str, float]:
    """The error of a rank whose pool's partner comes to the meeting and then to no group, and seconds until it came."""
    link = make_link(meeting, sizes, trains=True, seconds=seconds)
    start = time.monotonic()
    try:
        _join(link)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("the group was made without the other pool")


def stay_away(meeting: str, sizes: tuple[int, int], seconds: float) -> None:
    """The other pool: it lives and does not come."""
    time.sleep(seconds + 2)


def _join(link: Link) -> World:
    import torch

    return join_world(
        link.store, link.pools, link.rank, device=torch.device("cpu"), timeout_seconds=link.timeout_seconds
    )
