"""Estimates of the divergence from a reference policy, and the controller of its weight."""

from __future__ import annotations

import math

import torch

from flowrl.algorithms.checks import check_same_shape

ESTIMATORS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8: far outside any trust region, still far from float32's overflow when squared."""


def kl_estimate(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate [...] of KL(policy || reference) from samples of the policy.

    With d = reference - policy log-prob: k1 = -d (unbiased, may be negative), k2 = d^2 / 2, k3 = exp(d) - 1 - d
    (unbiased, never negative). Source: Schulman 2020, `Approximating KL divergence`.
    In k3, d is clamped at 20 before `exp`; a token beyond it has a finite value and no gradient.
    Errors: `ValueError` for an unknown estimator or different shapes.
    """
    check_same_shape(log_probs=log_probs, reference_log_probs=reference_log_probs)
    difference = reference_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(max=MAX_LOG_RATIO)
        # For small d, exp(d) - 1 - d loses every digit in float32; expm1 keeps them.
        return torch.expm1(bounded) - bounded
    raise ValueError(f"unknown KL estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")


def adaptive_coefficient(coefficient: float, kl: float, target: float, horizon: int, num_samples: int) -> float:
    """Next weight of the KL term, after `num_samples` samples whose mean KL per token was `kl` (nats).

    Multiplies by 1 + error * num_samples / horizon with error = kl / target - 1 clipped to +-0.2; more than one horizon
    at once counts as one, so a weight never turns negative. Source: Ziegler et al. 2019, section 2.2.
    Errors: `ValueError` for a KL that is not finite and for a target or horizon that is not positive.
    """
    if not math.isfinite(kl):
        raise ValueError(f"the KL coefficient cannot follow a KL of {kl}")
    if target <= 0 or horizon < 1 or num_samples < 0:
        raise ValueError(f"need target > 0, horizon >= 1, samples >= 0; got {target}, {horizon}, {num_samples}")
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * min(num_samples / horizon, 1.0))
