"""Policy loss from log-probs: nine objectives, their options, one reduction."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlk_ops.ops.objective import Objective, Reduction
from rlk_ops.ops.policy_loss.checks import check_arguments
from rlk_ops.ops.policy_loss.metrics import METRIC_KINDS, loss_metrics, merge_metrics
from rlk_ops.ops.policy_loss.rows import Rows, gather_rows, row_sums
from rlk_ops.ops.policy_loss.surrogate import mismatch_weight, policy_term, reference_kl
from rlk_ops.registry import op

__all__ = ["METRIC_KINDS", "PolicyLoss", "merge_metrics", "policy_loss"]

GRPO, DEFAULT_REDUCTION = Objective(), Reduction()


class PolicyLoss(NamedTuple):
    """What a policy loss returns.

    Attributes:
        loss: () float32 or float64, differentiable: the batch's share of the reduction's denominator.
        metrics: () detached tensors by name; :data:`METRIC_KINDS` says how those of micro-batches combine.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@op(
    check=check_arguments,
    differentiable=("logps", "entropy"),
    masked=("logps", "old_logps", "ref_logps", "rollout_logps", "entropy"),
    invariant=True,
)
def policy_loss(
    logps: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    mask: Tensor | None = None,
    entropy: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    objective: Objective = GRPO,
    reduction: Reduction = DEFAULT_REDUCTION,
) -> PolicyLoss:
    """The loss of a policy-gradient objective from the log-probs of the sampled tokens.

    With d = lp - old, r = exp(d): `policy term * mismatch weight + kl_coef * KL(policy, reference) - entropy_coef *
    entropy` of each token, reduced by `reduction`. :class:`Objective` names the formulas and their sources.

    Args:
        logps: (B, T) floating point, log-probs of the tokens under the policy being trained, in nats.
        advantages: (B,) one a sequence, or (B, T); packed (S,) or (1, T). `gspo` and `gmpo` take one a sequence.
        old_logps: (B, T) under the policy at the start of the update; None: `logps`, held constant, so that the ratio
            is 1 with a live gradient.
        ref_logps: (B, T) under the frozen reference; needed where `kl_coef` is not 0, else only a metric.
        rollout_logps: (B, T) as the rollout engine reported them; needed by a mismatch correction, else only metrics.
        mask: (B, T) boolean or 0/1, True = counts; None: all do.
        entropy: (B, T) of the policy's distributions, in nats; needed where `entropy_coef` is not 0, else a metric.
        cu_seqlens: (S + 1,) integers, ascending from 0 to T: S sequences packed in one row; requires B = 1.
        objective: which loss, with its options.
        reduction: how tokens and sequences are averaged, and the denominator.

    Returns:
        PolicyLoss(loss, metrics). Over the counted tokens: `ratio/min|mean|max` (before clipping; `gspo`: of the
        sequence), `clip/low|high` and `clip/dual` (fractions whose loss the lower clip, the upper clip, `dual_clip` or
        `delta` decides), `kl/k1` = -d and `kl/k3` = r - 1 - d (old against policy), `kl/ref` (where a reference is
        given), `entropy` (where given), `rho/min|mean|max` and `rho/corrected` (where rollout log-probs are given),
        `log_ratio_clamped` (the fraction where any clamp of a log-ratio bites), `tokens` and `sequences` (counts,
        int64). Where no token counts all are 0.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit, or the objective needs an argument that is not
            given; the message names the argument.

    Numerics:
        float32, or float64 for float64 log-probs, whatever the inputs' dtype. Masked slots may hold anything, NaN and
        inf too, in every input: they are selected away before anything is computed. Log-ratios are clamped to
        +-`log_ratio_clamp` before the exponential; for `gspo`, `gmpo` and geometric rho it is the sequence's mean that
        is clamped, for sequence rho its sum. Sums over a sequence follow one fixed tree: with a given denominator a
        sequence's gradient has the same bits whatever the other rows hold, padded on the right or packed.

    Gradients:
        logps and entropy; the other inputs are constants. Masked slots get 0. Where no token counts the loss is 0 with
        a live graph.
    """
    rows = gather_rows(
        logps,
        advantages,
        old_logps=old_logps,
        ref_logps=ref_logps,
        rollout_logps=rollout_logps,
        mask=mask,
        entropy=entropy,
        cu_seqlens=cu_seqlens,
    )
    surrogate, mismatch = policy_term(rows, objective), mismatch_weight(rows, objective)
    kl = None if ref_logps is None else reference_kl(rows, objective)
    loss = surrogate.loss
    if mismatch is not None and mismatch.weight is not None:
        loss = mismatch.weight * loss
    if kl is not None and objective.kl_coef:
        loss = loss + objective.kl_coef * kl[0]
    if rows.entropy is not None and objective.entropy_coef:
        loss = loss - objective.entropy_coef * rows.entropy
    total = reduce_rows(rows, loss, objective, reduction)
    return PolicyLoss(total, loss_metrics(rows, surrogate, mismatch, kl, objective))


def reduce_rows(rows: Rows, loss: Tensor, objective: Objective, reduction: Reduction) -> Tensor:
    """(): the (S, W) token losses over the reduction's denominator."""
    if reduction.resolve(objective) == "sequence_mean":
        per_row = rows.mean(loss)
    else:
        per_row = row_sums(rows.select(loss))
    return per_row.sum() / torch.as_tensor(reduction.divisor(objective, rows.lengths), device=loss.device)


from rlk_ops.ops.policy_loss import cases as _cases  # noqa: E402, F401 - registers the cases of the operator above
