"""What the processes of the rollout tests do: engines of several layouts, alone and beside an actor."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from models import VOCAB
from scenarios import OPTIM, Cell, actor, call, place, sizes_of

from flowrl.config.model_shape import read_model_shape
from flowrl.config.schema import RolloutConfig, RolloutLayout
from flowrl.protocol import DataProto, Ragged
from flowrl.resharding.layouts import Layouts, common_places, rollout_sizes
from flowrl.resharding.recorder import place_of
from flowrl.resharding.transfer import MoveReport, Transfer
from flowrl.single_controller.dispatch import Mesh, neighbouring_rows
from flowrl.single_controller.worker import construct
from flowrl.workers import vllm_private
from flowrl.workers.actor import ActorWorker
from flowrl.workers.hf_weights import HFFolder
from flowrl.workers.rollout import RolloutWorker

Rows = dict[str, tuple[list[int], list[float], str, int]]
"""Row id -> (response ids, log-probs, finish reason, version of the weights)."""


@dataclass(frozen=True)
class Setup:
    """One engine layout and what the tests vary of an engine."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    stops: tuple[int, ...] = ()
    num_ids: int = VOCAB
    max_prompt_tokens: int = 48
    max_response_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    dtype: str = "float32"
    max_batch_requests: int = 8
    cuda_graphs: bool = False


def engine_config(setup: Setup) -> RolloutConfig:
    return RolloutConfig(
        layout=RolloutLayout(tp=setup.tp, pp=setup.pp),
        expert_parallel=setup.expert_parallel,
        dtype=setup.dtype,
        max_response_tokens=setup.max_response_tokens,
        temperature=setup.temperature,
        top_k=setup.top_k,
        max_batch_requests=setup.max_batch_requests,
        kv_cache_bytes=64 << 20,
        gpu_memory_fraction=0.1,
        cuda_graphs=setup.cuda_graphs,
    )


def rollout(folder: Path, setup: Setup, beside: Cell | None = None) -> RolloutWorker:
    """An engine, in an order of ranks that suits training in the layout `beside`."""
    return construct(
        RolloutWorker,
        place(),
        str(folder),
        read_model_shape(folder),
        engine_config(setup),
        num_tokenizer_ids=setup.num_ids,
        stop_token_ids=setup.stops,
        max_prompt_tokens=setup.max_prompt_tokens,
        seed=0,
        beside=None if beside is None else sizes_of(beside),
    )


def pair(actor_folder: Path, engine_folder: Path, cell: Cell, setup: Setup) -> tuple[ActorWorker, RolloutWorker]:
    """A trainer and an engine that know of each other."""
    source = actor(actor_folder, cell, beside=rollout_sizes(engine_config(setup)))
    return source, rollout(engine_folder, setup, cell)


def generate(role: RolloutWorker, batch: DataProto, *, greedy: bool = False) -> Rows:
    """Responses of all rows on every rank, each engine generating its share as the single controller cuts it."""
    positions: list[Any] = [None] * dist.get_world_size()
    mine = role.meshes()["generate"]
    dist.all_gather_object(positions, mine)
    mesh = Mesh.of("generate", positions)
    cut = neighbouring_rows(len(batch), mesh.num_slices)
    answer = role.generate(batch.rows(cut[mine.data_parallel_rank]), greedy=greedy)
    rows = zip(
        answer.row_ids,
        answer["response_ids"].rows(),
        answer["rollout_log_probs"].rows(),
        answer.values["finish_reason"],
        answer.values["weights_version"],
        strict=True,
    )
    found = {row: (ids.tolist(), logs.tolist(), reason, version) for row, ids, logs, reason, version in rows}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    for part, position in zip(everyone, positions, strict=True):
        agreed = everyone[mesh.answering_rank(position.data_parallel_rank)]
        assert {row: line[0] for row, line in part.items()} == {row: line[0] for row, line in agreed.items()}, (
            "ranks of one engine sampled different tokens"
        )
    return {row: line for part in everyone for row, line in part.items()}


