"""The gap between the log-probs that the rollout recorded and those of the trainer at the start of an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def rollout_gap(logps: torch.Tensor, rollout_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(N,) absolute difference in nats at the N counted tokens of (B, T) log-probs; `mask` is (B, T) bool."""
    return (logps.detach()[mask] - rollout_logps[mask]).abs()


def drift(gaps: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """() tensors over all gaps: `drift/mean`, `drift/max`, and `drift/equal`, the fraction that is 0; {} for no gap."""
    if not gaps:
        return {}
    joined = torch.cat(list(gaps)).double()
    return {"drift/mean": joined.mean(), "drift/max": joined.max(), "drift/equal": (joined == 0).double().mean()}
