"""From scores to advantages: the step of a driver that turns a sampled batch into a training batch.

The formulas live in `algorithms/`; this file only names their columns. `estimate` is the place where a new algorithm's
type meets its formula: a recipe registers its own with `@estimate.register`.
"""

from __future__ import annotations

from functools import singledispatch

import torch

from flowrl.algorithms.advantages import flat_group_fraction, gae, group_relative, token_rewards
from flowrl.algorithms.kl import kl_estimate
from flowrl.algorithms.masked import masked_mean, whiten
from flowrl.config.schema import GAE, GRPO, KL, AdaptiveKL, Algorithm, RewardKL
from flowrl.protocol import DataProto, Metric, MissingColumnError, Ragged

MADE_BY = {
    "response_ids": "rollout.generate", "old_log_probs": "actor.log_probs", "reference_log_probs": "reference.log_probs",
    "old_values": "critic.values", "score": "run.rewards",
}  # fmt: skip


def ragged(batch: DataProto, name: str, step: str) -> Ragged:
    """The token column `name`; an error names the step that needs it and the call that makes it."""
    column = require(batch, name, step)
    if not isinstance(column, Ragged):
        raise ValueError(
            f"{step} needs {name!r} as a ragged column over response tokens; it is dense {tuple(column.shape)}"
        )
    return column


def require(batch: DataProto, name: str, step: str) -> torch.Tensor | Ragged:
    """The column `name`, or a `MissingColumnError` that says what should have made it."""
    if name not in batch:
        maker = f"; {MADE_BY[name]} makes it" if name in MADE_BY else ""
        raise MissingColumnError(f"{step} needs column {name!r}{maker}; the batch has {', '.join(batch.names)}")
    return batch[name]


def scores(batch: DataProto, step: str) -> torch.Tensor:
    """The dense column `score`, [N] float32."""
    column = require(batch, "score", step)
    if isinstance(column, Ragged):
        raise ValueError(f"{step} needs 'score' dense, one number per row; it is ragged")
    return column


@singledispatch
def estimate(algorithm: Algorithm, batch: DataProto, kl_coefficient: float, kl: KL) -> DataProto:
    """`batch` with the column `advantages` (and `returns` for a critic), ragged over response tokens, and metrics.

    `kl_coefficient` is the weight of a KL term in the reward (0 where the term goes elsewhere or nowhere).
    """
    raise ValueError(f"no estimator for {type(algorithm).__name__}; register one: @estimate.register")


@estimate.register
def _gae(algorithm: GAE, batch: DataProto, kl_coefficient: float, kl: KL) -> DataProto:
    old_values = ragged(batch, "old_values", "estimating advantages (gae)")
    values, mask = old_values.padded()
    rewards = shaped_rewards(batch, mask, kl_coefficient, kl, "gae")
    advantages, returns = gae(rewards, values, mask, algorithm.gamma, algorithm.lam)
    explained = _explained_variance(values, returns, mask)
    if algorithm.whiten:
        advantages = whiten(advantages, mask)
    lengths = old_values.lengths
    return batch.with_columns(
        advantages=Ragged.from_padded(advantages, lengths), returns=Ragged.from_padded(returns, lengths)
    ).with_metrics(
        {
            "value/mean": Metric.mean(float((values * mask).sum()), float(mask.sum())),
            "value/explained_variance": explained,
        }
    )


@estimate.register
def _grpo(algorithm: GRPO, batch: DataProto, kl_coefficient: float, kl: KL) -> DataProto:
    lengths = batch.lengths("response_ids")
    mask = torch.arange(int(lengths.max()) if len(lengths) else 0)[None, :] < lengths[:, None]
    totals = shaped_rewards(batch, mask, kl_coefficient, kl, "grpo").sum(-1)
    totals = torch.where(lengths > 0, totals, scores(batch, "grpo"))  # an empty response still counts in its group
    groups = batch.values["prompt_id"]
    advantages = group_relative(totals, groups, algorithm.normalize_std, algorithm.eps)
    flat = Metric.mean(flat_group_fraction(totals, groups), 1.0)
    return per_sequence(batch, advantages).with_metrics({"group/flat_fraction": flat})


def per_sequence(batch: DataProto, advantages: torch.Tensor) -> DataProto:
    """`batch` with `advantages` [N] repeated over the response tokens of each row."""
    lengths = batch.lengths("response_ids")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return batch.with_columns(advantages=Ragged(advantages.float().repeat_interleave(lengths), offsets))


def shaped_rewards(batch: DataProto, mask: torch.Tensor, kl_coefficient: float, kl: KL, step: str) -> torch.Tensor:
    """[B, T] rewards: minus the KL term on each token, plus the score on the last one."""
    penalty = None
    if isinstance(kl, RewardKL | AdaptiveKL):
        old = ragged(batch, "old_log_probs", f"the KL term ({step})").padded()[0]
        reference = ragged(batch, "reference_log_probs", f"the KL term ({step})").padded()[0]
        penalty = kl_estimate(old, reference, kl.estimator) * mask
    return token_rewards(scores(batch, step), penalty, mask, kl_coefficient)


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """What a sampled and scored batch says: reward, lengths, KL to the reference, trainer against rollout."""
    score = scores(batch, "reporting")
    lengths = batch.lengths("response_ids").float()
    metrics = {
        "reward/mean": float(score.mean()),
        "reward/std": float(score.std()) if len(score) > 1 else 0.0,
        "response_tokens/mean": float(lengths.mean()),
        "response_tokens/max": float(lengths.max()),
        "response_tokens/clip_fraction": sum(reason == "length" for reason in batch.values["finish_reason"])
        / len(batch),
        "prompt_tokens/mean": float(batch.lengths("prompt_ids").float().mean()),
    }
    if "old_log_probs" not in batch:
        return metrics
    old, mask = ragged(batch, "old_log_probs", "reporting").padded()
    if "rollout_log_probs" in batch:
        difference = (old - ragged(batch, "rollout_log_probs", "reporting").padded()[0]).abs() * mask
        metrics["rollout/logprob_diff_mean"] = float(masked_mean(difference, mask))
        metrics["rollout/logprob_diff_max"] = float(difference.max()) if difference.numel() else 0.0
    if "reference_log_probs" in batch:
        reference = ragged(batch, "reference_log_probs", "reporting").padded()[0]
        metrics["kl/reference"] = float(masked_mean(kl_estimate(old, reference, "k1"), mask))
        metrics["kl/reference_k3"] = float(masked_mean(kl_estimate(old, reference, "k3"), mask))
    return metrics


def reward_kl_coefficient(kl: KL) -> float:
    """The first weight of the KL term in the reward; 0 where it is in the loss or off."""
    return kl.coefficient if isinstance(kl, RewardKL | AdaptiveKL) else 0.0


def _explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> Metric:
    """1 - Var(returns - values) / Var(returns) over response tokens; 0 where returns do not vary."""
    kept_returns, kept_values = returns[mask.bool()], values[mask.bool()]
    if kept_returns.numel() < 2 or float(kept_returns.var()) == 0.0:
        return Metric.mean(0.0, 1.0)
    return Metric.mean(1.0 - float((kept_returns - kept_values).var() / kept_returns.var()), 1.0)
