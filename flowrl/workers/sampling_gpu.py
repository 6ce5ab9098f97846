"""Sampling for requests that have seeds of their own, all rows in one launch.

vLLM draws the noise of such requests one row after another, which on a GPU is thousands of launches a second for the host. Here
a token's noise is a function of the request's seed, the number of its draws so far and the token (Philox: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011), so what a request gets depends neither on its batch nor on its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

BLOCK = 4096
"""Ids of the vocabulary that a program looks at together."""
OFFSET_STEP = 4
"""A generator's offset counts in steps of this; each draw is one."""


@triton.jit  # type: ignore[untyped-decorator]
def _draw(probs, seeds, tokens, vocab, stride, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    seed, draw = tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1).to(tl.int32)
    first = tl.full((), -1.0, tl.float32)
    winner = tl.full((), 0, tl.int64)
    for start in range(0, vocab, block):
        ids = start + tl.arange(0, block)
        there = ids < vocab
        values = tl.load(probs + row * stride + ids, mask=there, other=0.0)
        bits, _, _, _ = tl.philox(seed, ids, ids * 0 + draw, ids * 0, ids * 0)
        # Exponential noise -log(1 - u). Small u need all of their digits: the smallest noise decides.
        uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
        series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0)))
        noise = tl.where(uniform < 1e-3, series, -tl.log(1.0 - uniform))
        rates = tl.where(there, values / noise, -1.0)
        best = tl.max(rates, axis=0)
        winner = tl.where(best > first, start + tl.argmax(rates, axis=0), winner)
        first = tl.maximum(first, best)
    tl.store(tokens + row, winner)


def sample(probs: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """One id [R] int64 per row of `probs` [R, V] float32, drawn by the row's generator, which is one draw further then.

    The id with the largest ratio of its probability to exponential noise has the distribution `probs`.
    """
    rows = [generators[row] for row in range(len(probs))]
    states = [(_signed(generator.initial_seed()), generator.get_offset()) for generator in rows]
    for generator, (_, offset) in zip(rows, states, strict=True):
        generator.set_offset(offset + OFFSET_STEP)
    draws = torch.tensor([(seed, offset // OFFSET_STEP) for seed, offset in states], dtype=torch.int64)
    return draw(probs, draws)


def at_once(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's `random_sample`, with `sample` for batches in which every row has a generator. Of one that is so already: itself."""
    if getattr(plain, "draws_at_once", False):
        return plain

    def random_sample(
        probs: torch.Tensor, generators: Mapping[int, torch.Generator], use_fp64_gumbel: bool = False
    ) -> torch.Tensor:
        if use_fp64_gumbel or len(generators) != len(probs):
            return plain(probs, generators, use_fp64_gumbel)
        return sample(probs, generators)

    random_sample.draws_at_once = True  # type: ignore[attr-defined]
    return random_sample


def draw(probs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """As `sample`; `draws` [R, 2] int64 on the host: seed and number of the draw."""
    tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
    _draw[(len(probs),)](
        probs,
        draws.to(probs.device, non_blocking=True),
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
