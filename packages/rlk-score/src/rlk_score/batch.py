"""From completions to micro-batches and back: the one walk that log-prob and reward-model scoring share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlk_rollout.causal_lm import evaluation
from rlk_rollout.records import Completion
from rlk_rollout.tokens import TokenBatch, plan_micro_batches
from rlk_score.models import ScoringModel, SequenceRewardModel


def over_micro_batches(
    model: ScoringModel | SequenceRewardModel,
    completions: Sequence[Completion],
    token_budget: int,
    forward: Callable[[TokenBatch], Any],
) -> tuple[list[Any], int]:
    """Run `forward` over token-budget micro-batches in scoring mode.

    Args:
        model: its module's device and eval mode are used.
        completions: N completions.
        token_budget: padded tokens of one micro-batch.
        forward: batch -> a (B, ...) tensor or a tuple of such.

    Returns:
        Per completion, in the given order, its row on the CPU (a tuple of rows where forward returned a tuple); and
        the number of micro-batches.
    """
    parameter = next(model.module.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    rows: list[Any] = [None] * len(completions)
    lengths = [len(c.prompt_ids) + len(c.token_ids) for c in completions]
    plan = plan_micro_batches(lengths, token_budget)
    with evaluation(model.module):
        for indices in plan:
            batch = TokenBatch.from_completions([completions[i] for i in indices]).to(device)
            output = forward(batch)
            parts = output if isinstance(output, tuple) else (output,)
            on_cpu = [part.cpu().unbind(0) for part in parts]
            for place, index in enumerate(indices):
                row = tuple(part[place] for part in on_cpu)
                rows[index] = row if isinstance(output, tuple) else row[0]
    return rows, len(plan)
