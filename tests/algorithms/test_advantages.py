from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms import flat_group_fraction, gae, group_relative, leave_one_out, length_mask, token_rewards


def test_gae_gives_the_golden_numbers() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    assert torch.allclose(advantages, torch.tensor([[0.46575, 0.385, 0.3]]), atol=1e-6)
    assert torch.allclose(returns, advantages + values)
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    assert torch.allclose(advantages, torch.tensor([[0.5, 0.4, 0.3]]), atol=1e-6)
    assert torch.allclose(returns, torch.ones(1, 3), atol=1e-6)


def test_gae_does_not_depend_on_what_lies_in_the_padding() -> None:
    """MSK-01: padding takes no part."""
    mask = length_mask(torch.tensor([2, 0, 1]), 4)
    rewards = torch.where(mask, torch.arange(12.0).view(3, 4), float("nan"))
    values = torch.where(mask, torch.ones(3, 4), float("inf"))
    advantages, returns = gae(rewards, values, mask, 0.9, 0.8)
    alone, _ = gae(rewards[:1, :2], values[:1, :2], mask[:1, :2], 0.9, 0.8)
    assert torch.equal(advantages[:1, :2], alone)
    assert advantages[~mask].tolist() == returns[~mask].tolist() == [0.0] * 9
    assert advantages[2, 0].item() == 8.0 - 1.0


def test_gae_steps_over_a_hole_in_the_mask() -> None:
    mask = torch.tensor([[True, False, True]])
    advantages, _ = gae(torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.7]]), mask, 1.0, 0.95)
    joined, _ = gae(
        torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.7]]), torch.ones(1, 2, dtype=torch.bool), 1.0, 0.95
    )
    assert torch.equal(advantages[mask], joined.flatten())
    assert gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), 1.0, 1.0)[0].shape == (2, 0)


def test_score_lands_on_the_last_token_and_nowhere_for_an_empty_row() -> None:
    """REW-06: a zero-length response must not write at index -1."""
    mask = length_mask(torch.tensor([2, 0, 3]), 3)
    rewards = token_rewards(torch.tensor([1.0, 7.0, 2.0]), None, mask, 0.1)
    assert rewards.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]
    assert token_rewards(torch.tensor([7.0]), None, mask[1:2], 0.1).tolist() == [[0.0, 0.0, 0.0]]
    assert token_rewards(torch.tensor([7.0]), torch.zeros(1, 0), torch.zeros(1, 0, dtype=torch.bool), 0.1).shape == (
        1,
        0,
    )


def test_kl_is_subtracted_inside_the_mask_only() -> None:
    mask = length_mask(torch.tensor([2]), 3)
    kl = torch.tensor([[1.0, 2.0, float("nan")]])
    assert torch.allclose(token_rewards(torch.tensor([1.0]), kl, mask, 0.5), torch.tensor([[-0.5, 0.0, 0.0]]))


def test_group_relative_gives_the_golden_numbers() -> None:
    """ALG-02: sample deviation (n - 1)."""
    advantages = group_relative(torch.tensor([1.0, 0, 0, 0]), ["p"] * 4, True, 1e-6)
    assert torch.allclose(advantages, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5)
    plain = group_relative(torch.tensor([1.0, 0, 0, 0]), ["p"] * 4, False, 1e-6)
    assert plain.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_leave_one_out_gives_the_golden_numbers() -> None:
    """ALG-04."""
    advantages = leave_one_out(torch.tensor([1.0, 0, 0, 0]), ["p"] * 4)
    assert torch.allclose(advantages, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1 + 0.2, -1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_groups_have_advantage_exactly_zero(reward: float, dtype: torch.dtype) -> None:
    """ALG-02: no NaN, no rounding noise, whatever the constant."""
    scores = torch.tensor([reward] * 7, dtype=dtype)
    assert group_relative(scores, ["p"] * 7, True, 0.0).tolist() == [0.0] * 7
    assert leave_one_out(scores, ["p"] * 7).tolist() == [0.0] * 7


def test_rounding_alone_is_not_a_difference() -> None:
    """ALG-02: 0.1 + 0.2 and 0.3 are one reward."""
    scores = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64)
    assert group_relative(scores, ["p", "p"], True, 0.0).tolist() == [0.0, 0.0]


def test_flat_groups_are_counted_and_do_not_change_the_others() -> None:
    """ALG-02: mixed batch of one flat and one varied group."""
    scores, groups = torch.tensor([1.0, 1.0, 1.0, 0.0]), ["flat", "flat", "mixed", "mixed"]
    advantages = group_relative(scores, groups, True, 1e-6)
    assert advantages[:2].tolist() == [0.0, 0.0]
    assert torch.equal(advantages[2:], group_relative(scores[2:], groups[2:], True, 1e-6))
    assert flat_group_fraction(scores, groups) == 0.5
    assert flat_group_fraction(torch.zeros(0), []) == 0.0


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_one_has_advantage_zero(normalize_std: bool) -> None:
    """ALG-04: one sample has nothing to be compared with; ragged groups go by id."""
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 5.0]), ["a", "a", "a", "b"]
    advantages = group_relative(scores, groups, normalize_std, 1e-6)
    assert advantages[3].item() == 0.0
    assert torch.equal(advantages[:3], group_relative(scores[:3], groups[:3], normalize_std, 1e-6))
    assert leave_one_out(scores, groups)[3].item() == 0.0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(-3, 3, width=32)), min_size=1, max_size=20), st.randoms())
@settings(max_examples=50, deadline=None)
def test_group_order_does_not_matter(rows: list[tuple[str, float]], random: object) -> None:
    """ALG-04: members may lie anywhere in the batch."""
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    scores, groups = torch.tensor([score for _, score in rows]), [group for group, _ in rows]
    for estimate in (lambda s, g: group_relative(s, g, True, 1e-6), leave_one_out):
        straight = estimate(scores, groups)
        shuffled = estimate(scores[order], [groups[i] for i in order])
        assert torch.allclose(straight[order], shuffled, atol=1e-5)
        assert torch.isfinite(straight).all()


def test_a_score_that_is_not_finite_is_refused_by_row_and_group() -> None:
    """REW-04: one bad row never reaches other rows' advantages."""
    with pytest.raises(ValueError, match=r"row 2 \(group 'q'\) is nan"):
        group_relative(torch.tensor([0.0, 1.0, float("nan")]), ["p", "p", "q"], True, 1e-6)
    with pytest.raises(ValueError, match="2 scores but 3 group ids"):
        group_relative(torch.zeros(2), ["p", "p", "q"], True, 1e-6)


def test_scores_further_apart_than_float32_are_refused() -> None:
    scores = torch.tensor([3.4e38, 3.4e38, 3.4e38, -3.4e38])
    for estimate in (lambda: group_relative(scores, ["a"] * 4, False, 1e-6), lambda: leave_one_out(scores, ["a"] * 4)):
        with pytest.raises(ValueError, match="scale the rewards down"):
            estimate()
    assert torch.isfinite(group_relative(scores, ["a"] * 4, True, 1e-6)).all()
