"""Per-token losses of policy and critic. Nothing here averages: weights of rows come from `masked.row_weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flowrl.algorithms.checks import check_same_shape
from flowrl.algorithms.kl import MAX_LOG_RATIO, kl_estimate


@dataclass(frozen=True)
class TokenOutputs:
    """What the policy says now of each response token: `log_probs` [T] and `entropy` [T], nats, at the sampling
    temperature, both with gradients."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


PolicyLossFn = Callable[[TokenOutputs, Mapping[str, torch.Tensor]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""A policy loss: (outputs, columns [T] of the batch by name) -> (loss [T], per-token quantities [T] to report)."""


@dataclass(frozen=True)
class PolicyTerms:
    """Parts of the clipped policy loss, all [T]; only `loss` carries gradients.

    `ratio` is new over old probability, `clipped` is 1 where a bound replaced the ratio (no gradient there), and
    `approx_kl` is the k3 estimate of KL(old || new), nats.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    approx_kl: torch.Tensor


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyTerms:
    """Clipped surrogate loss of each token, [T].

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log_probs - old_log_probs) (Schulman et al. 2017,
    equation 7; separate bounds: Yu et al. 2025, section 3.1). Where A < 0 and `dual_clip` = c is given, the loss is at
    most -c A (Ye et al. 2020, equation 5). The log-ratio is clamped to +-20 before `exp`, so one stray token cannot
    make the loss infinite.
    Errors: `ValueError` for different shapes and for bounds that make no sense.
    """
    check_same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(f"need 0 <= clip_low <= 1 and clip_high >= 0; got clip_low={clip_low}, clip_high={clip_high}")
    if dual_clip is not None and dual_clip < 1:
        raise ValueError(
            f"dual_clip={dual_clip} must be at least 1: a smaller bound would cut tokens inside the trust region"
        )
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > ceiling)
        loss = torch.where(beyond, ceiling, loss)
        clipped = clipped | beyond
    with torch.no_grad():
        approx_kl = torch.expm1(log_ratio) - log_ratio
    return PolicyTerms(loss, ratio.detach(), clipped.to(loss.dtype), approx_kl)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of each value, [T], and where clipping decided it, [T] (1 or 0, no gradient).

    With `clip`, the larger of the errors of the value and of the value kept within +-clip of the old one, so a value
    gains nothing by moving further (Schulman et al. 2017, reference implementation).
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    free = (values - returns).square()
    if clip is None:
        return free / 2, torch.zeros_like(free)
    kept = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    bounded = (kept - returns).square()
    return torch.maximum(free, bounded) / 2, (bounded > free).to(free.dtype)


@dataclass(frozen=True)
class ClippedPolicyLoss:
    """The policy loss of PPO and GRPO: clipped surrogate - entropy bonus (+ KL term where `kl_coefficient` is given).

    Needs the columns `old_log_probs` and `advantages`, and `reference_log_probs` for the KL term. Reports per token
    `ratio`, `clipped`, `approx_kl` (to the policy that sampled), `entropy`, and `kl` (to the reference).
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    entropy_coefficient: float
    kl_coefficient: float | None = None
    kl_estimator: str = "k3"

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        terms = policy_loss(
            outputs.log_probs,
            column(columns, "old_log_probs", "actor.log_probs"),
            column(columns, "advantages", "the driver's advantage phase"),
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        loss = terms.loss
        reported = {
            "ratio": terms.ratio,
            "clipped": terms.clipped,
            "approx_kl": terms.approx_kl,
            "entropy": outputs.entropy.detach(),
        }
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * outputs.entropy
        if self.kl_coefficient is not None:
            reference = column(columns, "reference_log_probs", "reference.log_probs")
            kl = kl_estimate(outputs.log_probs, reference, self.kl_estimator)
            loss = loss + self.kl_coefficient * kl
            reported["kl"] = kl.detach()
        return loss, reported


def column(columns: Mapping[str, torch.Tensor], name: str, made_by: str) -> torch.Tensor:
    """A column that a loss needs. Errors: `ValueError` naming it, what is there, and the phase that makes it."""
    if name not in columns:
        there = ", ".join(sorted(columns)) or "none"
        raise ValueError(
            f"the policy loss needs column {name!r}, which {made_by} makes; columns of this batch: {there}"
        )
    return columns[name]
