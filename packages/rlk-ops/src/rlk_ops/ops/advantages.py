"""Group-relative advantages: how much better a completion did than the others of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import FLOATING, INTEGERS, check_count, check_device, check_floating, check_shape, describe
from rlk_ops.ops.precision import wide
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase

SCALES = ("group", "batch", "none")


def _check(rewards: Tensor, mask: Tensor | None, scale: str, ddof: int, eps: float) -> None:
    check_floating("rewards", rewards, "(P, G)", ndim=2)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *INTEGERS, *FLOATING):
            raise TypeError(f"mask: expected a boolean or 0/1 tensor of shape (P, G), got {describe(mask)}")
        check_shape("mask", mask, tuple(rewards.shape), "(P, G)")
        check_device("mask", mask, "rewards", rewards)
    if scale not in SCALES:
        raise ValueError(f"scale: expected one of {', '.join(SCALES)}, got {scale!r}")
    check_count("ddof", ddof, low=0)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a number of at least 0, got {eps!r}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps: expected a finite number of at least 0, got {eps}")


@op(check=_check, rows=("rewards", "mask"), masked=("rewards",))
@torch.no_grad()
def group_advantages(
    rewards: Tensor, *, mask: Tensor | None = None, scale: str = "group", ddof: int = 1, eps: float = 1e-6
) -> Tensor:
    """`(R - mean) / (std + eps)` within each group (GRPO; Shao et al., 2024).

    Args:
        rewards: (P, G) floating point: P prompts, G samples each.
        mask: (P, G) boolean or 0/1, True = counts; a failed sample is masked out of its group's statistics.
        scale: what the centred rewards are divided by: the standard deviation of the `group`, that of the whole
            `batch` (of all counted rewards), or `none`: nothing (Dr. GRPO; Liu et al., 2025).
        ddof: delta degrees of freedom of the standard deviation, at least 0.
        eps: added to the standard deviation, at least 0.

    Returns:
        (P, G) float32, float64 for float64. Masked slots are 0. A group with one counted sample gives 0, a constant
        group exactly 0, and so does one with at most `ddof` samples under `group`.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message names the argument.

    Numerics:
        Two passes, deviations from the mean first. A group is centred on its first counted reward before its mean is
        taken, so equal rewards cancel exactly. Masked slots may hold anything.

    Gradients:
        None: advantages are constants of a policy gradient.
    """
    kept = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask != 0
    centred = _centre(wide(rewards), kept, dim=1)
    if scale == "none":
        return centred
    if scale == "group":
        deviation = _deviation(centred, kept, ddof, dim=1)
    else:
        flat = _centre(wide(rewards).reshape(1, -1), kept.reshape(1, -1), dim=1)
        deviation = _deviation(flat, kept.reshape(1, -1), ddof, dim=1)
    scaled = centred / (deviation + eps)
    return scaled.masked_fill((centred == 0) | (deviation == 0), 0.0)


def _centre(rewards: Tensor, kept: Tensor, dim: int) -> Tensor:
    """Rewards minus their group's mean; 0 where not kept."""
    if rewards.numel() == 0:
        return rewards.clone()
    first = rewards.gather(dim, kept.int().argmax(dim, keepdim=True))
    shifted = (rewards - first).masked_fill(~kept, 0.0)
    count = kept.sum(dim, keepdim=True).clamp_min(1)
    return (shifted - shifted.sum(dim, keepdim=True) / count).masked_fill(~kept, 0.0)


def _deviation(centred: Tensor, kept: Tensor, ddof: int, dim: int) -> Tensor:
    """Standard deviation, (P, 1); 0 where at most `ddof` are kept."""
    count = kept.sum(dim, keepdim=True)
    variance = centred.square().sum(dim, keepdim=True) / (count - ddof).clamp_min(1)
    return variance.masked_fill(count <= ddof, 0.0).sqrt()


def _rewards(groups: int, size: int, **options: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        return {"rewards": torch.randn(groups, size, generator=generator, dtype=torch.float64), **options}

    return build


def _failed(scale: str) -> Callable[[torch.Generator], dict[str, Any]]:
    """Failed samples with NaN rewards; one group of one, one empty, one constant."""

    def build(generator: torch.Generator) -> dict[str, Any]:
        rewards = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        kept = torch.rand(6, 5, generator=generator) < 0.7
        kept[0] = torch.tensor([False, True, False, False, False])
        kept[1] = False
        rewards[2] = 0.1
        return {"rewards": rewards.masked_fill(~kept, torch.nan), "mask": kept, "scale": scale}

    return build


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    """A large offset under a small spread, tiny and huge rewards."""
    rewards = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    rewards[0] = 1000 + rewards[0].round()
    rewards[1] *= 1e-3
    rewards[2] *= 1e4
    return {"rewards": rewards}


@group_advantages.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _rewards(32, 8))
    yield Case("ragged", _rewards(7, 5, ddof=0, eps=1e-3))
    yield Case("extreme", _extreme)
    yield Case("strided", lambda generator: {"rewards": _rewards(8, 12)(generator)["rewards"].T[::2]})
    yield Case("empty", _rewards(0, 4), frozenset({"empty"}))
    yield Case("no_sample", _rewards(3, 0), frozenset({"empty"}))
    yield Case("single", _rewards(3, 1))
    for scale in SCALES:
        yield Case(f"scale_{scale}", _rewards(5, 6, scale=scale))
        yield Case(f"failed_{scale}", _failed(scale))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_rewards(2, 3)(generator), **changes}


@group_advantages.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("rank", _wrong(rewards=torch.zeros(3, dtype=torch.float64)), ValueError, r"^rewards:")
    yield ErrorCase("integers", _wrong(rewards=torch.zeros(2, 3, dtype=torch.int64)), TypeError, r"^rewards:")
    yield ErrorCase("mask_shape", _wrong(mask=torch.ones(3, 2, dtype=torch.bool)), ValueError, r"^mask:")
    yield ErrorCase("mask_dtype", _wrong(mask=[[1, 1, 1]] * 2), TypeError, r"^mask:")
    yield ErrorCase("scale", _wrong(scale="std"), ValueError, r"^scale:")
    yield ErrorCase("ddof", _wrong(ddof=-1), ValueError, r"^ddof:")
    yield ErrorCase("eps", _wrong(eps=-1e-6), ValueError, r"^eps:")
