"""What the processes of the worker tests do: roles over several layouts in one process group."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import VOCAB

from flowrl.algorithms.losses import TokenOutputs
from flowrl.config.model_shape import read_model_shape
from flowrl.config.schema import (
    KL,
    ActorConfig,
    CriticConfig,
    LossKL,
    NoKL,
    OptimConfig,
    ReferenceConfig,
    TrainLayout,
)
from flowrl.protocol import DataProto, Ragged, merge_metrics
from flowrl.resharding.families import EMBEDDING
from flowrl.resharding.fingerprint import checksum
from flowrl.resharding.layouts import train_sizes
from flowrl.resharding.ranks import ParallelSizes
from flowrl.single_controller.dispatch import neighbouring_rows
from flowrl.single_controller.worker import Place, construct
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker
from flowrl.workers.engine import Engine
from flowrl.workers.export import export_folder
from flowrl.workers.reference import ReferenceWorker
from flowrl.workers.vocabulary import token_outputs
from flowrl.workers.weights import ModelWeights


@dataclass(frozen=True)
class Cell:
    """One layout and one way of running the same mini-batch; `beside`: engines of these sizes order the ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    first_stage_layers: int | None = None
    vpp: int = 1
    budget: int = 4096
    order: tuple[int, ...] | None = None
    dtype: str = "float32"
    distributed_optimizer: bool = False
    recompute: bool = False
    beside: ParallelSizes | None = None


NO_KL = NoKL()
OPTIM = OptimConfig(lr=1e-2, eps=1e-5, clip_grad=1.0)


def layout_of(cell: Cell) -> TrainLayout:
    return TrainLayout(
        tp=cell.tp, pp=cell.pp, vpp=cell.vpp, first_stage_layers=cell.first_stage_layers, cp=1, ep=cell.ep, etp=cell.etp
    )


def engine_settings(cell: Cell) -> dict[str, Any]:
    return dict(
        layout=layout_of(cell),
        dtype=cell.dtype,
        tokens_per_microbatch=cell.budget,
        distributed_optimizer=cell.distributed_optimizer,
        recompute=cell.recompute,
    )


def sizes_of(cell: Cell) -> ParallelSizes:
    return train_sizes(layout_of(cell))


def place() -> Place:
    device = torch.device(os.environ.get("FLOWRL_TEST_DEVICE", "cpu"))
    return Place(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)


def actor(
    folder: Path,
    cell: Cell,
    *,
    kl: KL = NO_KL,
    temperature: float = 1.0,
    num_ids: int = VOCAB,
    total_steps: int = 8,
    beside: ParallelSizes | None = None,
    **config: Any,
) -> ActorWorker:
    settings = ActorConfig(**{"optim": OPTIM, **engine_settings(cell), **config})
    return construct(
        ActorWorker,
        place(),
        str(folder),
        read_model_shape(folder),
        settings,
        kl=kl,
        temperature=temperature,
        num_tokenizer_ids=num_ids,
        total_optimizer_steps=total_steps,
        seed=0,
        beside=beside or cell.beside,
    )


def critic(folder: Path, cell: Cell, **config: Any) -> CriticWorker:
    settings = CriticConfig(
        **{
            "optim": OPTIM,
            "aggregation": "token-mean",
            "minibatch_prompts": 1,
            "epochs": 1,
            **engine_settings(cell),
            **config,
        }
    )
    return construct(
        CriticWorker, place(), str(folder), read_model_shape(folder), settings, total_optimizer_steps=8, seed=0
    )


def reference(folder: Path, cell: Cell, temperature: float = 1.0) -> ReferenceWorker:
    return construct(
        ReferenceWorker,
        place(),
        str(folder),
        read_model_shape(folder),
        ReferenceConfig(**engine_settings(cell)),
        temperature=temperature,
        num_tokenizer_ids=VOCAB,
        seed=0,
    )


Role = ActorWorker | CriticWorker | ReferenceWorker


def slices(role: Role, batch: DataProto) -> list[list[int]]:
    """Rows of each replica, as the single controller would cut them."""
    return neighbouring_rows(len(batch), role._engine.dp_size)


def call(role: Role, method: Callable[..., DataProto], batch: DataProto, *args: Any) -> DataProto:
    """Run the method on this rank's slice; every rank gets the joined result in input order."""
    cut = slices(role, batch)
    mine = batch.rows(cut[role._engine.position.data_parallel_rank])
    answer = method(mine, *args)
    found: list[Any] = [None] * dist.get_world_size()
    answers = role._engine.position.answers
    dist.all_gather_object(found, (role._engine.position.data_parallel_rank, answer) if answers else None)
    by_slice = dict(item for item in found if item is not None)
    parts = [by_slice[i] for i in range(len(cut))]
    joined = DataProto.concat([part for part in parts if len(part)] or parts[:1])
    return DataProto(
        dict(joined.columns), row_ids=joined.row_ids, metrics=merge_metrics(part.metrics for part in parts)
    )


