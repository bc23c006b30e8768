"""RMSNorm, with and without a residual; also a head's QK-norm, whose H is the head dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_ops.ops.arguments import check_floating, check_positive, check_same, check_shape
from rlk_ops.ops.precision import wide
from rlk_ops.ops.trees import row_sum
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


class _RmsNorm(torch.autograd.Function):
    """Keeps the input, the weight and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(row_sum(wide(x).square()) / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, inverse)
        return (wide(x) * inverse * wide(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        grad, unit = wide(grad), wide(x) * inverse
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            scaled = grad * wide(weight)
            grad_x = (inverse * (scaled - unit * row_sum(scaled * unit) / x.shape[-1])).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * unit).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None


def _check(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> None:
    check_floating("x", x, "(*, H)", min_ndim=1)
    if x.shape[-1] == 0:
        raise ValueError(f"x: expected shape (*, H) with H >= 1, got {tuple(x.shape)}")
    check_floating("weight", weight, "(H,)", ndim=1)
    check_same("weight", weight, "x", x)
    check_shape("weight", weight, (x.shape[-1],), "(H,)")
    check_positive("eps", eps)
    if residual is not None:
        check_floating("residual", residual, "(*, H)")
        check_same("residual", residual, "x", x)
        check_shape("residual", residual, tuple(x.shape), "(*, H)")


@op(check=_check, differentiable=("x", "weight", "residual"), rows=("x", "residual"), invariant=True)
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        x: (*, H), floating point, H >= 1.
        weight: (H,), of the same dtype.
        eps: added to the mean square, above 0.
        residual: (*, H), of the same dtype: added to x first.

    Returns:
        (*, H) of the same dtype; with a residual (normed, summed), where `summed = x + residual` in that dtype and
        `normed` is the norm of exactly that: fused or in two calls, the same bits.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit, or eps <= 0; the message names the argument.

    Numerics:
        float32 (float64 for float64), rounded once: `x / rms` is not rounded before the weight. The row is summed by
        one fixed tree, whatever the number of rows. A row with NaN or inf spoils itself only.

    Gradients:
        x and residual, by the same tree; weight, summed over the rows in float32 and rounded once.
    """
    if residual is None:
        normed: Tensor = _RmsNorm.apply(x, weight, eps)
        return normed
    summed = (wide(x) + wide(residual)).to(x.dtype)
    return _RmsNorm.apply(summed, weight, eps), summed


def _rows(*shape: int, residual: bool = False, **options: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        x, other = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
        weight = 1 + 0.2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
        return {"x": x, "weight": weight, **({"residual": other} if residual else {}), **options}

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    x = torch.randn(20, 3, 8, generator=generator, dtype=torch.float64).permute(2, 1, 0)[::2]
    weight = torch.randn(40, generator=generator, dtype=torch.float64)[::2]
    return {
        "x": x,
        "weight": weight,
        "residual": torch.randn(20, generator=generator, dtype=torch.float64).expand(4, 3, 20),
    }


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    """Rows of zeros, of one large outlier, of small and of large values."""
    arguments = _rows(6, 48)(generator)
    x = arguments["x"]
    x[0] = 0.0
    x[1, 7] = 1e4
    x[2] *= 1e-4
    x[3] *= 1e4
    return arguments


@rms_norm.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _rows(4, 16, 256))
    yield Case("ragged", _rows(7, 37))
    yield Case("heads", _rows(2, 5, 4, 16))
    yield Case("residual", _rows(5, 64, residual=True))
    yield Case("large_eps", _rows(5, 33, eps=0.5))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("empty", _rows(2, 0, 16, residual=True), frozenset({"empty"}))
    yield Case("small", _rows(2, 5), frozenset({"gradcheck"}))
    yield Case("small_residual", _rows(2, 3, residual=True), frozenset({"gradcheck"}))
    yield Case("qwen3_8b", _rows(8192, 4096, residual=True), frozenset({"bench"}))
    yield Case("qwen3_8b_heads", _rows(8192, 32, 128), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_rows(2, 5)(generator), **changes}


@rms_norm.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("weight_size", _wrong(weight=torch.zeros(4, dtype=torch.float64)), ValueError, r"^weight:")
    yield ErrorCase(
        "residual_shape", _wrong(residual=torch.zeros(1, 5, dtype=torch.float64)), ValueError, r"^residual:"
    )
    yield ErrorCase("no_width", _wrong(x=torch.zeros(2, 0, dtype=torch.float64)), ValueError, r"^x:")
    yield ErrorCase("zero_eps", _wrong(eps=0.0), ValueError, r"^eps:")
    yield ErrorCase("mixed_dtypes", _wrong(weight=torch.zeros(5).half()), TypeError, r"^weight:")
    yield ErrorCase("integers", _wrong(x=torch.zeros(2, 5, dtype=torch.int64)), TypeError, r"^x:")
    yield ErrorCase("mixed_devices", _wrong(weight=torch.zeros(5, device="meta")), ValueError, r"^weight:")
