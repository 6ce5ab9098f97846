from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run
from scenarios import vocabulary_shards

from flowrl.algorithms.distributions import log_probs_and_entropy
from flowrl.resharding.measure.meter import Meter
from flowrl.workers import vocabulary
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


def by_rows(function: Callable[..., torch.Tensor], result_dim: int) -> Callable[..., torch.Tensor]:
    """What a GPU's one kernel does: nothing of the size of the logits is between its argument and its result."""

    def call(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        def row(value: Any, number: int) -> Any:
            return value[number : number + 1] if isinstance(value, torch.Tensor) else value

        parts = [function(row(logits, n), *(row(value, n) for value in rest)) for n in range(len(logits))]
        return torch.cat(parts, dim=result_dim)

    return call


@pytest.mark.parametrize(("backward", "most"), [(False, 1.5), (True, 3.5)])
def test_a_chunk_of_logits_is_gone_before_the_next_is_made(
    backward: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of logits; backward its gradients beside it, in rows and together."""
    for name, dim in (("largest", 0), ("sums", 1), ("gradients", 0)):
        monkeypatch.setattr(vocabulary, f"_fused_{name}", by_rows(vars(vocabulary)[f"_{name}"], dim))
    hidden, weight = torch.randn(256, 4, requires_grad=backward), torch.randn(1024, 4, requires_grad=backward)
    targets = torch.arange(256)
    with Meter([hidden, weight, targets]) as meter, torch.set_grad_enabled(backward):
        log_probs, _ = token_outputs(
            hidden, weight, targets, first_id=0, num_valid=1024, temperature=1.0, chunk_tokens=64
        )
        if backward:
            log_probs.sum().backward()
    assert 1.0 <= meter.peak_bytes / (64 * 1024 * 4) <= most
