"""From scores to advantages: pure functions of padded [B, T] tensors or of one score per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowrl.algorithms.checks import check_dims, check_mask, check_same_shape


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor | None, mask: torch.Tensor, coefficient: float
) -> torch.Tensor:
    """Reward of every token, [B, T] float32: -coefficient * `kl` [B, T], and the score [B] on a row's last token.

    A row without tokens gets no reward anywhere. Source: Ouyang et al. 2022, section 3.5.
    """
    check_dims(1, scores=scores)
    check_dims(2, mask=mask)
    check_mask(mask)
    if scores.shape[0] != mask.shape[0]:
        raise ValueError(f"{scores.shape[0]} scores for a mask of {mask.shape[0]} rows")
    rewards = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if kl is not None:
        check_same_shape(kl=kl, mask=mask)
        rewards = torch.where(mask, -coefficient * kl.float(), 0.0)
    rows = mask.any(dim=1).nonzero().squeeze(1)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1)[rows].amax(dim=1) if rows.numel() else rows
    rewards[rows, last] += scores[rows].float()
    return rewards


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: advantages and returns, both [B, T], 0 outside `mask`.

    `rewards`, `values` [B, T]; `mask` [B, T] bool. The value after a row's last token is 0. Tokens outside the mask are
    stepped over: the value that follows a token is that of the next token inside the mask.
    returns = advantages + values. Source: Schulman et al. 2016, equation 16.
    """
    check_dims(2, rewards=rewards)
    check_same_shape(rewards=rewards, values=values, mask=mask)
    check_mask(mask)
    rewards = torch.where(mask, rewards, 0)
    values = torch.where(mask, values, 0)
    advantages = torch.zeros_like(values)
    following_value = torch.zeros_like(values[:, 0]) if values.shape[1] else values.new_zeros(values.shape[0])
    following_advantage = following_value
    for position in reversed(range(values.shape[1])):
        inside = mask[:, position]
        delta = rewards[:, position] + gamma * following_value - values[:, position]
        advantage = delta + gamma * lam * following_advantage
        advantages[:, position] = torch.where(inside, advantage, 0)
        following_advantage = torch.where(inside, advantage, following_advantage)
        following_value = torch.where(inside, values[:, position], following_value)
    return advantages, advantages + values


def group_relative(scores: torch.Tensor, groups: Sequence[str], normalize_std: bool, eps: float) -> torch.Tensor:
    """Advantage [B] of each row against the other samples of its prompt: score - group mean.

    With `normalize_std`, divided by the group's *sample* deviation (n - 1) plus `eps`: [1, 0, 0, 0] gives
    [1.5, -0.5, -0.5, -0.5]. Groups are told apart by id, never by position, and may differ in size. A group whose scores
    are all equal, a group of one among them, gives exactly 0.
    Source: Shao et al. 2024, section 4.1.2; without division Liu et al. 2025, section 3.2.
    Errors: `ValueError` for different lengths, for a score that is not finite (naming row and group), and for scores so far apart
    that their difference is not.
    """
    advantages = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    for indices in _groups(scores, groups):
        members = scores[indices].double()
        if _is_flat(members):
            continue
        centred = members - members.mean()
        advantages[indices] = centred / (members.std() + eps) if normalize_std else centred
    return _in_float32(advantages, scores)


def leave_one_out(scores: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    """Advantage [B] of each row against the mean of the *other* samples of its prompt.

    [1, 0, 0, 0] gives [1, -1/3, -1/3, -1/3]. Equal scores, and a group of one (nothing to compare with), give exactly 0.
    Source: Kool et al. 2019, `Buy 4 REINFORCE samples, get a baseline for free`, equation 8. Errors as `group_relative`.
    """
    advantages = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    for indices in _groups(scores, groups):
        members = scores[indices].double()
        if not _is_flat(members):
            advantages[indices] = (members - members.mean()) * (len(indices) / (len(indices) - 1))
    return _in_float32(advantages, scores)


def _in_float32(advantages: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Error: `ValueError` where a difference of scores is beyond float32."""
    found = advantages.to(torch.float32)
    if not bool(torch.isfinite(found).all()):
        least, most = float(scores.min()), float(scores.max())
        raise ValueError(f"scores from {least:g} to {most:g} differ by more than float32 holds; scale the rewards down")
    return found


def flat_group_fraction(scores: torch.Tensor, groups: Sequence[str]) -> float:
    """Share of groups, 0 to 1, whose scores [B] are all equal: they teach a group-relative estimator nothing."""
    members = _groups(scores, groups)
    return sum(_is_flat(scores[indices]) for indices in members) / max(len(members), 1)


def _groups(scores: torch.Tensor, groups: Sequence[str]) -> list[torch.Tensor]:
    """Row indices of each group, in order of first appearance."""
    check_dims(1, scores=scores)
    if len(groups) != scores.shape[0]:
        raise ValueError(f"{scores.shape[0]} scores but {len(groups)} group ids")
    finite = torch.isfinite(scores)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(f"score of row {row} (group {groups[row]!r}) is {float(scores[row])}; scores must be finite")
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return [torch.tensor(rows, dtype=torch.int64, device=scores.device) for rows in members.values()]


def _is_flat(members: torch.Tensor) -> bool:
    """Equal up to float32: 0.1 + 0.2 and 0.3 are one score, not a difference to be blown up by a tiny deviation."""
    rounded = members.float()
    return bool(rounded.max() == rounded.min())
