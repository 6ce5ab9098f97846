"""What each process of the benchmark does for one pair of layouts: real shards, real parameters, every engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flowrl.config.memory import BUCKET_BYTES
from flowrl.resharding.baselines import BucketedGather, GatherAll, PerTensorGather, Trained, parameter_forms
from flowrl.resharding.clock import Clock
from flowrl.resharding.families import hf_tensors, padded_vocab_size
from flowrl.resharding.layouts import Layouts, common_places, rollout_places, train_places
from flowrl.resharding.measure.device import copy_gb_per_second, own_device
from flowrl.resharding.measure.job import Job
from flowrl.resharding.measure.options import FLOWRL
from flowrl.resharding.measure.rounds import (
    Engine,
    Mover,
    as_json,
    gather,
    give_back,
    make_row,
    observe,
    slowest,
    time_fingerprint,
    time_moves,
)
from flowrl.resharding.measure.truth import IndexCoded, Truth, differs, fill
from flowrl.resharding.ranks import ParallelSizes, RankPlace, TrainPlace, grid
from flowrl.resharding.recorder import Recording, place_of, record
from flowrl.resharding.regions import DTYPE_BYTES, bound_bytes
from flowrl.resharding.transfer import Transfer
from flowrl.workers import bare
from flowrl.workers.hf_weights import HFFolder
from flowrl.workers.refit import MegatronRefit
from flowrl.workers.vllm_private_shard import ShardSpec, build_shard
from flowrl.workers.weights import HeldRegion


class _Folder:
    """The truth of a Hugging Face folder."""

    def __init__(self, path: str) -> None:
        self._folder = HFFolder(path)

    def values(self, name: str, box: Any, dtype: torch.dtype) -> torch.Tensor:
        return self._folder.read(name, box).to(dtype)


def consecutive(world: int, train: ParallelSizes, rollout: ParallelSizes) -> tuple[RankPlace, ...]:
    """Both sides by themselves: Megatron-core's order and vLLM's."""
    return Layouts.join(train, train_places(world, train), rollout, rollout_places(world, rollout)).places


@dataclass(frozen=True)
class _Side:
    """One numbering of the ranks: what this rank's trainer holds, and its part of the vLLM model."""

    places: Sequence[RankPlace]
    trainer: bare.BareModel
    shard: torch.nn.Module
    parameters: Mapping[str, torch.Tensor]
    recording: Recording
    held: Sequence[HeldRegion]
    bound_bytes: int


class _Flowrl:
    """flowrl's own engine behind the benchmark's interface."""

    def __init__(self, transfer: Transfer, trainer: bare.BareModel, device: torch.device) -> None:
        self._transfer, self._trainer, self._device = transfer, trainer, device

    def move(self) -> dict[str, float]:
        """As the rollout role does it; there is no engine whose prefix cache would be reset."""
        clock = Clock(self._device)
        held = self._trainer.held_regions()
        clock.lap("pause")
        report = self._transfer.move(held)
        clock.lap("move")
        return {"pause": clock.read()["pause"], **report.stage_seconds, "resume": 0.0}

    def fingerprint(self) -> bool:
        """Whether the checksums agree; all ranks learn the same."""
        try:
            self._transfer.verify(self._trainer.held_regions())
        except ValueError:
            return False
        return True


def flowrl_engine(job: Job, side: _Side) -> _Flowrl:
    """flowrl's engine for one numbering. Collective."""
    layouts = Layouts(job.train, job.rollout, tuple(side.places))
    transfer = Transfer(side.recording, side.parameters, job.shape, layouts, side.held)
    return _Flowrl(transfer, side.trainer, side.held[0].tensor.device)


