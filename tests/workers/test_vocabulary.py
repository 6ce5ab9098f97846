from __future__ import annotations

import math

import pytest
import torch
from processes import run
from scenarios import vocabulary_shards

from flowrl.algorithms.distributions import log_probs_and_entropy
from flowrl.workers.vocabulary import logit_gradients, shard_statistics, token_outputs

INF = float("inf")


def whole(
    logits: list[float], target: int, temperature: float = 1.0, num_valid: int | None = None
) -> tuple[float, float]:
    rows = torch.tensor([logits])
    log_probs, entropy = token_outputs(
        rows, torch.eye(rows.shape[1]), torch.tensor([target]), first_id=0, num_valid=num_valid or rows.shape[1], temperature=temperature
    )  # fmt: skip
    return log_probs.item(), entropy.item()


def test_log_prob_at_a_temperature_is_of_the_divided_logits() -> None:
    """ROL-01: golden value; dividing the log-prob instead gives -0.25386."""
    assert whole([2.0, 0.0], 0, temperature=0.5)[0] == pytest.approx(-0.018150, abs=1e-6)


def test_padding_of_the_vocabulary_takes_no_part() -> None:
    """PAR-05: golden value; six rows of padding that leak give -2.772589."""
    assert whole([0.0] * 16, 3, num_valid=10)[0] == pytest.approx(-2.302585, abs=1e-6)


@pytest.mark.parametrize(("logits", "entropy"), [([0.0, -INF], 0.0), ([0.0, 0.0, -INF], math.log(2))])
def test_entropy_and_its_gradient_are_finite_with_impossible_tokens(logits: list[float], entropy: float) -> None:
    """NUM-03."""
    rows, target = torch.tensor([logits]), torch.tensor([0])
    _, got, largest, normaliser = shard_statistics(rows, target, 0, None)
    assert got.item() == pytest.approx(entropy, abs=1e-6)
    grad = logit_gradients(rows, target, 0, (got, largest, normaliser), torch.ones(1), torch.ones(1))
    assert bool(torch.isfinite(grad).all()) and grad[0, -1] == 0


def test_impossible_target_has_a_finite_log_prob() -> None:
    assert math.isfinite(whole([1.0, 2.0, 3.0], 2, num_valid=2)[0])


def test_no_tokens_give_no_outputs_but_a_gradient_of_zero() -> None:
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    log_probs, entropy = token_outputs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), first_id=0, num_valid=3, temperature=1.0
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and bool((weight.grad == 0).all())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharded_outputs_and_gradients_equal_those_of_the_whole_vocabulary(world_size: int) -> None:
    """NUM-03, PAR-05: tp 1, 2, 4, with five masked ids, in chunks."""
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 16) * 3, torch.tensor([0, 10, 3, 7, 8, 1, 2])
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(leaf, targets, 0.5, 11)
    (log_probs.sum() + 0.3 * entropy.square().sum()).backward()
    assert leaf.grad is not None
    for chunk in (3, 100):
        for got in run(world_size, vocabulary_shards, logits, targets, 11, chunk):
            for value, expected in zip(got, (log_probs, entropy, leaf.grad, leaf.grad.t() @ logits), strict=True):
                assert torch.allclose(value, expected.detach(), atol=1e-5)
