"""Draws of requests with seeds of their own, in one launch."""

from __future__ import annotations

import pytest
import torch
from test_sampling_gpu import FIRST_DRAWS

pytestmark = pytest.mark.gpu


def falling(vocab: int) -> torch.Tensor:
    """Probabilities of so many ids, two of which never come."""
    probs = torch.softmax(torch.linspace(-2, 1, vocab).roll(5), 0)
    probs[[3, 9]] = 0.0
    return (probs / probs.sum()).to("cuda")


def test_a_gpu_draws_what_the_interpreter_draws() -> None:
    from flowrl.workers.sampling_gpu import draw

    draws = torch.stack([torch.full((24,), 5), torch.arange(24)], dim=1)
    assert draw(falling(12).repeat(24, 1), draws).tolist() == FIRST_DRAWS


def test_a_generator_is_one_draw_further_each_time() -> None:
    from flowrl.workers.sampling_gpu import draw, sample

    probs = falling(5000).repeat(3, 1)
    seeds = [5, (1 << 63) + 7, 2**32 - 1]
    generators = {row: torch.Generator("cuda").manual_seed(seed) for row, seed in enumerate(seeds)}
    found = [sample(probs, generators) for _ in range(4)]
    signed = [seed - (1 << 64) if seed >= 1 << 63 else seed for seed in seeds]
    for number, tokens in enumerate(found):
        assert torch.equal(tokens, draw(probs, torch.tensor([(seed, number) for seed in signed])))
    assert len({tuple(tokens.tolist()) for tokens in found}) > 1
    assert [generator.initial_seed() for generator in generators.values()] == seeds
    again = {row: torch.Generator("cuda").manual_seed(seed) for row, seed in enumerate(reversed(seeds))}
    assert torch.equal(sample(probs, again).flip(0), found[0])


def test_many_draws_have_the_distribution() -> None:
    from flowrl.workers.sampling_gpu import draw

    vocab, rows = 5000, 1 << 16
    probs = falling(vocab)
    draws = torch.stack([torch.arange(rows) * 7919, torch.arange(rows) % 5], dim=1)
    counts = torch.bincount(draw(probs.expand(rows, vocab).contiguous(), draws), minlength=vocab).double()
    there = probs > 0
    assert counts[~there].sum() == 0
    chi = ((counts - rows * probs)[there] ** 2 / (rows * probs[there])).sum()
    # 4997 degrees of freedom, a deviation of 100: five of them.
    assert abs(float(chi) - 4997) < 500
