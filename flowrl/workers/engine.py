"""One Megatron-core model in one layout: forward and training passes over the rows of a call.

Actor, critic and reference differ in their head and their loss only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (  # type: ignore[import-untyped]
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # type: ignore[import-untyped]
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # type: ignore[import-untyped]
from megatron.core.transformer.module import Float16Module  # type: ignore[import-untyped]

from flowrl.algorithms.masked import row_weights
from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import EngineConfig, OptimConfig
from flowrl.config.units import microbatch_unit
from flowrl.protocol import DataProto
from flowrl.resharding.buffer import hold_together
from flowrl.resharding.families import HEAD, HFTensor
from flowrl.resharding.layouts import train_places, train_sizes
from flowrl.resharding.ranks import RankPlace
from flowrl.single_controller.dispatch import MeshPosition
from flowrl.workers import cuda_on_cpu
from flowrl.workers.groups import process_groups
from flowrl.workers.heads import CriticHead, PolicyHead, ValueHead
from flowrl.workers.hf_weights import HFFolder
from flowrl.workers.microbatch import MicroBatch, TokenColumns, fill, make_microbatch, plan_microbatches, token_rows
from flowrl.workers.model import DTYPES, build_chunks, rotary_frequencies, transformer_config
from flowrl.workers.offload import Offload
from flowrl.workers.optimizer import Optimizer, StepResult
from flowrl.workers.state import RoleState
from flowrl.workers.weights import ModelWeights, expert_shard, global_parameters

TokenLoss = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(head outputs [k, T], columns [T] by name) -> (loss [T], per-token quantities [T] to report)."""

Consumer = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]


@dataclass
class TokenStats:
    """Of one reported quantity over this replica's response tokens."""

    total: float = 0.0
    least: float = float("inf")
    largest: float = float("-inf")


@dataclass
class TrainResult:
    """One mini-batch. `loss` and `stats` are this replica's part (zero and empty on ranks without the last stage);
    `share` is its part of the mini-batch's response tokens, so that shares of all replicas add up to 1. `step` is None
    where the mini-batch has no response token at all."""

    step: StepResult | None
    num_tokens: int
    share: float
    loss: float = 0.0
    stats: dict[str, TokenStats] = field(default_factory=dict)


