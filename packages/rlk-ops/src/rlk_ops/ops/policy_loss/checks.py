"""Checks of the arguments that every policy loss shares."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from rlk_ops.ops.arguments import (
    FLOATING,
    INTEGERS,
    check_device,
    check_floating,
    check_integers,
    check_shape,
    describe,
)
from rlk_ops.ops.objective import Objective, Reduction


def check_arguments(
    logps: Tensor,
    advantages: Tensor,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    rollout_logps: Tensor | None,
    mask: Tensor | None,
    entropy: Tensor | None,
    cu_seqlens: Tensor | None,
    objective: Objective,
    reduction: Reduction,
) -> None:
    """Raise unless a call of `policy_loss` is right."""
    check_floating("logps", logps, "(B, T)", ndim=2)
    check_objective(objective, reduction, ref_logps, rollout_logps)
    if objective.entropy_coef and entropy is None:
        raise ValueError(f"entropy: entropy_coef={objective.entropy_coef} needs it; give (B, T) entropies")
    per_token = {"old_logps": old_logps, "ref_logps": ref_logps, "rollout_logps": rollout_logps, "entropy": entropy}
    check_tokens("logps", logps, per_token, mask)
    check_advantages(logps, advantages, cu_seqlens, objective)


def check_objective(
    objective: Objective, reduction: Reduction, ref_logps: Tensor | None, rollout_logps: Tensor | None
) -> None:
    """Raise unless both are configurations that fit each other and what they need is given."""
    if not isinstance(objective, Objective):
        raise TypeError(f"objective: expected an Objective, got {objective!r}; write Objective({objective!r})")
    if not isinstance(reduction, Reduction):
        raise TypeError(f"reduction: expected a Reduction, got {reduction!r}; write Reduction({reduction!r})")
    reduction.resolve(objective)
    if objective.kl_coef and ref_logps is None:
        raise ValueError(
            f"ref_logps: kl_coef={objective.kl_coef} needs them; give the reference's log-probs or drop it"
        )
    if objective.mismatch is not None and rollout_logps is None:
        raise ValueError("rollout_logps: a mismatch correction needs them; give the engine's log-probs or drop it")


def check_tokens(like_name: str, like: Tensor, per_token: Mapping[str, Tensor | None], mask: Tensor | None) -> None:
    """Raise unless every (B, T) argument has the leading shape of `like` and is on its device."""
    shape = tuple(like.shape[:2])
    for name, value in per_token.items():
        if value is not None:
            check_floating(name, value, "(B, T)")
            check_shape(name, value, shape, "(B, T)")
            check_device(name, value, like_name, like)
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *INTEGERS, *FLOATING):
        raise TypeError(f"mask: expected a boolean or 0/1 tensor of shape (B, T), got {describe(mask)}")
    check_shape("mask", mask, shape, "(B, T)")
    check_device("mask", mask, like_name, like)


def check_advantages(like: Tensor, advantages: Tensor, cu_seqlens: Tensor | None, objective: Objective) -> None:
    """Raise unless advantages are one a sequence or one a token, and packing is right."""
    batch, width = like.shape[:2]
    sequences, legend = batch, "(B,) or (B, T)"
    if cu_seqlens is not None:
        _check_packing(cu_seqlens, batch, width)
        check_device("cu_seqlens", cu_seqlens, "advantages", advantages)
        sequences, legend = len(cu_seqlens) - 1, "(S,) or (1, T)"
    check_floating("advantages", advantages, legend)
    check_device("advantages", advantages, "the log-probs, logits or hidden states", like)
    if tuple(advantages.shape) not in ((sequences,), (batch, width)):
        raise ValueError(
            f"advantages: expected shape {legend} = ({sequences},) or ({batch}, {width}), got {tuple(advantages.shape)}"
        )
    if objective.per_sequence and advantages.ndim != 1:
        raise ValueError(
            f"advantages: {objective.name} takes one a sequence, shape ({sequences},), got {tuple(advantages.shape)}"
        )


def _check_packing(cu_seqlens: Tensor, batch: int, width: int) -> None:
    check_integers("cu_seqlens", cu_seqlens, "(S + 1,)")
    if batch != 1:
        raise ValueError(f"cu_seqlens: packed sequences need B = 1, got B = {batch}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"cu_seqlens: expected shape (S + 1,), got {tuple(cu_seqlens.shape)}")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != width or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens: expected integers ascending from 0 to T = {width}, got {_shorten(bounds)}")


def _shorten(bounds: list[int]) -> str:
    return str(bounds) if len(bounds) <= 8 else f"{bounds[:4]} ... {bounds[-4:]}"
