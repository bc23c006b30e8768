"""Numbers about an update: the gap between rollout and trainer, and the merging of micro-batches' metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_LOG_RATIO_CLAMP = 20.0


@torch.no_grad()
def mismatch_statistics(
    logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far the trainer's log-probs at the start of an update are from the rollout's.

    Args:
        logps: (B, T) of the policy that the update starts from.
        rollout_logps: (B, T) as the engine reported them.
        mask: (B, T) bool, True = counts; at least one is.

    Returns:
        () tensors: `drift/mean` and `drift/max` of the absolute difference in nats, `drift/equal` the fraction of
        tokens with the same bits, `rho/mean` and `rho/max` of exp(logps - rollout_logps), clamped at +-20 first.
    """
    difference = logps.detach()[mask] - rollout_logps[mask]
    drift = difference.abs()
    rho = difference.clamp(-_LOG_RATIO_CLAMP, _LOG_RATIO_CLAMP).exp()
    return {
        "drift/mean": drift.mean(),
        "drift/max": drift.max(),
        "drift/equal": (difference == 0).to(drift.dtype).mean(),
        "rho/mean": rho.mean(),
        "rho/max": rho.max(),
    }


class Tally:
    """Merges metrics of micro-batches: `.../min` and `.../max` by extremum, all else by the mean over tokens.

    The values stay on their device until :meth:`result` fetches them all at once.
    """

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[torch.Tensor, int]]] = {}

    def add(self, metrics: Mapping[str, torch.Tensor], tokens: int) -> None:
        """Take in the () metrics of a micro-batch of `tokens` tokens."""
        for name, value in metrics.items():
            self._rows.setdefault(name, []).append((value.detach(), tokens))

    def result(self) -> dict[str, float]:
        """The merged metrics; empty where nothing was added."""
        if not self._rows:
            return {}
        return dict(zip(self._rows, torch.stack([_merged(n, rows) for n, rows in self._rows.items()]).tolist()))


def _merged(name: str, rows: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    if len(rows) == 1:
        return rows[0][0].double()
    values = torch.stack([value for value, _ in rows]).double()
    if name.endswith("/min"):
        return values.min()
    if name.endswith("/max"):
        return values.max()
    weights = torch.tensor([tokens for _, tokens in rows], dtype=torch.float64, device=values.device)
    return (values * weights).sum() / weights.sum()