def prompts(lengths: Sequence[int], *, num_ids: int = VOCAB) -> DataProto:
    """Prompts of these lengths with random ids, and a seed for each."""
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, num_ids, (length,), generator=generator) for length in lengths]
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=generator, dtype=torch.int64)
    return DataProto(
        {"prompt_ids": Ragged.from_rows(rows, torch.int64), "seeds": seeds},
        row_ids=[f"row{i}" for i in range(len(rows))],
    )


def with_engine(folder: Path, setup: Setup, use: Callable[[RolloutWorker], Any]) -> Any:
    role = rollout(folder, setup)
    try:
        return use(role)
    finally:
        role.close()


def sample(folder: Path, setups: Sequence[Setup], batch: DataProto) -> list[Rows]:
    """The responses of engine after engine in the same processes."""
    return [with_engine(folder, setup, lambda role: generate(role, batch)) for setup in setups]


def sample_in_other_orders(folder: Path, batch: DataProto) -> list[Rows]:
    """In order, reversed, and each row alone."""

    def use(role: RolloutWorker) -> list[Rows]:
        count = len(batch)
        alone: Rows = {}
        for row in range(count):
            alone |= generate(role, batch.rows([row]))
        backwards = batch.reorder(list(reversed(range(count))))
        return [generate(role, batch), generate(role, backwards), alone, generate(role, batch.rows([]))]

    return with_engine(folder, Setup(), use)  # type: ignore[no-any-return]


def random_state_around_an_engine(folder: Path) -> list[bool]:
    """Whether torch, numpy and random draw what they would have drawn without an engine."""
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    expected = torch.rand(1), numpy.random.rand(), random.random()
    torch.manual_seed(3), numpy.random.seed(3), random.seed(3)
    threads = torch.get_num_threads()
    with_engine(folder, Setup(), lambda role: None)
    torch.set_num_threads(threads)
    found = torch.rand(1), numpy.random.rand(), random.random()
    return [left == right for left, right in zip(expected, found, strict=True)]


def errors_of_bad_rows(folder: Path, bad: DataProto, good: DataProto) -> tuple[str, Rows]:
    """The message of an illegal batch, and what the engine answers to a legal one afterwards."""

    def use(role: RolloutWorker) -> tuple[str, Rows]:
        try:
            role.generate(bad)
        except ValueError as error:
            return str(error), generate(role, good)
        raise AssertionError("no error")

    return with_engine(folder, Setup(), use)  # type: ignore[no-any-return]


def wait_for_a_silent_peer(store: str, seconds: float) -> float:
    """Seconds that rank 0 waited in vLLM's tensor-parallel group for rank 1, which comes late."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    vllm_private.install_groups([[0, 1]], [[0], [1]], run_name="test", device=torch.device("cpu"))
    start = time.monotonic()
    if rank == 1:
        time.sleep(1.5 * seconds)
        return 0.0
    from vllm.distributed import parallel_state

    try:
        dist.all_reduce(torch.ones(1), group=parallel_state._TP.cpu_group)
    except RuntimeError:
        return time.monotonic() - start
    raise AssertionError("the collective ended without the peer")


def wrong_regions(role: RolloutWorker, folder: Path) -> list[str]:
    """Recorded regions whose elements in the engine are not, bit for bit, those of the folder in the engine's dtype."""
    tensors, wrong = HFFolder(folder), []
    for region in role._recording.regions:
        found = place_of(region, role._parameters[region.parameter]).cpu()
        if not torch.equal(found, tensors.read(region.tensor, region.box).to(found.dtype)):
            wrong.append(f"{region.tensor} {region.box}")
    return wrong


@dataclass(frozen=True)
class Moved:
    """What one transfer did on this rank."""

    wrong: list[str]
    metrics: dict[str, float]
    rows: Rows
    fresh_rows: Rows