class _Bench:
    """Everything that one process holds during the measurement."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank = job, dist.get_rank()
        self.device = own_device(job.device)
        self.dtype = getattr(torch, job.dtype)
        self.tensors = hf_tensors(job.shape)
        self.truth: Truth = IndexCoded(self.tensors) if job.coded else _Folder(job.folder)
        self.nested = self._side(common_places(job.shape, job.world, job.train, job.rollout), None)
        self.arena = bare.Arena(self._arena_elements(), self.dtype, self.device)
        self.arena.hold(self.nested.shard.parameters())
        self.sides = [self.nested]
        start = time.perf_counter()
        self.own = flowrl_engine(job, self.nested)
        self.own_plan_seconds = time.perf_counter() - start

    def _arena_elements(self) -> int:
        """Enough for any rank's part of any model that takes turns in it."""
        largest: int = max(gather(bare.num_elements(self.nested.shard)))
        if "megatron_refit" in self.job.engines:
            shape, stages = self.job.shape, parameter_forms(self.job.shape, self.job.rollout)
            # A tied head has a copy of its own on the last stage.
            second = padded_vocab_size(shape.vocab_size, self.job.rollout.tp) * shape.hidden_size if shape.tied else 0
            largest = max(largest, second + max(sum(form.numel for form in stage) for stage in stages))
        return largest

    def _side(self, places: Sequence[RankPlace], other: _Side | None) -> _Side:
        """This rank under a numbering; the trainer of another one serves again where it trains in the same places."""
        job = self.job
        if other is not None and [place.train for place in other.places] == [place.train for place in places]:
            trainer = other.trainer
        else:
            trainer = bare.build_bare(job.shape, job.train, places, dtype=job.dtype, device=self.device)
            self._write(trainer)
        at = places[self.rank].rollout
        assert at is not None, "every rank generates"
        spec = ShardSpec(
            job.folder, job.dtype, job.rollout.tp, at.tp, job.rollout.pp, at.pp, expert_parallel=job.rollout.ep > 1
        )
        shard = build_shard(spec, self.device)
        parameters = dict(shard.named_parameters())
        recording = record(shard.load_weights, parameters, self.tensors)  # type: ignore[arg-type]
        held = trainer.held_regions()
        boxes: dict[str, list[Any]] = {}
        for region in held:
            boxes.setdefault(region.name, []).append(region.box)
        bound = bound_bytes(recording.needed, boxes, DTYPE_BYTES[job.dtype])
        return _Side(places, trainer, shard, parameters, recording, held, bound)

    @torch.no_grad()
    def _write(self, model: bare.BareModel) -> None:
        for parameter in model.parameters.values():
            parameter.zero_()
        for region in model.held_regions():
            fill(region.tensor, self.truth, region.name, region.box)

    def poison(self) -> None:
        self.arena.memory.fill_(float("nan"))

    def engine(self, name: str) -> Engine:
        """An engine by name. Collective."""
        if name == "megatron_refit":
            return self._refit()
        if name == FLOWRL:
            return self._onto(self.nested, name, self.own, self.own_plan_seconds, self.own.fingerprint)
        start = time.perf_counter()
        if name == "vanilla_grouping":
            side = self._side(consecutive(self.job.world, self.job.train, self.job.rollout), self.nested)
            self.arena.hold(side.shard.parameters())
            self.sides.append(side)
            start = time.perf_counter()
            other = flowrl_engine(self.job, side)
            return self._onto(side, name, other, time.perf_counter() - start, other.fingerprint)
        mover = self._gatherer(name)
        return self._onto(self.nested, name, mover, time.perf_counter() - start, None)

    def _onto(
        self, side: _Side, name: str, mover: Mover, plan_seconds: float, fingerprint: Callable[[], bool] | None
    ) -> Engine:
        """An engine that writes the vLLM parameters of `side`; its bound is that of flowrl's own numbering."""

        def right() -> bool:
            return not any(
                differs(place_of(region, side.parameters[region.parameter]), self.truth, region.tensor, region.box)
                for region in side.recording.regions
            )

        places = [place_of(region, side.parameters[region.parameter]) for region in side.recording.regions]
        installed = sum(place.nbytes for place in places)
        return Engine(name, mover, plan_seconds, self.poison, right, fingerprint, self.nested.bound_bytes, installed)

    def _gatherer(self, name: str) -> Mover:
        trained, load = self._trained(), self.nested.shard.load_weights
        bucket_bytes = BUCKET_BYTES[self.device.type]
        if name == "per_tensor_gather":
            return PerTensorGather(trained, load)  # type: ignore[arg-type]
        if name == "bucketed_gather":
            return BucketedGather(trained, load, bucket_bytes)  # type: ignore[arg-type]
        return GatherAll(trained, load, bucket_bytes)  # type: ignore[arg-type]

    def _trained(self) -> Trained:
        side = self.nested
        places = tuple(place.train for place in side.places if place.train is not None)
        return Trained(
            places=places,
            sizes=self.job.train,
            stages=parameter_forms(self.job.shape, self.job.train),
            local={name: parameter.data for name, parameter in side.trainer.parameters.items()},
            pp_group=side.trainer.groups.pp,
            tp_group=side.trainer.groups.tp,
            expert_group=side.trainer.groups.tp_ep,
        )

    def _refit(self) -> Engine:
        """Megatron-core's move to a model whose training layout is the generation layout, on the same ranks."""
        job, places = self.job, []
        for place in self.nested.places:
            at = place.rollout
            assert at is not None
            there = TrainPlace(
                tp=at.tp, cp=0, dp=at.replica, pp=at.pp, etp=0, ep=0, edp=at.replica * job.rollout.tp + at.tp
            )
            places.append(RankPlace(place.rank, there, None))
        assert grid(places, "train").size == job.world
        target = bare.build_bare(job.shape, job.rollout, places, dtype=job.dtype, device=self.device)
        self.arena.hold(target.model.parameters())
        start = time.perf_counter()
        mover = MegatronRefit(self.nested.trainer.model, target.model, self.device)
        mover.plan()
        seconds = time.perf_counter() - start
        held = target.held_regions()

        def right() -> bool:
            return not any(differs(region.tensor, self.truth, region.name, region.box) for region in held)

        installed = sum(region.tensor.nbytes for region in held)
        return Engine("megatron_refit", mover, seconds, self.poison, right, None, self.nested.bound_bytes, installed)

    def existing(self) -> list[torch.Tensor]:
        """Tensors that are there before a move."""
        return [self.arena.memory] + [p.data for side in self.sides for p in side.trainer.parameters.values()]


