"""Sampling for requests that have seeds of their own, all rows in one launch, on a GPU.

vLLM has two runners there. The one for dense models draws a row's noise from the request's seed and the token's position, for
all rows at once (`vllm/v1/worker/gpu/sample/gumbel.py`). The one for experts and for pipelines draws one request after another,
from a generator each: thousands of launches a second for the host, and other samples for the same seed. Here that
one draws as the one for dense models does: a request gets the same tokens in every layout, whatever its batch and its row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from flowrl.resharding.copies_gpu import sent

BLOCK = 4096
"""Ids of the vocabulary that a program looks at together."""
OFFSET_STEP = 4
"""A generator's offset counts in steps of this. It keeps the position that the next draw is for."""
SMALLEST = tl.constexpr(4.6566127342e-10)
"""The smallest number but 0 that `tl.rand` gives."""


@triton.jit  # type: ignore[untyped-decorator]
def _draw(probs, seeds, tokens, vocab, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    key = tl.randint(tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1))
    first = tl.full((), -1.0, tl.float32)
    winner = tl.full((), 0, tl.int64)
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        there = ids < vocab
        values = tl.load(probs + row * stride + ids, mask=there, other=0.0)
        uniform = tl.maximum(tl.rand(key, ids), SMALLEST)
        # Exponential noise -log(1 - u). Small u need all of their digits: the smallest noise decides.
        series = 1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * (0.25 + uniform * 0.2)))
        noise = tl.where(uniform < 0.03, uniform * series, -tl.log(1.0 - uniform))
        rates = tl.where(there, values / noise, -1.0)
        best = tl.max(rates, axis=0)
        winner = tl.where(best > first, start + tl.argmax(rates, axis=0), winner)
        first = tl.maximum(first, best)
    tl.store(tokens + row, winner)


def sample(probs: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """One id [R] int64 per row of `probs` [R, V] float32, drawn by the row's generator, which is a position further then.

    The id with the largest ratio of its probability to exponential noise has the distribution `probs`. Of the logarithms
    it is the largest sum of log-probability and Gumbel noise, which is how the other runner has it.
    """
    rows = [generators[row] for row in range(len(probs))]
    states = [(_signed(generator.initial_seed()), generator.get_offset()) for generator in rows]
    for generator, (_, offset) in zip(rows, states, strict=True):
        generator.set_offset(offset + OFFSET_STEP)
    draws = torch.tensor([(seed, offset // OFFSET_STEP) for seed, offset in states], dtype=torch.int64)
    return draw(probs, draws)


def install() -> None:
    """Lets vLLM's runner for experts and pipelines draw so. Idempotent."""
    sampler = vars(importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler"))
    request = importlib.import_module("vllm.v1.worker.gpu_input_batch").CachedRequestState
    if not getattr(sampler["random_sample"], "draws_at_once", False):
        sampler["random_sample"] = at_once(sampler["random_sample"])
        request.__post_init__ = from_its_prompt_on(request.__post_init__)


def at_once(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's `random_sample`, with `sample` for batches in which every row has a generator."""

    def random_sample(
        probs: torch.Tensor, generators: Mapping[int, torch.Generator], use_fp64_gumbel: bool = False
    ) -> torch.Tensor:
        if use_fp64_gumbel or len(generators) != len(probs):
            return plain(probs, generators, use_fp64_gumbel)
        return sample(probs, generators)

    random_sample.draws_at_once = True  # type: ignore[attr-defined]
    return random_sample


def from_its_prompt_on(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    """vLLM's last step of making a request; its generator begins at the last token of the prompt, where the first draw is."""

    def finish(request: Any) -> None:
        plain(request)
        if request.generator is not None:
            request.generator.set_offset(OFFSET_STEP * (request.num_prompt_tokens - 1))

    return finish


def draw(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """As `sample`; `draws` [R, 2] int64 on the host: seed and position."""
    tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    _draw[(len(probs),)](
        probs,
        sent(draws, probs.device),
        tokens,
        probs.shape[1],
        probs.stride(0),
        block=BLOCK,
        num_warps=8,
    )
    return tokens


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
