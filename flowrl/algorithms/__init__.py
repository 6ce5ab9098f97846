"""Advantages, losses, divergences and masked reductions: pure functions of tensors, torch only."""

from flowrl.algorithms.advantages import flat_group_fraction, gae, group_relative, leave_one_out, token_rewards
from flowrl.algorithms.distributions import log_probs_and_entropy
from flowrl.algorithms.kl import adaptive_coefficient, kl_estimate
from flowrl.algorithms.losses import (
    ClippedPolicyLoss,
    PolicyLossFn,
    PolicyTerms,
    TokenOutputs,
    column,
    policy_loss,
    value_loss,
)
from flowrl.algorithms.masked import length_mask, masked_mean, row_weights, whiten

__all__ = [
    "ClippedPolicyLoss",
    "PolicyLossFn",
    "PolicyTerms",
    "TokenOutputs",
    "adaptive_coefficient",
    "column",
    "flat_group_fraction",
    "gae",
    "group_relative",
    "kl_estimate",
    "leave_one_out",
    "length_mask",
    "log_probs_and_entropy",
    "masked_mean",
    "policy_loss",
    "row_weights",
    "token_rewards",
    "value_loss",
    "whiten",
]
