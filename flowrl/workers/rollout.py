"""The rollout role: vLLM in SPMD form, one process per device, with a parallel layout of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from flowrl.config.machine import find_machine
from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import RolloutConfig
from flowrl.protocol import DataProto, Metric, Ragged
from flowrl.resharding.families import HFTensor, hf_tensors
from flowrl.resharding.layouts import Layouts, common_places, rollout_places, rollout_sizes
from flowrl.resharding.ranks import ParallelSizes, RankPlace
from flowrl.resharding.recorder import record
from flowrl.resharding.transfer import Held, Transfer
from flowrl.single_controller import Link, MeshPosition, Worker, broadcast, rank_zero, register, split_over
from flowrl.workers import vllm_private
from flowrl.workers.engine_memory import EngineMemory
from flowrl.workers.generation import (
    Sampling,
    check_layout,
    check_prompts,
    engine_groups,
    engine_ranks,
    kv_cache,
    resolve_sampling,
    sampling_params,
)
from flowrl.workers.moves import Side, carry_out, check_tensors, transfer_to_engine

log = logging.getLogger("flowrl.rollout")


class WeightSource(Protocol):
    """A role in this process whose weights the engine can take: its tensors in the folder's terms, its own boxes, and the
    layout that it trains in."""

    def hf_tensors(self) -> Sequence[HFTensor]: ...

    def held_regions(self) -> Sequence[Held]: ...

    def sizes(self) -> ParallelSizes: ...

    def places(self) -> Sequence[RankPlace]: ...


class RolloutWorker(Worker):
    """Generates responses; `config.layout.tp * pp` ranks are one engine, and engines are replicas.

    Engines are consecutive ranks and never sleep, unless a trainer of sizes `beside` is on the same ranks: then both
    share an order in which the fewest bytes move, and the devices' memory by turns.
    The engine starts with the weights of `model_path`, which have `weights_version`; each `receive_weights` adds 1.
    `num_tokenizer_ids`: ids at or over it are never sampled. `stop_token_ids`: end a response, beside
    `config.stop_token_ids`. `seed`: for what vLLM draws outside of requests; every request has its own seed.

    Errors: `ValueError` where the layout does not fit the model or the pool, the cache does not fit, or a limit
    exceeds what the model was made for.
    """

    def __init__(
        self,
        model_path: str,
        shape: ModelShape,
        config: RolloutConfig,
        *,
        num_tokenizer_ids: int,
        stop_token_ids: Sequence[int],
        max_prompt_tokens: int,
        seed: int,
        trust_remote_code: bool = False,
        beside: ParallelSizes | None = None,
        weights_version: int = 0,
    ) -> None:
        self._shape = shape
        self._config = config
        self._max_prompt_tokens = max_prompt_tokens
        self._sampling = resolve_sampling(config, stop_token_ids, num_tokenizer_ids)
        check_layout(shape, config.layout, expert_parallel=config.expert_parallel)
        self._sizes = rollout_sizes(config)
        self._shares_devices = beside is not None
        self._places = rollout_places(self.world_size, self._sizes)
        if beside is not None:
            self._places = common_places(shape, self.world_size, beside, self._sizes)
        engines = engine_ranks(self._places)
        self._replica, self._ranks = next((n, ranks) for n, ranks in enumerate(engines) if self.rank in ranks)
        self._engine = self._start(model_path, seed, trust_remote_code)
        self._memory = EngineMemory()
        if num_tokenizer_ids < shape.vocab_size:
            self._engine.limit_vocabulary(num_tokenizer_ids)
        self._parameters = dict(self._engine.model.named_parameters())
        self._tensors = hf_tensors(shape)
        self._recording = record(self._engine.load_weights, self._parameters, self._tensors)
        self._transfer: Transfer | None = None
        self._source: WeightSource | Link | None = None
        self._weights_version = weights_version
        if self.rank == 0:
            self._say_sampling()

    def _start(self, model_path: str, seed: int, trust_remote_code: bool) -> vllm_private.Engine:
        config, device = self._config, self.device.type
        tokens = self._max_prompt_tokens + config.max_response_tokens
        if tokens > self._shape.max_positions:
            raise ValueError(
                f"data.max_prompt_tokens={self._max_prompt_tokens} + rollout.max_response_tokens="
                f"{config.max_response_tokens} = {tokens} exceeds the model's {self._shape.max_positions} positions"
            )
        memory_bytes = find_machine().memory_bytes if device == "cpu" else None
        cache = kv_cache(
            self._shape, config, device=device, max_prompt_tokens=self._max_prompt_tokens, memory_bytes=memory_bytes
        )
        groups = engine_groups(self._places)
        run_name = f"{self.run_name}-{self.pool_name}"
        vllm_private.install_groups(groups.tp_groups, groups.pp_groups, run_name=run_name, device=self.device)
        return vllm_private.Engine(
            vllm_private.EngineSpec(
                model_path=model_path,
                trust_remote_code=trust_remote_code,
                device=device,
                dtype=config.dtype,
                tp=config.layout.tp,
                pp=config.layout.pp,
                expert_parallel=config.expert_parallel,
                max_model_tokens=tokens,
                max_batch_requests=config.max_batch_requests,
                block_tokens=cache.block_tokens,
                num_blocks=cache.num_blocks,
                kv_cache_bytes=cache.num_bytes,
                gpu_memory_fraction=config.gpu_memory_fraction,
                cuda_graphs=config.cuda_graphs,
                seed=seed,
            )
        )

    def _say_sampling(self) -> None:
        log.info("responses are sampled with %s; nothing is taken from the model folder", self._sampling)
        if self._sampling.truncates:
            log.warning(
                "rollout.top_p=%g, rollout.top_k=%d cut tokens off: the engine's log-probs are of the truncated distribution "
                "and the trainer's over all tokens, so their ratio is off by the mass that was kept",
                self._sampling.top_p,
                self._sampling.top_k,
            )

    def meshes(self) -> dict[str, MeshPosition]:
        """Mesh `generate`: one slice per engine, answered by its first rank."""
        return {"generate": MeshPosition(data_parallel_rank=self._replica, answers=self.rank == self._ranks[0])}

    @register(dispatch=split_over("generate"))
    def generate(self, batch: DataProto, *, greedy: bool = False) -> DataProto:
        """One response per row, from columns `prompt_ids` (ragged int64) and `seeds` ([N] int64).

        Returns columns `response_ids` (ragged int64: exactly the sampled ids, with the stop id where one ended it) and
        `rollout_log_probs` (ragged float32: of each sampled id at the sampling temperature, after truncation if any,
        over the ids below `num_tokenizer_ids`), values `finish_reason` ("stop" or "length") and `weights_version`. With
        `greedy` the likeliest id is taken and log-probs are those at temperature 1.

        A row's response depends on prompt, seed and weights alone, not on the other rows or the layout (up to rounding).

        Errors: `ValueError` naming the row of an illegal prompt; one where the engine is asleep or without weights.
        """
        self._memory.check_generate()
        prompts = [row.tolist() for row in _ragged(batch, "prompt_ids").rows()]
        check_prompts(prompts, batch.row_ids, self._max_prompt_tokens, self._shape.vocab_size)
        params = [self._params(int(seed), greedy) for seed in _dense(batch, "seeds").tolist()]
        outputs = self._engine.generate(prompts, params)
        ids = [torch.tensor(output.token_ids, dtype=torch.int64) for output in outputs]
        log_probs = [torch.tensor(_sampled_log_probs(output), dtype=torch.float32) for output in outputs]
        reasons = [str(output.finish_reason) for output in outputs]
        return DataProto(
            {
                "response_ids": Ragged.from_rows(ids, torch.int64),
                "rollout_log_probs": Ragged.from_rows(log_probs, torch.float32),
            },
            values={"finish_reason": reasons, "weights_version": [self._weights_version] * len(outputs)},
            metrics={"rollout/generated_tokens": Metric.sum(sum(map(len, ids)))},
            row_ids=batch.row_ids,
        )

    def _params(self, seed: int, greedy: bool) -> Any:
        sampling = self._sampling
        return sampling_params(
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            seed=seed,
        )

    @register(dispatch=rank_zero)
    def sampling(self) -> Sampling:
        """The resolved distribution of responses; `truncates` says whether tokens are cut off."""
        return self._sampling

    @register(dispatch=broadcast, partner="send_weights")
    def receive_weights(self, actor: WeightSource | Link) -> DataProto:
        """Take the actor's weights in place; no rows, metrics of the move (maxima over ranks).

        An actor on another pool sends them meanwhile (`ActorWorker.send_weights`): the driver starts both halves once
        both pools are idle, and each gets the link of the pools. Nothing overlaps with such a move, for the next
        responses need the new weights and the trainer's next update needs these responses; grading and the critic of a
        pool of its own go on.

        Every `config.fingerprint_every`-th move is proven by checksums of what trainer and engine hold.

        Errors: `ValueError` listing names, shapes and dtypes in which the actor's tensors are not the engine's; one where
        the engine's weights are asleep; one naming rank and tensor where the engine differs from the trainer afterwards.
        """
        self._memory.check_receive()
        transfer = self._transfer_from(actor)
        held = [] if isinstance(actor, Link) else actor.held_regions()
        every = self._config.fingerprint_every
        result = carry_out(transfer, held, prove=every > 0 and (self._weights_version + 1) % every == 0)
        self._engine.reset_prefix_cache()
        self._memory.received()
        self._weights_version += 1
        return result

    def _transfer_from(self, actor: WeightSource | Link) -> Transfer:
        """The plan for this actor, made at its first move."""
        if self._transfer is not None and self._source is actor:
            return self._transfer
        self._leave()
        tensors = tuple((tensor.name, tensor.shape) for tensor in self._tensors)
        if isinstance(actor, Link):
            side = Side(self._sizes, tuple(self._places), tensors, self._recording.dtype)
            recording, parameters = self._recording, self._parameters
            self._transfer = transfer_to_engine(actor, side, self._shape, recording, parameters, self.device)
        else:
            check_tensors(tensors, tuple((tensor.name, tensor.shape) for tensor in actor.hf_tensors()))
            layouts = Layouts.join(actor.sizes(), actor.places(), self._sizes, self._places)
            self._transfer = Transfer(self._recording, self._parameters, self._shape, layouts, actor.held_regions())
        self._source = actor
        return self._transfer

    def _leave(self) -> None:
        """Leave the ranks that the last move was made with."""
        if self._transfer is not None:
            self._transfer.world.close()

    @register(dispatch=broadcast)
    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of prompts: the next responses are computed as by an engine that has just started."""
        self._engine.reset_prefix_cache()

    @register(dispatch=broadcast)
    def sleep(self) -> None:
        """Give the memory of weights and cache back until `wake`; the weights are lost. Nothing to do on CPU, or where
        no trainer wants the memory."""
        if self._shares_devices and self._memory.sleep():
            self._engine.sleep()

    @register(dispatch=broadcast)
    def wake(self, *, what: str = "all") -> None:
        """Take memory again: `weights` (to be received before the next generation), then `kv_cache`, or `all`."""
        if parts := self._memory.wake(what):
            self._engine.wake(parts)

    def close(self) -> None:
        self._leave()
        # Views of the engine's memory would keep it.
        self._parameters, self._transfer = {}, None
        self._engine.close()


def _ragged(batch: DataProto, name: str) -> Ragged:
    column = batch[name]
    if not isinstance(column, Ragged):
        raise ValueError(f"column {name} must be ragged")
    return column


def _dense(batch: DataProto, name: str) -> torch.Tensor:
    column = batch[name]
    if not isinstance(column, torch.Tensor):
        raise ValueError(f"column {name} must be dense [N]")
    return column


def _sampled_log_probs(output: Any) -> list[float]:
    """Log-probs of the sampled ids of one vLLM output, [tokens]: the only ones asked for."""
    found = output.logprobs
    assert list(found.token_ids) == list(output.token_ids), "one log-prob for each sampled id"
    log_probs: list[float] = found.logprobs
    return log_probs
