from __future__ import annotations

import pytest
import torch

from flowrl.algorithms import adaptive_coefficient, kl_estimate


def test_estimators_give_the_golden_numbers() -> None:
    policy, reference = torch.zeros(2), torch.tensor([0.5, -0.5])
    assert torch.allclose(kl_estimate(policy, reference, "k3"), torch.tensor([0.148721, 0.106531]), atol=1e-6)
    assert kl_estimate(policy, reference, "k1").tolist() == [-0.5, 0.5]
    assert kl_estimate(policy, reference, "k2").tolist() == [0.125, 0.125]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_policies_have_no_divergence(estimator: str) -> None:
    x = torch.tensor([-3.0, 0.0])
    assert kl_estimate(x, x, estimator).tolist() == [0.0, 0.0]


def test_k3_stays_finite_and_keeps_small_differences() -> None:
    policy = torch.tensor([-1000.0, 0.0, -1e-4], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([0.0, -1000.0, 0.0]), "k3")
    estimate.sum().backward()
    assert torch.isfinite(estimate).all()
    assert estimate[2].item() == pytest.approx(0.5e-8, rel=1e-3)
    assert policy.grad is not None and torch.isfinite(policy.grad).all()
    assert policy.grad[1].item() == 1.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_agree_with_finite_differences(estimator: str) -> None:
    policy = torch.tensor([-1.0, -0.2, -2.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.7, -0.9, -2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), (policy,))


def test_unknown_estimator_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; known: k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match=r"\[2\].*\[1\]"):
        kl_estimate(torch.zeros(2), torch.zeros(1), "k1")


def test_coefficient_follows_the_target() -> None:
    assert adaptive_coefficient(0.1, 0.5, 0.1, 1000, 100) == pytest.approx(0.1 * 1.02)
    assert adaptive_coefficient(0.1, 0.0, 0.1, 1000, 100) == pytest.approx(0.1 * 0.98)
    assert adaptive_coefficient(0.1, 0.101, 0.1, 1000, 100) == pytest.approx(0.1 * 1.001)
    assert adaptive_coefficient(0.1, 0.0, 0.1, 10, 10_000) == pytest.approx(0.08)
    with pytest.raises(ValueError, match="nan"):
        adaptive_coefficient(0.1, float("nan"), 0.1, 1000, 100)
