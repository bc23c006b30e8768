"""From completions to tensors: one dense, right-padded batch for a causal forward; the plan of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rlk_rollout.records import Completion


@dataclass(frozen=True)
class TokenBatch:
    """Prompts with their completions. B sequences of at most S tokens, completions of at most T, supports of at most K.

    Attributes:
        input_ids: (B, S) int64, right-padded.
        attention_mask: (B, S) bool, True on real tokens.
        position_ids: (B, S) int64, counted from each row's first token.
        completion_ids: (B, T) int64; the padding id outside the completion.
        completion_mask: (B, T) bool, True on completion tokens.
        predict_at: (B, T) int64: the column of `input_ids` whose hidden state predicts the completion token; 0 outside.
        support: (B, T, K) int64 kept token ids padded with -1, a row of -1 alone where a token was drawn from the whole
            vocabulary; None where all were.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    predict_at: Tensor
    support: Tensor | None = None

    @classmethod
    def from_completions(cls, completions: Sequence[Completion], *, pad_id: int = 0) -> TokenBatch:
        """The batch of these completions, on the CPU.

        Args:
            completions: at least one; a completion may be empty, a prompt may not.
            pad_id: fills the slots outside a row.

        Raises:
            ValueError: no completion, or a completion whose prompt is empty (nothing predicts its first token).
        """
        if not completions:
            raise ValueError("completions: expected at least one")
        for index, completion in enumerate(completions):
            if not completion.prompt_ids:
                raise ValueError(f"completion {index} has an empty prompt; nothing predicts its first token")
        prompts = torch.tensor([len(c.prompt_ids) for c in completions])
        lengths = torch.tensor([len(c.token_ids) for c in completions])
        columns = torch.arange(int((prompts + lengths).max()))
        steps = torch.arange(max(1, int(lengths.max())))
        attention_mask = columns < (prompts + lengths)[:, None]
        completion_mask = steps < lengths[:, None]
        return cls(
            input_ids=_fill([c.prompt_ids + c.token_ids for c in completions], len(columns), pad_id),
            attention_mask=attention_mask,
            position_ids=torch.where(attention_mask, columns, 0),
            completion_ids=_fill([c.token_ids for c in completions], len(steps), pad_id),
            completion_mask=completion_mask,
            predict_at=torch.where(completion_mask, prompts[:, None] - 1 + steps, 0),
            support=_support(completions, len(steps)),
        )

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        columns: dict[str, Tensor | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: column.to(device) for name, column in columns.items() if column is not None}
        return replace(self, **moved)


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cut sequences into micro-batches whose padded size stays within a budget.

    Sequences are taken longest first, so a batch pads little; the order depends on nothing but the lengths.

    Args:
        lengths: tokens of each sequence.
        token_budget: sequences x longest of a micro-batch at the most; a longer sequence goes alone.

    Returns:
        Indices into `lengths`, every one exactly once.

    Raises:
        ValueError: the budget is below 1.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget={token_budget}: expected at least 1")
    plan: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= token_budget:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def _fill(rows: Sequence[Sequence[int]], width: int, pad: int) -> Tensor:
    return torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], dtype=torch.int64)


def _support(completions: Sequence[Completion], width: int) -> Tensor | None:
    kept = [completion.support or (None,) * len(completion.token_ids) for completion in completions]
    widest = max((len(ids) for row in kept for ids in row if ids is not None), default=0)
    if widest == 0:
        return None
    empty = [-1] * widest
    padded = [[_pad(ids or (), widest) for ids in row] + [empty] * (width - len(row)) for row in kept]
    return torch.tensor(padded, dtype=torch.int64)


def _pad(ids: Sequence[int], width: int) -> list[int]:
    return [*ids, *[-1] * (width - len(ids))]
