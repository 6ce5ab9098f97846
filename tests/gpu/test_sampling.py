"""Draws of requests with seeds of their own, in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_model
from rollout_scenarios import Setup, prompts
from test_rollout import same_samples
from test_sampling_gpu import FIRST_DRAWS

from tests.gpu.ranks import run

pytestmark = pytest.mark.gpu
LENGTHS = (40, 5, 33, 1)


def falling(vocab: int) -> torch.Tensor:
    """Probabilities of so many ids, two of which never come."""
    probs = torch.softmax(torch.linspace(-2, 1, vocab).roll(5), 0)
    probs[[3, 9]] = 0.0
    return (probs / probs.sum()).to("cuda")


def test_a_gpu_draws_what_the_interpreter_draws() -> None:
    from flowrl.workers.sampling_gpu import draw

    draws = torch.stack([torch.full((24,), 5), torch.arange(24)], dim=1)
    assert draw(falling(12).repeat(24, 1), draws).tolist() == FIRST_DRAWS


def test_the_other_runner_of_vllm_draws_the_same() -> None:
    """Its kernel, asked with the logarithms."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from flowrl.workers.sampling_gpu import draw

    rows = 512
    logits = torch.randn(rows, 32000, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * 3
    draws = torch.stack([torch.arange(rows) * 7919 + (1 << 40), torch.arange(rows) % 700], dim=1)
    seeds, positions = draws.to("cuda").unbind(1)
    expected = gumbel_sample(
        logits, torch.arange(rows, device="cuda"), torch.ones(rows, device="cuda"), seeds.contiguous(),
        positions.contiguous(), apply_temperature=False,
    )  # fmt: skip
    # Rounding decides where two ids are all but equal.
    assert (draw(logits.softmax(1), draws) == expected).sum() >= rows - 1


def test_both_runners_of_vllm_give_a_request_the_same_tokens(tiny: Path) -> None:
    found = [run(1, "tests.gpu.scenarios_gpu:by_runner", tiny, prompts(LENGTHS), second)[0] for second in (True, False)]
    assert [ours for _, ours in found] == [False, True]
    first, *others = [rows for answers, _ in found for rows in answers]
    assert all(same_samples(first, other) for other in others)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="vLLM's groups of one engine want a GPU for each rank")
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_samples_do_not_depend_on_the_layout(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / family, family)
    setups = [Setup(), Setup(tp=2), Setup(pp=2)] + [Setup(tp=2, expert_parallel=True)] * (family == "Qwen3Moe")
    first, *others = run(2, "rollout_scenarios:sample", folder, setups, prompts(LENGTHS))[0]
    assert all(same_samples(first, other) for other in others)


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
