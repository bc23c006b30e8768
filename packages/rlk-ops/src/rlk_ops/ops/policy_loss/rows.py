"""Sequences as rows: masked slots selected away, packed sequences unpacked, sums over a row by one fixed tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlk_ops.ops.precision import wide_dtype


@dataclass(frozen=True)
class Rows:
    """S sequences in W columns, float32 or float64; every masked slot holds 0.

    Attributes:
        logps: (S, W), differentiable.
        old_logps: (S, W), constant.
        advantages: (S, W), constant.
        ref_logps: (S, W), constant, or None.
        rollout_logps: (S, W), constant, or None.
        entropy: (S, W), differentiable, or None.
        mask: (S, W) bool, True = counts.
        lengths: (S,) int64, counted tokens.
    """

    logps: Tensor
    old_logps: Tensor
    advantages: Tensor
    ref_logps: Tensor | None
    rollout_logps: Tensor | None
    entropy: Tensor | None
    mask: Tensor
    lengths: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """(S, 1): the mean of (S, W) values over each row's counted tokens; 0 for an empty row."""
        return row_sums(self.select(values)) / self.lengths.clamp_min(1).unsqueeze(1)

    def spread(self, values: Tensor) -> Tensor:
        """(S, W): one value a row, at each of its columns."""
        return spread_rows(values, self.mask.shape[1])

    def select(self, values: Tensor) -> Tensor:
        """(S, W) values with 0 at masked slots, which get a zero gradient."""
        return values.masked_fill(~self.mask, 0.0)


def row_sums(values: Tensor) -> Tensor:
    """(S, W) -> (S, 1) by one fixed tree, halves added element by element: columns of 0 on the right change no bit."""
    width = values.shape[1]
    if width == 0:
        return values.sum(dim=1, keepdim=True)
    values = torch.nn.functional.pad(values, (0, (1 << (width - 1).bit_length()) - width))
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values


def spread_rows(values: Tensor, width: int) -> Tensor:
    """(S, 1) -> (S, width) by doubling, so that the backward sums by the tree of :func:`row_sums`."""
    while values.shape[1] < width:
        values = torch.cat((values, values), dim=1)
    return values[:, :width]


def gather_rows(
    logps: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    rollout_logps: Tensor | None,
    mask: Tensor | None,
    entropy: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Rows:
    """The arguments of `policy_loss`, checked before, as rows."""
    columns = None if cu_seqlens is None else _packed_columns(cu_seqlens)
    kept = torch.ones_like(logps, dtype=torch.bool) if mask is None else mask != 0
    if columns is not None:
        index, inside = columns
        kept = kept[0][index] & inside
    dtype = wide_dtype(logps.dtype)

    def rows(values: Tensor) -> Tensor:
        if values.ndim == 1:
            values = values.unsqueeze(1).expand(kept.shape)
        elif columns is not None:
            values = values[0][columns[0]]
        return values.to(dtype).masked_fill(~kept, 0.0)

    def constant(values: Tensor | None) -> Tensor | None:
        return None if values is None else rows(values.detach())

    current = rows(logps)
    old = constant(old_logps)
    return Rows(
        logps=current,
        old_logps=current.detach() if old is None else old,
        advantages=rows(advantages.detach()),
        ref_logps=constant(ref_logps),
        rollout_logps=constant(rollout_logps),
        entropy=None if entropy is None else rows(entropy),
        mask=kept,
        lengths=kept.sum(dim=1),
    )


def _packed_columns(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """(S, W) positions in the packed row, and whether each is inside its sequence (else position 0)."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    width = int(lengths.max()) if lengths.numel() else 0
    offset = torch.arange(width, device=cu_seqlens.device)
    inside = offset < lengths.unsqueeze(1)
    return (starts.unsqueeze(1) + offset).masked_fill(~inside, 0), inside
