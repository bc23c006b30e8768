"""The policy term of each objective, the mismatch weight and the KL penalty, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_ops.ops.objective import Objective
from rlk_ops.ops.policy_loss.rows import Rows


@dataclass(frozen=True)
class Surrogate:
    """The policy term and what happened on the way; (S, W) each, anything at masked slots.

    Attributes:
        loss: differentiable, without the mismatch weight.
        ratio: before clipping, constant; the sequence's for `gspo`, else the token's.
        low: bool, the lower clip decides the loss.
        high: bool, the upper clip decides the loss.
        dual: bool, `dual_clip` or `delta` decides the loss.
        clamped: bool, the clamp of the log-ratio bites.
    """

    loss: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor
    clamped: Tensor


def policy_term(rows: Rows, objective: Objective) -> Surrogate:
    """The objective's per-token policy loss; a sequence's loss stands at each of its tokens."""
    return _TERMS[objective.name](rows, objective)


def _clipped(rows: Rows, objective: Objective, mean: Tensor | None = None) -> Surrogate:
    log_ratio = rows.logps - rows.old_logps if mean is None else rows.spread(mean)
    advantages, (low, high) = rows.advantages, objective.clip_range
    ratio = _clamp(log_ratio, objective).exp()
    below = (advantages < 0) & (ratio < 1 - low)
    above = (advantages > 0) & (ratio > 1 + high)
    capped = (advantages < 0) & (ratio > _cap(objective))
    used = ratio.masked_fill(below, 1 - low).masked_fill(above, 1 + high).masked_fill(capped, _cap(objective))
    return Surrogate(-used * advantages, ratio.detach(), below, above, capped, _outside(log_ratio, objective))


def _cap(objective: Objective) -> float:
    """Where A < 0: the largest ratio that counts. min(-r A, -c A) is -min(r, c) A, so `dual_clip` is one too."""
    return min(bound for bound in (objective.dual_clip, objective.delta, math.inf) if bound is not None)


def _gspo(rows: Rows, objective: Objective) -> Surrogate:
    return _clipped(rows, objective, rows.mean(rows.logps - rows.old_logps))


def _cispo(rows: Rows, objective: Objective) -> Surrogate:
    log_ratio = (rows.logps - rows.old_logps).detach()
    ratio = _clamp(log_ratio, objective).exp()
    low, high = objective.clip_range
    bounds = (0.0, objective.cispo_upper) if objective.cispo_bound == "upper" else (1 - low, 1 + high)
    loss = -ratio.clamp(*bounds) * rows.advantages * rows.logps
    never = torch.zeros_like(rows.mask)
    return Surrogate(loss, ratio, ratio < bounds[0], ratio > bounds[1], never, _outside(log_ratio, objective))


def _sapo(rows: Rows, objective: Objective) -> Surrogate:
    log_ratio = rows.logps - rows.old_logps
    ratio = _clamp(log_ratio, objective).exp()
    positive, other = (torch.full_like(ratio, tau) for tau in objective.sapo_tau)
    tau = torch.where(rows.advantages > 0, positive, other)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * rows.advantages
    return _unclipped(rows, objective, loss)


def _reinforce(rows: Rows, objective: Objective) -> Surrogate:
    return _unclipped(rows, objective, -rows.advantages * rows.logps)


def _unclipped(rows: Rows, objective: Objective, loss: Tensor) -> Surrogate:
    log_ratio = (rows.logps - rows.old_logps).detach()
    never = torch.zeros_like(rows.mask)
    return Surrogate(loss, _clamp(log_ratio, objective).exp(), never, never, never, _outside(log_ratio, objective))


def _gmpo(rows: Rows, objective: Objective) -> Surrogate:
    log_ratio, advantages = rows.logps - rows.old_logps, rows.advantages
    low, high = objective.clip_range
    below = (advantages < 0) & (log_ratio < -low)
    above = (advantages > 0) & (log_ratio > high)
    kept = log_ratio.masked_fill(below, -low).masked_fill(above, high).masked_fill(advantages == 0, 0.0)
    dual = torch.zeros_like(rows.mask)
    if objective.delta is not None:
        dual = (advantages < 0) & (log_ratio > math.log(objective.delta))
        kept = kept.masked_fill(dual, math.log(objective.delta))
    mean = rows.spread(rows.mean(kept))
    used = _clamp(mean, objective).exp()
    if objective.dual_clip is not None:
        capped = (advantages < 0) & (used > objective.dual_clip)
        used, dual = used.masked_fill(capped, objective.dual_clip), dual | capped
    ratio = _clamp(log_ratio.detach(), objective).exp()
    return Surrogate(-used * advantages, ratio, below, above, dual, _outside(mean, objective))


_TERMS: dict[str, Callable[[Rows, Objective], Surrogate]] = {
    "grpo": _clipped,
    "bnpo": _clipped,
    "dr_grpo": _clipped,
    "dapo": _clipped,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "reinforce": _reinforce,
}


@dataclass(frozen=True)
class MismatchWeight:
    """rho and what the correction makes of it; (S, W) each, constant, anything at masked slots.

    Attributes:
        rho: exp(old - rollout) at the correction's level, the token's where there is no correction.
        weight: of the policy term, or None where there is no correction.
        corrected: bool, the weight is not rho.
        clamped: bool, the clamp of the log-ratio bites.
    """

    rho: Tensor
    weight: Tensor | None
    corrected: Tensor
    clamped: Tensor


def mismatch_weight(rows: Rows, objective: Objective) -> MismatchWeight | None:
    """The ratio of trainer to rollout engine and its weight; None where no rollout log-probs are given."""
    if rows.rollout_logps is None:
        return None
    log_rho, mismatch = rows.old_logps - rows.rollout_logps, objective.mismatch
    if mismatch is not None and mismatch.level != "token":
        mean = rows.mean(log_rho)
        total = mean if mismatch.level == "geometric" else mean * rows.lengths.unsqueeze(1)
        log_rho = rows.spread(total)
    rho = _clamp(log_rho, objective).exp()
    clamped = _outside(log_rho, objective)
    if mismatch is None:
        return MismatchWeight(rho, None, torch.zeros_like(rows.mask), clamped)
    lower = 0.0 if mismatch.lower is None else mismatch.lower
    upper = math.inf if mismatch.upper is None else mismatch.upper
    corrected = (rho < lower) | (rho > upper)
    weight = rho.clamp(lower, upper) if mismatch.action == "truncate" else rho.masked_fill(corrected, 0.0)
    return MismatchWeight(rho, weight, corrected, clamped)


def reference_kl(rows: Rows, objective: Objective) -> tuple[Tensor, Tensor]:
    """(S, W) KL estimates towards the reference, differentiable, and where the clamp bites; anything at masked slots.

    Inside the clamp the gradient of the bias-corrected form is r k; outside, every form that clamps has gradient 0.
    """
    assert rows.ref_logps is not None
    difference = rows.logps - rows.ref_logps
    clamped = _outside(difference, objective)
    bounded = _clamp(difference, objective)
    if objective.kl == "k1":
        return difference, torch.zeros_like(clamped)
    if objective.kl == "abs":
        return difference.abs(), torch.zeros_like(clamped)
    if objective.kl == "k2":
        return bounded.square() / 2, clamped
    estimate = torch.expm1(-bounded) + bounded
    if objective.kl_bias_corrected:
        estimate = estimate * _clamp(rows.logps - rows.old_logps, objective).exp()
        # The product rule would leave k3 times the ratio's gradient outside the clamp, with the wrong sign for k < 0.
        estimate = torch.where(clamped, estimate.detach(), estimate)
    return estimate, clamped


def _clamp(log_ratio: Tensor, objective: Objective) -> Tensor:
    return log_ratio.clamp(-objective.log_ratio_clamp, objective.log_ratio_clamp)


def _outside(log_ratio: Tensor, objective: Objective) -> Tensor:
    return log_ratio.detach().abs() > objective.log_ratio_clamp
