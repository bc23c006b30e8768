"""The objective over micro-batches: pure functions from tensors to a share of the window's loss and its metrics.

An optimizer window is cut into micro-batches, and perhaps over ranks. Its denominator is computed once, over all of
them, and each micro-batch's loss is its share: shares add up to the window's loss and their gradients to its gradient,
however the window was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlk_ops import Objective, PolicyLoss, Reduction, policy_loss
from rlk_train.contract import PolicyOutput
from rlk_train.samples import MicroBatch

ReduceSum = Callable[[float], float]


def one_rank(value: float) -> float:
    """The cross-rank sum of a worker that is alone: the value itself."""
    return value


def window_reduction(
    objective: Objective, reduction: Reduction, lengths: Sequence[int], *, reduce_sum: ReduceSum = one_rank
) -> Reduction:
    """The reduction with the denominator of a whole optimizer window.

    Args:
        objective: decides what the mode `default` means.
        reduction: mode and `max_length`.
        lengths: completion tokens of every sequence of this rank's part of the window.
        reduce_sum: sum of one number over all ranks; every rank must call it alike.

    Returns:
        The reduction whose denominator is that of all ranks together, so that summing the ranks' gradients gives the
        window's. `bnpo`, whose mean is over the rank's own tokens, gets them times the number of ranks: the sum is then
        the mean of the ranks' means. An empty window has denominator 1: its shares are 0.
    """
    own = reduction.window_denominator(objective, lengths)
    mode = reduction.resolve(objective)
    if mode == "token_sum":
        total = own
    elif objective.name == "bnpo" and mode == "token_mean":
        total = own * reduce_sum(1.0)
    else:
        total = reduce_sum(own)
    return replace(reduction, denominator=max(total, 1.0))


def loss_share(output: PolicyOutput, batch: MicroBatch, *, objective: Objective, reduction: Reduction) -> PolicyLoss:
    """A micro-batch's share of the window's loss.

    Args:
        output: the policy's log-probs (B, T), differentiable, and entropy (B, T) where it was asked for.
        batch: advantages and the other log-probs.
        objective: of the family of `rlk_ops.policy_loss`.
        reduction: what :func:`window_reduction` gave.
    """
    return policy_loss(
        output.logps,
        batch.advantages,
        old_logps=batch.old_logps,
        ref_logps=batch.ref_logps,
        rollout_logps=batch.rollout_logps,
        mask=batch.tokens.completion_mask,
        entropy=output.entropy,
        objective=objective,
        reduction=reduction,
    )
