"""From a scored batch to advantages: which columns, which formula, which errors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from flowrl.config.schema import GAE, GRPO, KL, AdaptiveKL, Algorithm, LossKL, NoKL, RewardKL
from flowrl.estimate import batch_metrics, estimate, per_sequence, reward_kl_coefficient
from flowrl.protocol import DataProto, MissingColumnError, Ragged


@dataclass(frozen=True)
class Mine(Algorithm):
    """A user's algorithm."""


def scored(scores: list[float], lengths: list[int], groups: list[str]) -> DataProto:
    total = [torch.arange(n) for n in lengths]
    zeros = [torch.zeros(n) for n in lengths]
    return DataProto(
        {
            "prompt_ids": Ragged.from_rows([[1, 2]] * len(lengths), dtype=torch.int64),
            "response_ids": Ragged.from_rows(total, dtype=torch.int64),
            "old_log_probs": Ragged.from_rows(zeros, dtype=torch.float32),
            "score": torch.tensor(scores),
        },
        values={"prompt_id": groups, "finish_reason": ["length"] + ["stop"] * (len(groups) - 1)},
    )


def column(batch: DataProto, name: str) -> Ragged:
    found = batch[name]
    assert isinstance(found, Ragged)
    return found


def test_grpo_repeats_one_advantage_over_the_tokens_of_a_row() -> None:
    """ALG-02: sample deviation; an empty row keeps its place in the group and gets no token."""
    batch = estimate(GRPO(), scored([1.0, 0.0, 0.0, 0.0], [2, 1, 0, 3], ["a"] * 4), 0.0, NoKL())
    rows = column(batch, "advantages").rows()
    assert [len(row) for row in rows] == [2, 1, 0, 3]
    assert torch.allclose(rows[0], torch.full((2,), 1.5), atol=1e-5) and torch.allclose(
        rows[3], torch.full((3,), -0.5), atol=1e-5
    )
    assert batch.metrics["group/flat_fraction"].value == 0.0


def test_groups_are_told_apart_by_prompt_id_not_by_position() -> None:
    """ALG-04, PAR-03: ragged groups, interleaved."""
    batch = scored([1.0, 5.0, 0.0, 5.0, 0.5], [1, 1, 1, 1, 1], ["a", "b", "a", "b", "a"])
    advantages = column(estimate(GRPO(), batch, 0.0, NoKL()), "advantages").values
    assert advantages[1] == advantages[3] == 0.0
    assert torch.allclose(advantages[[0, 2, 4]], torch.tensor([1.0, -1.0, 0.0]), atol=1e-4)


def test_gae_gives_advantages_and_returns_over_response_tokens() -> None:
    batch = scored([1.0, 0.0], [3, 2], ["a", "b"]).with_columns(
        old_values=Ragged.from_rows([[0.5, 0.6, 0.7], [0.1, 0.2]], dtype=torch.float32)
    )
    done = estimate(GAE(lam=0.95, whiten=False), batch, 0.0, NoKL())
    assert torch.allclose(column(done, "advantages").rows()[0], torch.tensor([0.46575, 0.385, 0.3]))
    assert torch.allclose(column(done, "returns").rows()[0], torch.tensor([0.96575, 0.985, 1.0]))


@pytest.mark.parametrize("kl", [RewardKL(coefficient=0.5), AdaptiveKL(coefficient=0.5)])
def test_a_kl_term_in_the_reward_is_subtracted_per_token(kl: KL) -> None:
    batch = scored([1.0], [2], ["a"]).with_columns(
        reference_log_probs=Ragged.from_rows([[-0.1, -0.3]], dtype=torch.float32),
        old_values=Ragged.from_rows([[0.0, 0.0]], dtype=torch.float32),
    )
    returns = column(estimate(GAE(whiten=False), batch, reward_kl_coefficient(kl), kl), "returns").rows()[0]
    assert torch.allclose(returns, torch.tensor([1 - 0.5 * 0.4, 1 - 0.5 * 0.3]))
    assert reward_kl_coefficient(LossKL()) == reward_kl_coefficient(NoKL()) == 0.0


def test_a_missing_column_names_the_step_and_what_makes_it() -> None:
    """API-02."""
    with pytest.raises(MissingColumnError, match=r"gae.*'old_values'.*critic.values makes it"):
        estimate(GAE(), scored([1.0], [1], ["a"]), 0.0, NoKL())
    with pytest.raises(MissingColumnError, match=r"KL term \(gae\).*'reference_log_probs'.*reference.log_probs"):
        batch = scored([1.0], [1], ["a"]).with_columns(old_values=Ragged.from_rows([[0.0]], dtype=torch.float32))
        estimate(GAE(), batch, 0.1, RewardKL())


def test_an_algorithm_without_estimator_is_refused_and_a_user_can_add_one() -> None:
    """API-02: an estimator sees extra fields of the row."""
    batch = scored([1.0, 2.0], [1, 2], ["a", "b"]).with_values(row=[{"weight": 2.0}, {"weight": 3.0}])
    with pytest.raises(ValueError, match=r"no estimator for Mine.*estimate.register"):
        estimate(Mine(), batch, 0.0, NoKL())

    @estimate.register
    def _mine(algorithm: Mine, batch: DataProto, kl_coefficient: float, kl: KL) -> DataProto:
        return per_sequence(batch, torch.tensor([row["weight"] for row in batch.values["row"]]))

    assert column(estimate(Mine(), batch, 0.0, NoKL()), "advantages").values.tolist() == [2.0, 3.0, 3.0]


def test_batch_metrics_count_lengths_and_finish_reasons_exactly() -> None:
    """MSK-01, MSK-03: truncation by finish reason."""
    metrics = batch_metrics(scored([1.0, 0.0, 0.5], [4, 0, 2], ["a", "a", "b"]))
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == pytest.approx(0.5)
    assert metrics["response_tokens/mean"] == 2.0 and metrics["response_tokens/clip_fraction"] == pytest.approx(1 / 3)
    assert "kl/reference" not in metrics and "rollout/logprob_diff_mean" not in metrics


def test_a_step_in_which_every_response_is_empty_has_finite_metrics() -> None:
    """REW-06."""
    batch = scored([0.0, 0.0], [0, 0], ["a", "a"]).with_columns(
        reference_log_probs=Ragged.from_rows([[], []], dtype=torch.float32),
        rollout_log_probs=Ragged.from_rows([[], []], dtype=torch.float32),
        old_values=Ragged.from_rows([[], []], dtype=torch.float32),
    )
    metrics = batch_metrics(batch)
    assert metrics["kl/reference"] == 0.0 and metrics["rollout/logprob_diff_max"] == 0.0
    for algorithm in (GRPO(), GAE()):
        assert column(estimate(algorithm, batch, 0.1, RewardKL()), "advantages").values.numel() == 0