def figures(batch: DataProto) -> dict[str, float]:
    return {name: metric.value for name, metric in batch.metrics.items()}


def whole_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """All tensors by Hugging Face name, on every rank."""
    return {
        name: tensor.clone() for bucket in engine.weights.gather(engine.hf_tensors, 20_000) for name, tensor in bucket
    }


def check_replicas(engine: Engine) -> None:
    """PAR-10: what several ranks, or one rank twice, hold of a tensor has the same bits everywhere."""
    shapes = {tensor.name: tensor.shape for tensor in engine.hf_tensors}
    mine = [
        ((held.name, held.box), int(checksum(held.tensor, held.box, shapes[held.name], held.tensor.dtype)))
        for held in engine.weights.held_regions()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first: dict[Any, int] = {}
    for rank, there in enumerate(everyone):
        for key, value in there:
            assert first.setdefault(key, value) == value, f"rank {rank} differs in {key}"


def whole_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Reduced gradients by Hugging Face name, on every rank; not with the distributed optimizer."""
    gradients = {name: parameter.main_grad for name, parameter in engine.weights._parameters.items()}
    table = ModelWeights(
        engine._shape,
        engine._config.layout,
        engine.places,
        gradients,  # type: ignore[arg-type]
        head=engine._head.is_language_model,
    )
    return {name: tensor.clone() for bucket in table.gather(engine.hf_tensors, 1 << 20) for name, tensor in bucket}


def local_state(engine: Engine) -> list[torch.Tensor]:
    """Copies of this rank's parameters and optimizer moments."""
    tensors = [p.detach().clone() for chunk in engine._chunks for p in chunk.parameters()]
    optimizer = engine._optimizer
    assert optimizer is not None
    for part in optimizer._optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            tensors += [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors


def buffers(folder: Path, cells: Sequence[Cell], batch: DataProto) -> list[tuple[int, int, bool]]:
    """Per cell: pieces of memory that an actor's and a frozen model's parameters lie in, and whether an update left the
    actor's where they were."""
    results = []
    for cell in cells:
        role, frozen = actor(folder, cell), reference(folder, cell)
        before = [parameter.data_ptr() for parameter in role._engine._parameters.values()]
        call(role, role.update, batch)
        after = [parameter.data_ptr() for parameter in role._engine._parameters.values()]
        counts = (
            len({parameter.untyped_storage().data_ptr() for parameter in there._engine._parameters.values()})
            for there in (role, frozen)
        )
        results.append((*counts, before == after))
    return results


def log_probs_cells(
    folder: Path, cells: Sequence[Cell], batch: DataProto, temperature: float
) -> list[list[torch.Tensor]]:
    """Per cell: [log-probs, entropy] of all response tokens in input order."""
    results = []
    for cell in cells:
        role = actor(folder, cell, temperature=temperature)
        out = call(role, role.log_probs, batch)
        assert out.row_ids == batch.row_ids
        results.append([out["old_log_probs"].values, out["entropy"].values])
    return results


def update_cells(folder: Path, cells: Sequence[Cell], batch: DataProto, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Per cell: metrics of one update, gradients (before clipping) and weights after it."""
    results = []
    for cell in cells:
        clip = replace(config.get("optim", OPTIM), clip_grad=0.0)
        rows = batch.rows(list(cell.order)) if cell.order else batch
        probe = actor(folder, cell, **{**config, "optim": clip})
        call(probe, probe.update, rows)
        gradients = {} if cell.distributed_optimizer else whole_gradients(probe._engine)
        role = actor(folder, cell, **config)
        metrics = figures(call(role, role.update, rows))
        check_replicas(role._engine)
        results.append({"metrics": metrics, "gradients": gradients, "weights": whole_weights(role._engine)})
    return results


def export_cells(folder: Path, cells: Sequence[Cell], target: Path, bucket_bytes: int = 1 << 20) -> None:
    for number, cell in enumerate(cells):
        export_folder(actor(folder, cell)._engine, str(target / str(number)), bucket_bytes)


def value_batch() -> DataProto:
    """Two rows with returns, for a critic."""
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 3]
    ids = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    return DataProto(
        {
            "prompt_ids": Ragged.from_rows(ids),
            "response_ids": Ragged.from_rows(ids),
            "returns": Ragged.from_rows([torch.randn(length, generator=generator) for length in lengths]),
        }
    )


def critic_round_trip(folder: Path, target: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a critic that learned once, and of one that was read from its export in another layout."""
    batch = value_batch()
    role = critic(folder, Cell(pp=2))
    batch = batch.union(call(role, role.values, batch))
    call(role, role.update, batch)
    before = call(role, role.values, batch)["old_values"]
    role.export(str(target))
    again = critic(target, Cell(pp=2))
    after = call(again, again.values, batch)["old_values"]
    return before.values, after.values


def critic_cells(folder: Path, cells: Sequence[Cell], batch: DataProto) -> list[dict[str, Any]]:
    """Per cell: two updates of a critic, its values before, between and after, and the trunk's weights."""
    results = []
    for cell in cells:
        role = critic(folder, cell)
        values = [call(role, role.values, batch)["old_values"].values]
        metrics = []
        for _ in range(2):
            ready = batch.union(call(role, role.values, batch))
            metrics.append(figures(call(role, role.update, ready)))
            values.append(call(role, role.values, batch)["old_values"].values)
        results.append({"values": values, "metrics": metrics, "weights": whole_weights(role._engine)})
    return results


def flat_update(folder: Path, cell: Cell, batch: DataProto) -> dict[str, Any]:
    """A real update, then one whose advantages are all zero: what the second one changed, and its metrics."""
    role = actor(folder, cell)
    batch = batch.union(call(role, role.log_probs, batch))
    call(role, role.update, batch)
    before = local_state(role._engine)
    flat = batch.drop("advantages").with_columns(
        advantages=Ragged.from_lengths(
            torch.zeros(int(batch.lengths("response_ids").sum())), batch.lengths("response_ids")
        )
    )
    metrics = figures(call(role, role.update, flat))
    same = all(torch.equal(a, b) for a, b in zip(before, local_state(role._engine), strict=True))
    return {"same": same, "metrics": metrics}


def bad_loss(
    outputs: TokenOutputs, columns: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Not a number on the last rank only."""
    broken = dist.get_rank() == dist.get_world_size() - 1
    return outputs.log_probs * (float("nan") if broken else 1.0), {}


def bad_update(folder: Path, cell: Cell, batch: DataProto) -> dict[str, Any]:
    """A real update, one with a gradient that is not a number, a real one again."""
    role = actor(folder, cell)
    batch = batch.union(call(role, role.log_probs, batch))
    call(role, role.update, batch)
    before = local_state(role._engine)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flowrl.workers.optimizer").addHandler(handler)
    metrics = figures(call(role, role.update, batch, bad_loss))
    same = all(torch.equal(a, b) for a, b in zip(before, local_state(role._engine), strict=True))
    after = figures(call(role, role.update, batch))
    finite = all(bool(torch.isfinite(t).all()) for t in local_state(role._engine))
    return {"same": same, "metrics": metrics, "after": after, "finite": finite, "log": records}


def on_policy(folder: Path, cells: Sequence[Cell], batch: DataProto) -> list[list[dict[str, float]]]:
    """Per cell: metrics of two updates with one set of old log-probs, KL to a reference among them."""
    results = []
    for cell in cells:
        role = actor(folder, cell, kl=LossKL(coefficient=0.1), temperature=0.7)
        frozen = reference(folder, replace(cell, tp=1, pp=1, distributed_optimizer=False), temperature=0.7)
        ready = batch.union(call(role, role.log_probs, batch), call(frozen, frozen.log_probs, batch))
        results.append([figures(call(role, role.update, ready)) for _ in range(2)])
    return results


def tied_copies(folder: Path, batch: DataProto) -> list[torch.Tensor]:
    """Embedding and head of a tied model in two pipeline stages after two updates; each rank returns what it holds."""
    role = actor(folder, Cell(pp=2))
    batch = batch.union(call(role, role.log_probs, batch))
    for _ in range(2):
        call(role, role.update, batch)
    return [region.tensor.clone() for region in role.held_regions() if region.name == EMBEDDING]


def strayed(folder: Path, cell: Cell, name: str) -> str:
    """What `check_replicas` says after one bit of a tensor has changed on the last rank only."""
    engine = actor(folder, cell)._engine
    check_replicas(engine)
    if dist.get_rank() == dist.get_world_size() - 1:
        held = next(held for held in engine.weights.held_regions() if held.name == name)
        held.tensor.view(torch.int32).view(-1)[7] ^= 1
    try:
        check_replicas(engine)
    except AssertionError as error:
        return str(error)
    return ""


def vocabulary_shards(
    logits: torch.Tensor, targets: torch.Tensor, num_valid: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropy, and gradients of hidden and whole weight, with the vocabulary split over the ranks.

    Hidden states are the logits and the head is the identity, so what the head computes are the logits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = logits.shape[1] // world
    hidden = logits.clone().requires_grad_()
    weight = torch.eye(logits.shape[1])[rank * share : (rank + 1) * share].clone().requires_grad_()
    log_probs, entropy = token_outputs(
        hidden,
        weight,
        targets,
        first_id=rank * share,
        num_valid=num_valid,
        temperature=0.5,
        group=dist.group.WORLD,
        chunk_tokens=chunk,
    )
    (log_probs.sum() + 0.3 * entropy.square().sum()).backward()
    assert hidden.grad is not None and weight.grad is not None
    dist.all_reduce(hidden.grad)
    whole = [torch.empty_like(weight) for _ in range(world)]
    dist.all_gather(whole, weight.grad)
    return log_probs.detach(), entropy.detach(), hidden.grad, torch.cat(whole)
