"""What the processes of the worker tests do: roles over several layouts in one process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flowrl.config.model_shape import read_model_shape
from flowrl.config.schema import (
    KL,
    ActorConfig,
    CriticConfig,
    EngineConfig,
    NoKL,
    OptimConfig,
    ReferenceConfig,
    TrainLayout,
)
from flowrl.protocol import DataProto, merge_metrics
from flowrl.single_controller.dispatch import neighbouring_rows
from flowrl.single_controller.worker import Place, construct
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker
from flowrl.workers.engine import Engine
from flowrl.workers.reference import ReferenceWorker
from flowrl.workers.weights import ModelWeights, global_name

from models import VOCAB


@dataclass(frozen=True)
class Cell:
    """One layout and one way of running the same mini-batch."""

    tp: int = 1
    pp: int = 1
    first_stage_layers: int | None = None
    budget: int = 4096
    order: tuple[int, ...] | None = None
    dtype: str = "float32"
    distributed_optimizer: bool = False
    recompute: bool = False


OPTIM = OptimConfig(lr=1e-2, eps=1e-5, clip_grad=1.0)


def layout_of(cell: Cell) -> TrainLayout:
    return TrainLayout(
        tp=cell.tp, pp=cell.pp, vpp=1, first_stage_layers=cell.first_stage_layers, cp=1, ep=1, etp=1
    )


def engine_settings(cell: Cell) -> dict[str, Any]:
    return dict(
        layout=layout_of(cell),
        dtype=cell.dtype,
        tokens_per_microbatch=cell.budget,
        distributed_optimizer=cell.distributed_optimizer,
        recompute=cell.recompute,
    )


def place() -> Place:
    return Place(rank=dist.get_rank(), world_size=dist.get_world_size())


def actor(
    folder: Path, cell: Cell, *, kl: KL = NoKL(), temperature: float = 1.0, num_ids: int = VOCAB, total_steps: int = 8, **config: Any
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
    )


def critic(folder: Path, cell: Cell, **config: Any) -> CriticWorker:
    settings = CriticConfig(**{"optim": OPTIM, "aggregation": "token-mean", "minibatch_prompts": 1, "epochs": 1, **engine_settings(cell), **config})
    return construct(CriticWorker, place(), str(folder), read_model_shape(folder), settings, total_optimizer_steps=8, seed=0)


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
    return {name: tensor.clone() for bucket in engine.weights.gather(engine.hf_tensors, 20_000) for name, tensor in bucket}


def whole_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Reduced gradients by Hugging Face name, on every rank; not with the distributed optimizer."""
    first_layer = engine._gpt.decoder.layers[0].layer_number - 1
    gradients = {
        global_name(name, first_layer): parameter.main_grad
        for name, parameter in engine._gpt.named_parameters()
        if engine._head.is_language_model or not name.startswith("output_layer")
    }
    table = ModelWeights(
        engine._shape,
        engine._config.layout,
        engine.at,
        engine.groups.mp,
        gradients,  # type: ignore[arg-type]
        head=engine._head.is_language_model,
    )
    return {name: tensor.clone() for bucket in table.gather(engine.hf_tensors, 1 << 20) for name, tensor in bucket}


def local_state(engine: Engine) -> list[torch.Tensor]:
    """Copies of this rank's parameters and optimizer moments."""
    tensors = [parameter.detach().clone() for parameter in engine._gpt.parameters()]
    optimizer = engine._optimizer
    assert optimizer is not None
    for part in optimizer._optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            tensors += [value.clone() for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors


def log_probs_cells(folder: Path, cells: Sequence[Cell], batch: DataProto, temperature: float) -> list[list[torch.Tensor]]:
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
        results.append({"metrics": metrics, "gradients": gradients, "weights": whole_weights(role._engine)})
    return results


def export_cells(folder: Path, cells: Sequence[Cell], target: Path) -> None:
    for number, cell in enumerate(cells):
        actor(folder, cell).export(str(target / str(number)))
