"""One output against the gold path: the worst element, both values, the error and what was allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from rlk_ops.testing.tensors import same_bits
from rlk_ops.testing.tolerance import Tolerance


def error_of(actual: Tensor, gold: Tensor) -> Tensor:
    """Elementwise |actual - gold| in float64; equal infinities differ by 0, a NaN on either side by infinity.

    A finite gold value that overflows the dtype of `actual` counts as the infinity that rounds it.
    """
    rounded = gold.to(actual.dtype).to(torch.float64)
    gold = torch.where(rounded.isinf(), rounded, gold.to(torch.float64))
    wide = actual.to(torch.float64)
    error = torch.where(wide == gold, 0.0, (wide - gold).abs())
    return torch.where(error.isnan(), torch.inf, error)


def worst_finite_error(actual: Tensor, gold: Tensor) -> float:
    """The largest finite error, the unit in which a candidate's error is measured."""
    if actual.shape != gold.shape or actual.numel() == 0:
        return 0.0
    error = error_of(actual.detach().cpu(), gold.detach().cpu())
    return float(torch.where(error.isfinite(), error, 0.0).max())


def compare(
    name: str,
    actual: Tensor | None,
    gold: Tensor,
    tolerance: Tolerance,
    *,
    eager: Tensor | None = None,
    nan_allowed: bool = False,
) -> str | None:
    """None when every element is within its tolerance, else a sentence about the worst one.

    `eager` is the reference in the dtype under test, whose error the tolerance multiplies. NaN passes only where the
    gold output has NaN in the same place and the case says that it may.
    """
    if actual is None:
        return f"{name}: missing"
    if actual.shape != gold.shape:
        return f"{name}: shape {tuple(actual.shape)}, expected {tuple(gold.shape)}"
    if gold.numel() == 0:
        return None
    actual, gold = actual.detach().cpu(), gold.detach().cpu()
    if not gold.is_floating_point():
        return compare_bits(name, actual.to(gold.dtype), gold)
    error = error_of(actual, gold)
    if nan_allowed:
        error = torch.where(actual.isnan() & gold.isnan(), 0.0, error)
    if not bool(error.any()):
        return None
    eager_error = worst_finite_error(eager, gold) if eager is not None else 0.0
    allowed = tolerance.allowed(gold.to(torch.float64), eager_error)
    excess = torch.where(error == 0, 0.0, error / allowed)
    if float(excess.max()) <= 1:
        return None
    wrong = int((excess > 1).sum())
    at = _worst(excess)
    values = f"got {float(actual[at]):.9g}, expected {float(gold[at]):.9g}"
    bound = f"error {float(error[at]):.3g}, allowed {float(allowed[at]):.3g}"
    return f"{name}{list(at)}: {values}; {bound}; {wrong} of {gold.numel()} elements are wrong"


def compare_bits(name: str, actual: Tensor | None, expected: Tensor) -> str | None:
    """None when dtype, shape and every bit agree (any NaN equals any NaN), else a sentence about the worst element."""
    if actual is None:
        return f"{name}: missing"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        given = f"{tuple(actual.shape)} {actual.dtype}"
        return f"{name}: {given}, expected {tuple(expected.shape)} {expected.dtype}"
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    different = ~same_bits(actual, expected)
    if not bool(different.any()):
        return None
    gap = (actual.to(torch.float64) - expected.to(torch.float64)).abs().nan_to_num(torch.inf, torch.inf)
    at = _worst(torch.where(different, gap, -1.0))
    values = f"got {float(actual[at]):.9g}, expected the bits of {float(expected[at]):.9g}"
    return f"{name}{list(at)}: {values}; {int(different.sum())} of {actual.numel()} elements differ"


def _worst(measure: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(measure.argmax(), measure.shape))
