"""What is decided of generation apart from the engine: who works with whom, how much cache, which distribution."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.config.layout import vocabulary_problem
from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import RolloutConfig, RolloutLayout
from flowrl.resharding.families import check_expert_parallel, check_tensor_parallel
from flowrl.resharding.ranks import RankPlace, grid, groups

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens of one cache block by device; the CPU kernels want multiples of 32."""


@dataclass(frozen=True)
class EngineGroups:
    """Ranks of every tensor-parallel and every pipeline group; ranks of a group ascend."""

    tp_groups: list[list[int]]
    pp_groups: list[list[int]]


def engine_ranks(places: Sequence[RankPlace]) -> list[list[int]]:
    """Ranks of each engine of the pool, ascending, by replica."""
    return [sorted(engine.ravel().tolist()) for engine in grid(places, "rollout")]


def engine_groups(places: Sequence[RankPlace]) -> EngineGroups:
    """The groups of all engines of the pool."""
    tp_groups, pp_groups = (groups(places, "rollout", axis) for axis in ("tp", "pp"))
    return EngineGroups([list(ranks) for ranks in tp_groups], [list(ranks) for ranks in pp_groups])


def check_layout(shape: ModelShape, layout: RolloutLayout, *, expert_parallel: bool = False) -> None:
    """Errors: `ValueError` with the numbers where the model cannot be cut this way."""
    try:
        check_tensor_parallel(shape, layout.tp)
        if expert_parallel:
            check_expert_parallel(shape, ep=layout.tp, etp=1)
        elif shape.num_experts:
            check_expert_parallel(shape, ep=1, etp=layout.tp)
    except ValueError as error:
        raise ValueError(f"rollout.layout: {error}") from None
    if (reason := vocabulary_problem(shape, layout.tp)) is not None:
        raise ValueError(f"rollout.layout.tp={layout.tp}: {reason}")
    if layout.pp > shape.num_layers:
        raise ValueError(f"rollout.layout.pp={layout.pp} is more than the model's {shape.num_layers} layers")


@dataclass(frozen=True)
class KVCache:
    """Size of the cache of one rank: `num_blocks` of `block_tokens` tokens each, `num_bytes` together."""

    block_tokens: int
    num_blocks: int
    num_bytes: int


def kv_cache(
    shape: ModelShape, config: RolloutConfig, *, device: str, max_prompt_tokens: int, memory_bytes: int | None = None
) -> KVCache:
    """The cache of each rank: what `max_batch_requests` full sequences need, at most `kv_cache_bytes`.

    With `memory_bytes` (of the machine, for all that runs on it) a cache that exceeds it is refused.

    Errors: `ValueError` with needed and available bytes where not even one full sequence fits, or memory is short.
    """
    tokens = max_prompt_tokens + config.max_response_tokens
    block_tokens = BLOCK_TOKENS[device]
    layers = -(-shape.num_layers // config.layout.pp)
    heads = max(1, shape.kv_heads // config.layout.tp)
    block_bytes = 2 * block_tokens * layers * heads * shape.head_dim * DTYPE_BYTES[config.dtype]
    sequence_blocks = -(-tokens // block_tokens)
    # One block more: vLLM keeps the first one empty.
    wanted = config.max_batch_requests * sequence_blocks + 1
    num_blocks = min(wanted, config.kv_cache_bytes // block_bytes)
    least = (sequence_blocks + 1) * block_bytes
    if num_blocks * block_bytes < least:
        raise ValueError(
            f"rollout.kv_cache_bytes={config.kv_cache_bytes} cannot hold one sequence of data.max_prompt_tokens="
            f"{max_prompt_tokens} + rollout.max_response_tokens={config.max_response_tokens} tokens, which needs {least} "
            f"bytes; {wanted * block_bytes} bytes hold rollout.max_batch_requests={config.max_batch_requests} of them"
        )
    if memory_bytes is not None and num_blocks * block_bytes > memory_bytes:
        raise ValueError(
            f"the KV cache of rollout.max_batch_requests={config.max_batch_requests} sequences needs "
            f"{num_blocks * block_bytes} bytes and this machine has {memory_bytes}; lower rollout.max_batch_requests, "
            f"rollout.max_response_tokens or rollout.kv_cache_bytes (at least {least})"
        )
    return KVCache(block_tokens, num_blocks, num_blocks * block_bytes)


@dataclass(frozen=True)
class Sampling:
    """The distribution that responses are drawn from, resolved; nothing of it comes from the model folder."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off, so that log-probs over all tokens are those of another distribution."""
        return self.top_p < 1 or self.top_k > 0


def resolve_sampling(config: RolloutConfig, stop_token_ids: Sequence[int], num_tokenizer_ids: int) -> Sampling:
    """Configured values; the stop set is the union of the given ids and `rollout.stop_token_ids`.

    Error: `ValueError` naming stop ids that can never be sampled.
    """
    stops = tuple(sorted({*stop_token_ids, *config.stop_token_ids}))
    impossible = [stop for stop in stops if not 0 <= stop < num_tokenizer_ids]
    if impossible:
        raise ValueError(
            f"stop ids {impossible} (of tokenizer, model or rollout.stop_token_ids) are outside the {num_tokenizer_ids} ids "
            f"of the tokenizer, so they would never end a response"
        )
    top_k = 0 if config.top_k >= num_tokenizer_ids else config.top_k
    return Sampling(config.temperature, config.top_p, top_k, config.max_response_tokens, stops)


def check_prompts(
    prompts: Sequence[Sequence[int]], row_ids: Sequence[str], max_prompt_tokens: int, num_ids: int
) -> None:
    """Errors: `ValueError` naming the row of an empty prompt, one over the limit, or one with an unknown id."""
    for row, prompt in zip(row_ids, prompts, strict=True):
        if not 0 < len(prompt) <= max_prompt_tokens:
            raise ValueError(
                f"prompt of row {row} has {len(prompt)} tokens; legal are 1 to data.max_prompt_tokens={max_prompt_tokens}"
            )
        if min(prompt) < 0 or max(prompt) >= num_ids:
            raise ValueError(
                f"prompt of row {row} has ids {min(prompt)} to {max(prompt)}; the model knows 0 to {num_ids - 1}"
            )


def sampling_params(
    *, temperature: float, top_p: float, top_k: int, max_tokens: int, stop_token_ids: Sequence[int], seed: int
) -> Any:
    """vLLM's parameters of one request; every field that shapes the distribution is given, none is defaulted.

    `ignore_eos` takes away vLLM's own end-of-sequence rule: the given stop set is the only one, and its members are
    part of the returned ids.
    """
    return importlib.import_module("vllm").SamplingParams(
        n=1,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        max_tokens=max_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        seed=seed & (2**63 - 1),
        logprobs=0,
        # Lists of numbers: an object for each token would keep the garbage collector busy.
        flat_logprobs=True,
        detokenize=False,
    )
