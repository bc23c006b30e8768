"""Metrics of a policy loss, and how those of micro-batches combine into a window's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlk_ops.ops.objective import Objective
from rlk_ops.ops.policy_loss.rows import Rows
from rlk_ops.ops.policy_loss.surrogate import MismatchWeight, Surrogate

METRIC_KINDS: Mapping[str, str] = {
    "ratio/min": "min",
    "ratio/mean": "token_mean",
    "ratio/max": "max",
    "clip/low": "token_mean",
    "clip/high": "token_mean",
    "clip/dual": "token_mean",
    "kl/k1": "token_mean",
    "kl/k3": "token_mean",
    "kl/ref": "token_mean",
    "entropy": "token_mean",
    "rho/mean": "token_mean",
    "rho/max": "max",
    "rho/min": "min",
    "rho/corrected": "token_mean",
    "log_ratio_clamped": "token_mean",
    "tokens": "sum",
    "sequences": "sum",
}
"""Metric to how micro-batches combine: `token_mean` (weighted by `tokens`), `min`, `max` or `sum`."""


def merge_metrics(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of a window from those of its micro-batches, as :data:`METRIC_KINDS` says, without a synchronisation.

    Args:
        parts: metrics of `policy_loss`, with the same names each. Those without tokens count for nothing.

    Returns:
        () tensors by name; a mean or an extremum over no tokens is 0. Empty where `parts` is.
    """
    if not parts:
        return {}
    tokens = torch.stack([part["tokens"] for part in parts])
    return {name: _merge(METRIC_KINDS[name], torch.stack([part[name] for part in parts]), tokens) for name in parts[0]}


def _merge(kind: str, values: Tensor, tokens: Tensor) -> Tensor:
    if kind == "sum":
        return values.sum()
    if kind == "token_mean":
        return (values * tokens).sum() / tokens.sum().clamp_min(1)
    return _extremum(kind, values, tokens > 0)


def _extremum(kind: str, values: Tensor, kept: Tensor) -> Tensor:
    """The least or largest of the kept values; 0 where none is."""
    sign = 1 if kind == "max" else -1
    beyond = torch.full((1,), -torch.inf, dtype=values.dtype, device=values.device)
    best = torch.cat(((sign * values).masked_fill(~kept, -torch.inf).flatten(), beyond)).max()
    return torch.where(kept.any(), sign * best, torch.zeros_like(best))


@torch.no_grad()
def loss_metrics(
    rows: Rows,
    surrogate: Surrogate,
    mismatch: MismatchWeight | None,
    kl: tuple[Tensor, Tensor] | None,
    objective: Objective,
) -> dict[str, Tensor]:
    """() tensors by the names of :data:`METRIC_KINDS`; see `policy_loss` for their meaning."""
    tokens = rows.lengths.sum()
    log_ratio = (rows.logps - rows.old_logps).clamp(-objective.log_ratio_clamp, objective.log_ratio_clamp)
    clamped = surrogate.clamped
    means = {
        "ratio/mean": surrogate.ratio,
        "clip/low": surrogate.low,
        "clip/high": surrogate.high,
        "clip/dual": surrogate.dual,
        "kl/k1": -log_ratio,
        "kl/k3": torch.expm1(log_ratio) - log_ratio,
    }
    extrema = {"ratio/min": surrogate.ratio, "ratio/max": surrogate.ratio}
    if kl is not None:
        means["kl/ref"] = kl[0]
        clamped = clamped | kl[1]
    if rows.entropy is not None:
        means["entropy"] = rows.entropy
    if mismatch is not None:
        means |= {"rho/mean": mismatch.rho, "rho/corrected": mismatch.corrected}
        extrema |= {"rho/min": mismatch.rho, "rho/max": mismatch.rho}
        clamped = clamped | mismatch.clamped
    means["log_ratio_clamped"] = clamped
    dtype, count = rows.logps.dtype, tokens.clamp_min(1)
    return {
        **{name: rows.select(values.to(dtype)).sum() / count for name, values in means.items()},
        **{name: _extremum(METRIC_KINDS[name], values, rows.mask) for name, values in extrema.items()},
        "tokens": tokens,
        "sequences": (rows.lengths > 0).sum(),
    }