def move(
    start: Path, target: Path, cells: Sequence[Cell], setups: Sequence[Setup], batch: DataProto
) -> dict[tuple[Cell, Setup], Moved]:
    """From actors that hold `target` into engines that started with `start` and have answered `batch` already."""
    results = {}
    sources: dict[Any, ActorWorker] = {}
    shape, world = read_model_shape(target), dist.get_world_size()
    for setup in setups:
        sizes = rollout_sizes(engine_config(setup))
        fresh = with_engine(target, setup, lambda role: generate(role, batch))
        by_order: dict[Any, list[tuple[Cell, Any]]] = {}
        for cell in cells:
            places = common_places(shape, world, sizes_of(cell), sizes)
            by_order.setdefault(tuple(at.rollout for at in places), []).append((cell, places))
        for same_engine in by_order.values():
            role = rollout(start, setup, same_engine[0][0])
            for cell, places in same_engine:
                key = cell, tuple(at.train for at in places)
                if key not in sources:
                    sources[key] = actor(target, cell, beside=sizes)
                results[cell, setup] = _moved(role, sources[key], target, batch, fresh)
            role.close()
    return results


def _moved(role: RolloutWorker, source: ActorWorker, target: Path, batch: DataProto, fresh: Rows) -> Moved:
    generate(role, batch)
    for parameter in role._parameters.values():
        parameter.data.fill_(float("nan"))
    metrics = {name: metric.value for name, metric in role.receive_weights(source).metrics.items()}
    assert role._transfer is not None
    assert role._transfer.plan.received == role._transfer.plan.bound
    return Moved(wrong_regions(role, target), metrics, generate(role, batch), fresh)


def move_in_small_buckets(
    start: Path, target: Path, cell: Cell, setup: Setup, bucket_bytes: int
) -> tuple[list[str], MoveReport]:
    """Wrong regions after a move in buckets of this size, and its report."""
    source, role = pair(target, start, cell, setup)
    held = source.held_regions()
    layouts = Layouts.join(source.sizes(), source.places(), role._sizes, role._places)
    transfer = Transfer(role._recording, role._parameters, role._shape, layouts, held, bucket_bytes=bucket_bytes)
    report = transfer.move(held)
    transfer.verify(held)
    wrong = wrong_regions(role, target)
    role.close()
    return wrong, report


def numbered_experts(start: Path, target: Path, cell: Cell, setup: Setup) -> dict[tuple[int, int], list[float]]:
    """Per layer and expert number of the folder, the values that this rank's engine holds of it after a move.

    `target` holds experts filled with their number."""
    source, role = pair(target, start, cell, setup)
    role.receive_weights(source)
    found: dict[tuple[int, int], list[float]] = {}
    for region in role._recording.regions:
        if match := re.match(r"model\.layers\.(\d+)\..*experts\.(\d+)\.", region.tensor):
            values = place_of(region, role._parameters[region.parameter]).unique().tolist()
            found.setdefault((int(match[1]), int(match[2])), []).extend(values)
    role.close()
    return found


def _state(role: RolloutWorker) -> dict[str, tuple[int, torch.Tensor]]:
    """Address and values of every parameter and buffer of the engine, aliases and non-persistent buffers among them."""
    model = role._engine.model
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in named}


def repeat_moves(folder: Path, cell: Cell, setup: Setup, batch: DataProto) -> tuple[list[Rows], list[float], list[str]]:
    """Responses after each of ten transfers of the same weights, the fingerprints' verdicts, and what of the engine has
    moved or changed in the end."""
    source, role = pair(folder, folder, cell, setup)
    before = _state(role)
    rows, verdicts = [generate(role, batch)], []
    for _ in range(10):
        verdicts.append(role.receive_weights(source).metrics["reshard/fingerprint_ok"].value)
        rows.append(generate(role, batch))
    after = _state(role)
    assert before.keys() == after.keys()
    changed = [
        name
        for name, (address, values) in after.items()
        if address != before[name][0] or not torch.equal(values, before[name][1])
    ]
    role.close()
    return rows, verdicts, changed


