"""Sampling in one launch, run by Triton's interpreter: no GPU is needed to see what it draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch, triton
import triton.language as tl
from flowrl.workers import sampling_gpu
from flowrl.workers.sampling_gpu import draw, _signed

sampling_gpu.BLOCK = 8
vocab, rows = 12, 300
probs = torch.softmax(torch.linspace(-2, 1, vocab).roll(5), 0)
probs[[3, 9]] = 0.0
probs /= probs.sum()
table = probs.repeat(rows, 1)
seeds = torch.stack([torch.full((rows,), 5), torch.arange(rows)], dim=1)
found = draw(table, seeds)

# The distribution: many draws of one seed, and one draw of many seeds.
other = torch.stack([torch.arange(rows) * 7919 + 11, torch.full((rows,), 3)], dim=1)
for tokens in (found, draw(table, other)):
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[3] == counts[9] == 0
    there = probs > 0
    chi = ((counts - rows * probs)[there] ** 2 / (rows * probs[there])).sum()
    # 9 degrees of freedom: beyond 36 once in 25,000 samples.
    assert chi < 36, chi

# A row's draw depends on its seed and number alone: not on its row, its neighbours, or the memory around it.
order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:60]
wide = torch.full((60, vocab + 8), 9.0)
wide[:, :vocab] = table[order]
assert torch.equal(draw(wide[:, :vocab], seeds[order]), found[order])
sampling_gpu.BLOCK = 64
assert torch.equal(draw(table[:60], seeds[:60]), found[:60])
print(found[:24].tolist())

# The noise is that of vLLM's other runner: log-probabilities and Gumbel noise from (seed, position), the largest sum.
@triton.jit
def uniforms(seeds, numbers, vocab: tl.constexpr, size: tl.constexpr):
    row, ids = tl.program_id(0), tl.arange(0, size)
    key = tl.randint(tl.load(seeds + 2 * row), tl.load(seeds + 2 * row + 1))
    tl.store(numbers + row * vocab + ids, tl.rand(key, ids), mask=ids < vocab)

numbers = torch.empty(rows, vocab)
uniforms[(rows,)](seeds, numbers, vocab, 16)
assert 0.4 < numbers.mean() < 0.6 and numbers.min() < 0.01
gumbel = -(-(-numbers.double().clamp(4.6566127342e-10)).log1p()).log()
assert torch.equal((table.double().log() + gumbel).argmax(1), found)

# What is certain is drawn, whatever the noise.
one = torch.zeros(50, vocab)
one[torch.arange(50), torch.arange(50) % vocab] = 1.0
assert torch.equal(draw(one, seeds[:50]), torch.arange(50) % vocab)

# Both halves of a seed count.
pairs = torch.tensor([[1, 0], [1 + (1 << 32), 0], [1, 1], [_signed((1 << 63) + 1), 0]])
flat = torch.full((4, vocab), 1.0 / vocab)
assert len(set(draw(flat, pairs).tolist())) >= 3
assert _signed((1 << 64) - 1) == -1 and _signed(5) == 5 and _signed(1 << 63) == -(1 << 63)
"""
FIRST_DRAWS = [6, 4, 4, 4, 4, 4, 0, 4, 4, 11, 1, 2, 2, 4, 11, 1, 11, 5, 4, 4, 4, 0, 2, 4]
"""Of seed 5: a GPU draws the same (tests/gpu/test_sampling.py)."""


def test_draws_have_the_distribution_and_depend_on_seed_and_number_alone() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == FIRST_DRAWS