class Engine:
    """A model over the whole default process group."""

    def __init__(
        self,
        folder: str,
        shape: ModelShape,
        config: EngineConfig,
        head: PolicyHead | CriticHead,
        *,
        device: torch.device,
        seed: int,
        optim: OptimConfig | None = None,
        total_steps: int = 0,
        places: Sequence[RankPlace] | None = None,
    ) -> None:
        """Build the model and read its weights. Collective. Without `optim` the model is frozen.

        `places`: those of all ranks in the layout; None for the order of `train_places`.

        Errors: `ValueError` where the layout does not fit the model or the world, or the folder does not fit the shape.
        """
        self._config = config
        self.dtype = DTYPES[config.dtype]
        self._shape = shape
        self._device = device
        self._head = head
        layout = config.layout
        world_size = dist.get_world_size()
        self.places = tuple(places or train_places(world_size, train_sizes(layout)))
        at = self.places[dist.get_rank()].train
        assert at is not None, "every rank of the pool trains"
        self.at = at
        self.dp_size = world_size // (layout.tp * layout.cp * layout.pp)
        self.is_last = self.at.pp == layout.pp - 1
        self._offload = Offload(device)
        self.folder = HFFolder(folder)
        self.folder.check(shape, head=head.is_language_model)
        with cuda_on_cpu.active():
            self.groups = process_groups(self.places)
            self._build(seed)
            if optim is None or not config.distributed_optimizer:
                # The distributed optimizer makes a buffer of its own, of the same order, when it takes over.
                hold_together(self._parameters)
            self._weights.load(self.folder)
            self._load_value_head()
            self._models: list[Any] = self._chunks
            if self._settings.bf16:
                self._models = [Float16Module(self._settings, chunk) for chunk in self._chunks]
            self._optimizer = None if optim is None else self._trainable(optim, total_steps)
            if optim is None:
                for chunk in self._chunks:
                    chunk.requires_grad_(False)

    def _build(self, seed: int) -> None:
        self._settings = transformer_config(self._shape, self._config)
        self._frequencies = rotary_frequencies(self._shape).to(self._device)
        # Sequence parallelism cuts the positions evenly.
        self._width_multiple = self._config.layout.tp if self._settings.sequence_parallel else 1
        self._chunks = build_chunks(
            self._shape, self._settings, self.groups, head=self._head.is_language_model, seed=seed
        )
        self.head = None
        if self.is_last:
            last = self._chunks[-1]
            self.head = last.output_layer = self._head.build(last, self.groups)
        for chunk in self._chunks:
            chunk.to(device=self._device, dtype=self.dtype)
        first_expert = expert_shard(self._config.layout, self.at).experts(self._shape.num_experts).start
        self._parameters = global_parameters(self._chunks, first_expert)
        parameters = {
            name: parameter
            for name, parameter in self._parameters.items()
            if self._head.is_language_model or not name.startswith("output_layer.")
        }
        self._weights = ModelWeights(
            self._shape, self._config.layout, self.places, parameters, head=self._head.is_language_model
        )

    @torch.no_grad()
    def _load_value_head(self) -> None:
        weight = None if self._head.is_language_model else self.folder.value_head()
        if weight is not None and isinstance(self.head, ValueHead):
            self.head.weight.copy_(weight)

    def _trainable(self, optim: OptimConfig, total_steps: int) -> Optimizer:
        distributed = self._config.distributed_optimizer
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self._models = [
            DistributedDataParallel(self._settings, ddp, model, pg_collection=self.groups) for model in self._models
        ]
        self._settings.finalize_model_grads_func = _finalize_gradients
        return Optimizer(
            self._models,
            self._parameters,
            self.groups,
            optim,
            dtype=self.dtype,
            distributed=distributed,
            total_steps=total_steps,
        )

    def state(self) -> RoleState:
        """What a checkpoint holds of this model. Error: `ValueError` while it is on the host."""
        self._offload.check("a checkpoint")
        self._offload.finish()
        assert self._optimizer is not None, "a frozen model has no state of its own"
        return RoleState(
            self._weights, self._parameters, self.places, self._optimizer,
            sizes=train_sizes(self._config.layout), value_head=not self._head.is_language_model,
        )  # fmt: skip

    @property
    def weights(self) -> ModelWeights:
        """Of this rank. Error: `ValueError` while they are on the host."""
        self._offload.check("reading the weights")
        return self._weights

    def offload(self) -> None:
        """Move weights and optimizer states to the host and free them and the gradients, which nobody needs between
        two steps, on the device."""
        if self._config.offload:
            states = [] if self._optimizer is None else self._optimizer.states()
            trained: Iterable[Any] = [] if self._optimizer is None else self._parameters.values()
            gradients = [parameter.main_grad for parameter in trained]
            self._offload.leave(self._parameters.values(), states, gradients)

    def reload(self) -> None:
        """Bring back what `offload` moved. Optimizer states may still be on their way when this returns."""
        self._offload.back()

    @property
    def position(self) -> MeshPosition:
        """This rank in the mesh of replicas: the first tensor-parallel rank of the last stage answers."""
        return MeshPosition(data_parallel_rank=self.at.dp, answers=self.is_last and self.at.tp == 0 and self.at.cp == 0)

    @property
    def hf_tensors(self) -> tuple[HFTensor, ...]:
        """Tensors that an export of this model holds."""
        tensors = self.folder.tensors(self._shape)
        return tensors if self._head.is_language_model else tuple(t for t in tensors if t.name != HEAD)

    def whole_value_head(self) -> torch.Tensor | None:
        """Weight [1, h] of the value head on every rank; None for a language model. Collective."""
        if self._head.is_language_model:
            return None
        weight = torch.empty(1, self._shape.hidden_size, dtype=self.dtype, device=self._device)
        if isinstance(self.head, ValueHead):
            weight.copy_(self.head.weight.detach())
        # In the numbering of ranks, the last one is on the last stage.
        dist.broadcast(weight, src=dist.get_world_size() - 1)
        return weight

    def forward(self, batch: DataProto) -> torch.Tensor | None:
        """Head outputs [k, response tokens of all rows] float32 in row order; None on ranks without the last stage.

        Collective: all ranks call it, those without rows too.
        """
        self._offload.check("a forward pass")
        plan = self._microbatches(batch)
        with cuda_on_cpu.active(), torch.no_grad():
            outputs = self._run(plan, None) if plan else []
        if not self.is_last:
            return None
        by_row: dict[int, torch.Tensor] = {}
        for microbatch, output in zip(plan, outputs, strict=True):
            if microbatch.rows:
                by_row.update(zip(microbatch.rows, output.cpu().split(microbatch.lengths.tolist(), dim=1), strict=True))
        if not by_row:
            return torch.zeros(2, 0)
        return torch.cat([by_row[row] for row in sorted(by_row)], dim=1)

    def train(self, batch: DataProto, loss: TokenLoss, aggregation: str) -> TrainResult:
        """One optimizer step on this replica's rows of a mini-batch. Collective.

        `batch.meta` gives `num_tokens_global` and `num_rows_global` of the whole mini-batch (summed over replicas where
        absent), and `max_response_tokens` where the aggregation is sum-norm.
        """
        assert self._optimizer is not None, "a frozen model does not train"
        self._offload.check("an update")
        lengths = batch.lengths("response_ids")
        num_tokens, num_rows = self._denominators(batch, lengths)
        plan = self._microbatches(batch)
        local = int(lengths.sum())
        result = TrainResult(None, local, local / num_tokens if num_tokens else 1.0 / self.dp_size)
        if num_tokens == 0:
            return result
        weights = row_weights(
            lengths,
            aggregation,
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_tokens=_response_limit(batch, aggregation),
        )
        with cuda_on_cpu.active():
            self._optimizer.zero_grad()
            reports = self._run(plan, partial(self._weighted_loss, batch, loss, weights))
            self._offload.finish()
            result.step = self._optimizer.step()
        _accumulate(result, reports)
        return result

    def _weighted_loss(
        self, batch: DataProto, loss: TokenLoss, weights: torch.Tensor, microbatch: MicroBatch, outputs: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        if microbatch.num_tokens == 0:
            return outputs.sum() * 0.0, None
        token_loss, reported = loss(outputs, TokenColumns(batch, microbatch.rows, self._device))
        if token_loss.shape != (microbatch.num_tokens,):
            raise ValueError(
                f"the loss returned shape {tuple(token_loss.shape)} for {microbatch.num_tokens} response tokens; it must "
                "return one number per token and leave averaging to the engine"
            )
        weight = torch.repeat_interleave(weights[microbatch.rows], microbatch.lengths).to(self._device)
        total = (token_loss * weight).sum()
        return total, (total.detach(), {name: value.detach() for name, value in reported.items()})

    def _denominators(self, batch: DataProto, lengths: torch.Tensor) -> tuple[int, int]:
        if "num_tokens_global" in batch.meta and "num_rows_global" in batch.meta:
            return int(batch.meta["num_tokens_global"]), int(batch.meta["num_rows_global"])
        counts = torch.tensor([int(lengths.sum()), len(lengths)], dtype=torch.int64, device=self._device)
        dist.all_reduce(counts, group=self.groups.dp)
        return int(counts[0]), int(counts[1])

    def _microbatches(self, batch: DataProto) -> list[MicroBatch]:
        """This replica's micro-batches, as many as every other replica has and the schedule takes. Rows without response
        take no part."""
        budget = self._config.tokens_per_microbatch
        lengths, prompts, responses = token_rows(batch, budget, self._shape.vocab_size)
        answered = [row for row, response in enumerate(responses) if len(response)]
        plan = [[answered[i] for i in part] for part in plan_microbatches([lengths[row] for row in answered], budget)]
        count = torch.tensor(len(plan), device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.groups.dp)
        unit = microbatch_unit(self._config.layout)
        agreed = -(-int(count) // unit) * unit
        return [
            make_microbatch(part, prompts, responses, self._device, multiple=self._width_multiple)
            for part in fill(plan, agreed)
        ]

    def _run(self, microbatches: list[MicroBatch], consume: Consumer | None) -> list[Any]:
        """Megatron-core's schedule over the micro-batches; what the last stage collected, in order.

        Without `consume` only outputs are collected; with it, its loss is differentiated as it is.
        """

        def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            microbatch = next(iterator)
            if self.head is not None and model is self._models[-1]:
                self.head.select(microbatch.selection)
            microbatch.packed.turn(self._frequencies, self.dtype)
            output = model(microbatch.token_ids, None, None, packed_seq_params=microbatch.packed)
            return output, partial(_collect, microbatch, consume)

        pp = self.groups.pp
        vp_size = self._settings.virtual_pipeline_model_parallel_size
        schedule = get_forward_backward_func(pp_size=pp.size(), vp_size=vp_size)
        collected: list[Any] = schedule(
            forward_step_func=step,
            data_iterator=[iter(microbatches) for _ in self._models],
            model=self._models,
            num_microbatches=len(microbatches),
            seq_length=microbatches[0].token_ids.shape[1],
            micro_batch_size=1,
            forward_only=consume is None,
            collect_non_loss_data=consume is None,
            pg_collection=self.groups,
            p2p_communicator=P2PCommunicator(pp, self._settings) if pp.size() > 1 else None,
        )
        return collected


def _collect(
    microbatch: MicroBatch, consume: Consumer | None, output: torch.Tensor, non_loss_data: bool = False
) -> Any:
    if consume is None:
        return output.detach()
    loss, report = consume(microbatch, output)
    # Megatron-core wants a token count with an undivided loss; `_finalize_gradients` ignores it.
    return loss, torch.ones((), dtype=torch.int32, device=loss.device), report


def _finalize_gradients(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    """Sum gradients over replicas and tied copies. The loss is weighted already, so nothing is divided."""
    finalize_model_grads(model, None, **kwargs)


def _response_limit(batch: DataProto, aggregation: str) -> int:
    if aggregation != "sum-norm":
        return 1
    if "max_response_tokens" not in batch.meta:
        raise ValueError("aggregation sum-norm divides by the response limit: give it as meta max_response_tokens")
    return int(batch.meta["max_response_tokens"])


def _accumulate(result: TrainResult, reports: list[Any]) -> None:
    """Add up what the micro-batches report. A device is waited for once, not for every number."""
    present = [report for report in reports if report is not None]
    if not present:
        return
    numbers = [
        torch.stack([loss.float(), *(f(value.float()) for value in reported.values() for f in _SUMMARIES)])
        for loss, reported in present
    ]
    for (_, reported), (loss, *figures) in zip(present, torch.stack(numbers).tolist(), strict=True):
        result.loss += loss
        for place, name in enumerate(reported):
            total, least, largest = figures[3 * place : 3 * place + 3]
            stats = result.stats.setdefault(name, TokenStats())
            stats.total += total
            stats.least = min(stats.least, least)
            stats.largest = max(stats.largest, largest)


_SUMMARIES = (torch.sum, torch.min, torch.max)