def _say(line: str) -> None:
    """Progress, from one rank."""
    if dist.get_rank() == 0:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def run_job(job: Job) -> list[tuple[dict[str, Any], list[float]]]:
    """On rank 0 a (row, seconds of the slowest rank by round) per engine; elsewhere nothing. Collective."""
    bench = _Bench(job)
    engines = [bench.engine(name) for name in job.engines]
    give_back()
    seen = {}
    for engine in engines:
        start = time.perf_counter()
        seen[engine.name] = gather(observe(engine, bench.existing()))
        _say(f"{engine.name} to {job.rollout_text}: metered and checked in {time.perf_counter() - start:.1f} s")
    timed = time_moves(engines, job.repeat, bench.device)
    copying = copy_gb_per_second(bench.device)
    labels = dict(model=job.model, world=job.world, train=job.train_text, rollout=job.rollout_text)
    rows = []
    for engine in engines:
        seconds, stages = slowest(gather(timed[engine.name]))
        proofs = [taken for taken in gather(time_fingerprint(engine, bench.device)) if taken is not None]
        row = make_row(
            engine.name,
            labels,
            seen[engine.name],
            seconds,
            stages,
            fingerprint_seconds=max(proofs, default=None),
            copy_gb_per_second=copying,
        )
        rows.append((as_json(row), seconds))
    return rows if bench.rank == 0 else []
