from __future__ import annotations

import math

import pytest
import torch

from flowrl.algorithms import log_probs_and_entropy

MINUS_INF = float("-inf")


def test_temperature_divides_logits_and_not_log_probs() -> None:
    """ROL-01: golden numbers of log-probs at a sampling temperature."""
    logits, target = torch.tensor([2.0, 0.0]), torch.tensor(0)
    assert log_probs_and_entropy(logits, target, 0.5, 2)[0].item() == pytest.approx(-0.018150, abs=1e-6)
    assert log_probs_and_entropy(logits, target, 1.0, 2)[0].item() == pytest.approx(-0.126928, abs=1e-6)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [([0.0, MINUS_INF], 0.0), ([0.0, 0.0, MINUS_INF], math.log(2)), ([1.0, 1.0, 1.0], math.log(3))],
)
def test_entropy_with_impossible_tokens_is_finite_with_its_gradient(logits: list[float], expected: float) -> None:
    """NUM-03: probability zero adds nothing, forward and backward."""
    scores = torch.tensor(logits, requires_grad=True)
    log_prob, entropy = log_probs_and_entropy(scores, torch.tensor(0), 1.0, len(logits))
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    for output in (entropy, log_prob):
        (gradient,) = torch.autograd.grad(output, scores, retain_graph=True)
        assert torch.isfinite(gradient).all()


def test_top_k_renormalises() -> None:
    logits = torch.tensor([[3.0, 2.0, MINUS_INF, MINUS_INF]] * 2)
    log_probs, _ = log_probs_and_entropy(logits, torch.tensor([0, 1]), 1.0, 4)
    assert log_probs.tolist() == pytest.approx([-0.313262, -1.313262], abs=1e-6)


def test_vocabulary_padding_takes_no_part() -> None:
    """PAR-05: uniform over 10 real ids whatever 6 padding rows hold; NUM-03: their gradient is zero."""
    logits = torch.zeros(16)
    logits[10:] = 50.0
    logits.requires_grad_()
    log_prob, entropy = log_probs_and_entropy(logits, torch.tensor(3), 1.0, 10)
    assert log_prob.item() == pytest.approx(-2.302585, abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(10), abs=1e-6)
    (log_prob + entropy).backward()
    assert logits.grad is not None and logits.grad[10:].tolist() == [0.0] * 6
    assert log_probs_and_entropy(logits, torch.tensor(12), 1.0, 10)[0].item() == MINUS_INF


def test_equals_torch_categorical_and_finite_differences() -> None:
    logits = torch.randn(3, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(12).view(3, 4) % 7
    log_probs, entropy = log_probs_and_entropy(logits, targets, 0.7, 7)
    distribution = torch.distributions.Categorical(logits=logits / 0.7)
    assert torch.allclose(log_probs, distribution.log_prob(targets))
    assert torch.allclose(entropy, distribution.entropy())
    small = logits[0, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_probs_and_entropy(x, targets[0, :2], 0.7, 5), (small,))


def test_bfloat16_logits_are_computed_in_float32() -> None:
    log_probs, entropy = log_probs_and_entropy(torch.zeros(2, 5, dtype=torch.bfloat16), torch.tensor([0, 1]), 1.0, 5)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert log_probs[0].item() == pytest.approx(-math.log(5), abs=1e-6)


def test_bad_arguments_are_refused_with_numbers() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"\[2, 5\].*\[3\]"):
        log_probs_and_entropy(logits, torch.zeros(3, dtype=torch.int64), 1.0, 5)
    with pytest.raises(ValueError, match="temperature=0"):
        log_probs_and_entropy(logits, torch.zeros(2, dtype=torch.int64), 0.0, 5)
    with pytest.raises(ValueError, match="num_valid=6"):
        log_probs_and_entropy(logits, torch.zeros(2, dtype=torch.int64), 1.0, 6)
