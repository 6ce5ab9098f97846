from __future__ import annotations

import pytest
import torch

from flowrl.algorithms import (
    ClippedPolicyLoss,
    TokenOutputs,
    length_mask,
    policy_loss,
    row_weights,
    value_loss,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}


def terms(ratio: float, advantage: float, **changes: float | None):  # type: ignore[no-untyped-def]
    log_probs = torch.tensor([ratio]).log().requires_grad_()
    result = policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), **{**CLIP, **changes})  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    return result.loss.item(), result.clipped.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.1, 2.0, -2.2, 0.0, -2.2),
        (1.5, 2.0, -2.6, 1.0, 0.0),  # likelier and good: bounded by 1 + 0.3
        (0.5, 2.0, -1.0, 0.0, -1.0),  # good but less likely: pulled back
        (0.5, -2.0, 1.6, 1.0, 0.0),  # bad and less likely: bounded by 1 - 0.2
        (2.0, -2.0, 4.0, 0.0, 4.0),  # bad but likelier: pushed down, below the dual bound
        (5.0, -2.0, 6.0, 1.0, 0.0),  # beyond the dual bound of 3
        (5.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, clipped: float, gradient: float) -> None:
    assert terms(ratio, advantage) == pytest.approx((loss, clipped, gradient), rel=1e-5)


def test_without_dual_clip_a_bad_token_is_not_bounded() -> None:
    assert terms(5.0, -2.0, dual_clip=None) == pytest.approx((10.0, 0.0, 10.0), rel=1e-5)


def test_first_update_has_ratio_one_and_no_divergence() -> None:
    log_probs = torch.tensor([-0.1, -7.0])
    result = policy_loss(log_probs, log_probs, torch.tensor([1.0, -1.0]), **CLIP)
    assert result.ratio.tolist() == [1.0, 1.0]
    assert result.approx_kl.tolist() == result.clipped.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_ratio_that_would_overflow_stays_finite(advantage: float, dual_clip: float | None) -> None:
    log_probs = torch.tensor([0.0, -500.0], requires_grad=True)
    result = policy_loss(
        log_probs,
        torch.tensor([-500.0, 0.0]),
        torch.full((2,), advantage),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=dual_clip,
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    for tensor in (result.loss, result.ratio, result.approx_kl, gradient):
        assert torch.isfinite(tensor).all()


def test_policy_loss_gradient_agrees_with_finite_differences() -> None:
    old = torch.full((5,), -1.0, dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    log_probs = torch.tensor([-0.95, 0.5, -1.9, -0.6, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, **CLIP).loss, (log_probs,))


def test_value_loss_by_hand() -> None:
    values = torch.tensor([1.0, 1.0, -0.2], requires_grad=True)
    loss, clipped = value_loss(values, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([2.0, 2.0, 2.0]), 0.5)
    assert loss.tolist() == pytest.approx([1.125, 0.5, 2.42])
    assert clipped.tolist() == [1.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([0.0, -1.0, -2.2])
    loss, clipped = value_loss(values, torch.zeros(3), torch.full((3,), 2.0), None)
    assert loss.tolist() == pytest.approx([0.5, 0.5, 2.42]) and clipped.sum() == 0


def test_value_loss_gradient_agrees_with_finite_differences() -> None:
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([2.0, -1.0, 0.1], dtype=torch.float64)
    values = torch.tensor([0.9, 0.3, -0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, 0.5)[0], (values,))


def test_combined_loss_is_surrogate_minus_entropy_bonus_plus_kl() -> None:
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([0.5, 0.7], dtype=torch.float64, requires_grad=True)
    columns = {
        "old_log_probs": log_probs.detach(),
        "advantages": torch.tensor([1.0, -2.0], dtype=torch.float64),
        "reference_log_probs": torch.tensor([-1.5, -2.0], dtype=torch.float64),
    }
    loss_fn = ClippedPolicyLoss(0.2, 0.2, 3.0, entropy_coefficient=0.1, kl_coefficient=0.01, kl_estimator="k1")
    loss, reported = loss_fn(TokenOutputs(log_probs, entropy), columns)
    assert loss.tolist() == pytest.approx([-1.0 - 0.05 + 0.005, 2.0 - 0.07])
    assert reported["kl"].tolist() == [0.5, 0.0]
    assert not any(tensor.requires_grad for tensor in reported.values())
    (gradient,) = torch.autograd.grad(loss.sum(), entropy)
    assert gradient.tolist() == pytest.approx([-0.1, -0.1])


def test_a_missing_column_names_the_phase_that_makes_it() -> None:
    """API-02: not a bare KeyError on a remote worker."""
    loss_fn = ClippedPolicyLoss(0.2, 0.2, 3.0, entropy_coefficient=0.0)
    with pytest.raises(ValueError, match="'advantages', which the driver's advantage phase makes.*old_log_probs"):
        loss_fn(TokenOutputs(torch.zeros(1), torch.zeros(1)), {"old_log_probs": torch.zeros(1)})


def test_loss_of_a_batch_without_end_tokens_equals_the_hand_value() -> None:
    """MSK-01: rows cut at the limit, one row that stops at once; the mask is the generated length."""
    lengths = torch.tensor([4, 1, 0])
    mask = length_mask(lengths, 4)
    per_token = policy_loss(torch.zeros(5), torch.zeros(5), torch.tensor([1.0, 1.0, 1.0, 1.0, -3.0]), **CLIP).loss
    weights = row_weights(lengths, "token-mean", num_tokens=5, num_rows=3, max_tokens=4)
    spread = weights[:, None].expand(3, 4)[mask]
    assert float((per_token * spread).sum()) == pytest.approx((-4 + 3) / 5)


def test_no_tokens_at_all_give_loss_zero_and_no_error() -> None:
    """REW-06."""
    empty = torch.zeros(0, requires_grad=True)
    assert policy_loss(empty, torch.zeros(0), torch.zeros(0), **CLIP).loss.sum().item() == 0.0
    assert value_loss(empty, torch.zeros(0), torch.zeros(0), 0.5)[0].sum().item() == 0.0


def test_shapes_and_bounds_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"log_probs \[2\], old_log_probs \[2\], advantages \[1\]"):
        policy_loss(torch.zeros(2), torch.zeros(2), torch.zeros(1), **CLIP)
    with pytest.raises(ValueError, match="dual_clip=0.5"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_low=0.2, clip_high=0.2, dual_clip=0.5)
    with pytest.raises(ValueError, match="clip_low=-0.1"):
        policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), clip_low=-0.1, clip_high=0.2, dual_clip=None)
    with pytest.raises(ValueError, match=r"returns \[3\]"):
        value_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3), None)