def corrupted(folder: Path, cell: Cell, setup: Setup, parameter: str) -> str:
    """The message of the proof after one bit of one engine parameter on the last rank has changed."""
    source, role = pair(folder, folder, cell, setup)
    role.receive_weights(source)
    transfer = role._transfer
    assert transfer is not None
    if dist.get_rank() == dist.get_world_size() - 1:
        role._parameters[parameter].data.view(torch.int32)[3, 2] ^= 1
    try:
        transfer.verify(source.held_regions())
    except ValueError as error:
        return str(error)
    finally:
        role.close()
    raise AssertionError("the proof did not notice")


@dataclass(frozen=True)
class _Region:
    name: str
    box: Any
    tensor: torch.Tensor


class _Altered:
    """An actor one of whose tensors has another name, or another dtype."""

    def __init__(self, source: Any, *, name: str | None = None, dtype: torch.dtype | None = None) -> None:
        self._source, self._name, self._dtype = source, name, dtype

    def hf_tensors(self) -> Any:
        first, *rest = self._source.hf_tensors()
        return [replace(first, name=self._name or first.name), *rest]

    def held_regions(self) -> Any:
        first, *rest = self._source.held_regions()
        tensor = first.tensor if self._dtype is None else first.tensor.to(self._dtype)
        return [_Region(first.name, first.box, tensor), *rest]

    def sizes(self) -> Any:
        return self._source.sizes()

    def places(self) -> Any:
        return self._source.places()


def refusals(folder: Path) -> list[str]:
    """Messages for an actor with a renamed tensor, and with one of float16, of int8 and of another legal dtype."""
    source, role = actor(folder, Cell()), rollout(folder, Setup())
    altered = [_Altered(source, name="model.embedding")]
    altered += [_Altered(source, dtype=dtype) for dtype in (torch.float16, torch.int8, torch.bfloat16)]
    messages = []
    for one in altered:
        try:
            role.receive_weights(one)
        except ValueError as error:
            messages.append(str(error))
    role.close()
    return messages


def _refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


def _sleep(role: RolloutWorker, source: ActorWorker, batch: DataProto, parts: Sequence[str]) -> list[str]:
    """Sleep, and wake `parts` before weights arrive; the messages of calls that come too early."""
    role.sleep()
    role.sleep()
    messages = [_refused(lambda: role.receive_weights(source)), _refused(lambda: generate(role, batch))]
    for part in parts:
        role.wake(what=part)
    messages.append(_refused(lambda: generate(role, batch)))
    return messages


def train_and_decode(
    folder: Path, out: Path, cell: Cell, setup: Setup, batch: DataProto, mini: DataProto
) -> list[tuple[Rows, Path, float, list[str]]]:
    """Three rounds: a large update, a transfer, a greedy decoding; with the trainer's weights written to folders.

    The engine stays awake in the first, is awake again in the second when weights arrive, and has no cache yet in the
    third. Messages are those of what it refuses on the way."""
    source = actor(folder, cell, optim=replace(OPTIM, lr=0.5), beside=rollout_sizes(engine_config(setup)))
    role = rollout(folder, setup, cell)
    rounds = []
    for number, parts in enumerate([(), ("all",), ("weights",)]):
        generate(role, batch)
        old = call(source, source.log_probs, mini)
        messages = _sleep(role, source, batch, parts) if parts else []
        call(source, source.update, mini.union(old))
        ok = role.receive_weights(source).metrics["reshard/fingerprint_ok"].value
        if parts == ("weights",):
            messages.append(_refused(lambda: generate(role, batch)))
            role.wake(what="kv_cache")
        written = out / f"round{number}"
        source.export(str(written))
        rounds.append((generate(role, batch, greedy=True), written, ok, messages))
    role.close()
    return rounds
