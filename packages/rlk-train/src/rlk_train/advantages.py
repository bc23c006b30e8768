"""From a rollout's rewards to one advantage a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlk_ops import group_advantages
from rlk_rollout.records import Completion, Rollout


@dataclass(frozen=True)
class Advantages:
    """Advantages of a rollout.

    Attributes:
        values: one a completion in rollout order; None where the completion has no reward and is to be dropped.
        metrics: `advantages/abs_mean` over the completions that have one, and `groups/degenerate`, the fraction of
            groups that teach nothing because all advantages are 0 or none is left.
    """

    values: tuple[float | None, ...]
    metrics: Mapping[str, float]


def rollout_advantages(rollout: Rollout, *, scale: str = "group", ddof: int = 1, eps: float = 1e-6) -> Advantages:
    """Group-relative advantages in float64, with failed completions masked out of their group's statistics.

    Args:
        rollout: scored; groups may differ in size.
        scale: `group`, `batch` or `none`: what the centred rewards are divided by.
        ddof: delta degrees of freedom of that standard deviation.
        eps: added to that standard deviation.

    Raises:
        ValueError: a completion was never scored, or its reward is not finite.
    """
    if not rollout.groups:
        return Advantages((), {"advantages/abs_mean": 0.0, "groups/degenerate": 0.0})
    rewards = [
        [_reward(row, i, c) for i, c in enumerate(group.completions)] for row, group in enumerate(rollout.groups)
    ]
    width = max(map(len, rewards))
    padded = [[*row, *[None] * (width - len(row))] for row in rewards]
    scored = torch.tensor([[reward is not None for reward in row] for row in padded])
    table = torch.tensor([[reward or 0.0 for reward in row] for row in padded], dtype=torch.float64)
    table = group_advantages(table, mask=scored, scale=scale, ddof=ddof, eps=eps)
    kept = table[scored]
    degenerate = ((table == 0) | ~scored).all(dim=1)
    metrics = {
        "advantages/abs_mean": float(kept.abs().mean()) if kept.numel() else 0.0,
        "groups/degenerate": float(degenerate.double().mean()),
    }
    values = (zip(row, advantages) for row, advantages in zip(rewards, table.tolist()))
    return Advantages(tuple(None if r is None else a for pairs in values for r, a in pairs), metrics)


def _reward(row: int, column: int, completion: Completion) -> float | None:
    scores = completion.scores
    if scores is None:
        raise ValueError(
            f"completion {column} of group {row} has no scores; score the rollout first "
            "(rlk_score.attach(rollout, rewards=...))"
        )
    if scores.error is not None or scores.reward is None:
        return None
    if not math.isfinite(scores.reward):
        raise ValueError(
            f"completion {column} of group {row}: reward {scores.reward} is not finite; "
            "a failed reward is None with an error"
        )
    return scores.reward
