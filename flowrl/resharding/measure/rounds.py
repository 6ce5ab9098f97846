"""Running engines by turns and reducing what all ranks saw to one row per engine."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flowrl.resharding.measure.meter import Meter

WARM_UPS = 2
"""Moves before the timed ones; the first of them is the one that is metered."""


class Mover(Protocol):
    """One way of moving the weights, planned."""

    def move(self) -> dict[str, float]:
        """Seconds by stage on this rank. Collective."""
        ...


@dataclass(frozen=True)
class Engine:
    """`check` says on this rank whether what was written is bit for bit right; `fingerprint` runs the checksums of
    trainer and engine and says whether they agree, None for a way of moving that proves nothing."""

    name: str
    mover: Mover
    plan_seconds: float
    poison: Callable[[], None]
    check: Callable[[], bool]
    fingerprint: Callable[[], bool] | None
    bound_bytes: int
    installed_bytes: int


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one engine."""

    received_bytes: int
    bound_bytes: int
    peak_extra_bytes: int
    largest_temporary_bytes: int
    num_collectives: int
    num_copies: int
    installed_bytes: int
    plan_seconds: float
    bit_exact: bool
    fingerprint_ok: bool | None


@dataclass(frozen=True)
class Timed:
    """One timed move on one rank."""

    seconds: float
    stages: dict[str, float]


@dataclass(frozen=True)
class Row:
    """One layout and engine, as it is written to JSON. Bytes are per rank; `ratio_to_bound` is None (not a number)
    where something was received and nothing had to be. Seconds are the slowest rank's; stages are medians of it.

    `install_gb_per_second`: bytes of the generation shard, read and written, over the seconds of the whole move;
    `copy_gb_per_second`: what a large copy within the GPU's memory reaches in the same run, None on a CPU.
    """

    engine: str
    model: str
    world: int
    train: str
    rollout: str
    received_bytes_max: int
    received_bytes_mean: float
    bound_bytes_max: int
    ratio_to_bound: float | None
    node_import_ratio: float
    peak_extra_bytes_max: int
    largest_temporary_bytes: int
    num_collectives: int
    num_copies: int
    plan_seconds: float
    seconds_median: float
    seconds_p95: float
    stage_seconds: dict[str, float]
    gb_per_second: float
    bit_exact: bool
    fingerprint_ok: bool | None
    fingerprint_seconds: float | None
    installed_bytes_max: int
    install_gb_per_second: float
    copy_gb_per_second: float | None


def observe(engine: Engine, existing: Iterable[torch.Tensor]) -> Seen:
    """One metered move onto poisoned memory, checked. Collective."""
    engine.poison()
    give_back()
    dist.barrier()
    with Meter(existing) as meter:
        engine.mover.move()
    return Seen(
        received_bytes=meter.received,
        bound_bytes=engine.bound_bytes,
        peak_extra_bytes=meter.peak_bytes,
        largest_temporary_bytes=meter.largest_bytes,
        num_collectives=meter.num_collectives,
        num_copies=meter.num_copies,
        installed_bytes=engine.installed_bytes,
        plan_seconds=engine.plan_seconds,
        bit_exact=engine.check(),
        fingerprint_ok=None if engine.fingerprint is None else engine.fingerprint(),
    )


def time_moves(engines: Sequence[Engine], repeat: int, device: torch.device) -> dict[str, list[Timed]]:
    """Timed moves of every engine, by turns, so that whatever else the machine does meets all of them. Collective."""
    timed: dict[str, list[Timed]] = {engine.name: [] for engine in engines}
    for number in range(WARM_UPS - 1 + repeat):
        for engine in engines:
            _settle(device)
            start = time.perf_counter()
            stages = engine.mover.move()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= WARM_UPS - 1:
                timed[engine.name].append(Timed(time.perf_counter() - start, stages))
    return timed


def time_fingerprint(engine: Engine, device: torch.device) -> float | None:
    """Seconds of one more proof, warm; None for an engine without. Collective."""
    if engine.fingerprint is None:
        return None
    _settle(device)
    start = time.perf_counter()
    engine.fingerprint()
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    give_back()
    dist.barrier()


def give_back() -> None:
    """Return free memory of the C library's heap to the system: ranks of one host share what one engine has used.

    What is alive is not looked through by later calls: with vLLM imported that takes half a second each.
    """
    gc.collect()
    gc.freeze()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        # Only glibc has it; others return memory by themselves.
        return


def gather(value: Any) -> list[Any]:
    """The value of every rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def p95(values: Sequence[float]) -> float:
    """The smallest value that at least 95 % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[-(-len(ordered) * 95 // 100) - 1]


def slowest(timed: Sequence[Sequence[Timed]]) -> tuple[list[float], dict[str, float]]:
    """(seconds of the slowest rank in every round, median over rounds of the slowest rank's seconds by stage).

    `timed[r]` are the rounds of rank r.
    """
    rounds = list(zip(*timed, strict=True))
    seconds = [max(move.seconds for move in moves) for moves in rounds]
    names = list(dict.fromkeys(name for moves in rounds for move in moves for name in move.stages))
    last = [max(moves, key=lambda move: move.seconds) for moves in rounds]
    return seconds, {name: statistics.median(move.stages.get(name, 0.0) for move in last) for name in names}


def make_row(
    engine: str,
    labels: Mapping[str, Any],
    seen: Sequence[Seen],
    seconds: Sequence[float],
    stages: dict[str, float],
    *,
    fingerprint_seconds: float | None = None,
    copy_gb_per_second: float | None = None,
) -> Row:
    """One row from what all ranks saw. `labels`: model, world, train, rollout."""
    received = [part.received_bytes for part in seen]
    bound = max(part.bound_bytes for part in seen)
    median = statistics.median(seconds)
    installed = max(part.installed_bytes for part in seen)
    fingerprints = [part.fingerprint_ok for part in seen if part.fingerprint_ok is not None]
    return Row(
        engine=engine,
        **labels,
        received_bytes_max=max(received),
        received_bytes_mean=sum(received) / len(received),
        bound_bytes_max=bound,
        ratio_to_bound=_ratio(seen),
        # All ranks are on one host: nothing enters it.
        node_import_ratio=1.0,
        peak_extra_bytes_max=max(part.peak_extra_bytes for part in seen),
        largest_temporary_bytes=max(part.largest_temporary_bytes for part in seen),
        num_collectives=max(part.num_collectives for part in seen),
        num_copies=max(part.num_copies for part in seen),
        plan_seconds=max(part.plan_seconds for part in seen),
        seconds_median=median,
        seconds_p95=p95(seconds),
        stage_seconds=stages,
        gb_per_second=max(received) / median / 1e9,
        bit_exact=all(part.bit_exact for part in seen),
        fingerprint_ok=all(fingerprints) if fingerprints else None,
        fingerprint_seconds=fingerprint_seconds,
        installed_bytes_max=installed,
        install_gb_per_second=2 * installed / median / 1e9,
        copy_gb_per_second=copy_gb_per_second,
    )


def _ratio(seen: Sequence[Seen]) -> float | None:
    """The largest ratio of any rank: 1 where both are 0, None where only the bound is."""
    ratios = [1.0]
    for part in seen:
        if part.received_bytes != part.bound_bytes and not part.bound_bytes:
            return None
        if part.bound_bytes:
            ratios.append(part.received_bytes / part.bound_bytes)
    return max(ratios) if len(ratios) == 1 else max(ratios[1:])


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)
