"""SiLU, and the sigmoid under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_ops.ops.arguments import check_floating
from rlk_ops.ops.precision import wide
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


def sigmoids(x: Tensor) -> tuple[Tensor, Tensor]:
    """`sigmoid(x)` and `sigmoid(-x)`, each to full relative precision.

    Written with `exp` because on a CPU `torch.sigmoid` gives an element other bits when it falls into a vector's tail,
    so a row's bits would depend on its place (8 of 400 float32 elements, seen with torch 2.13); `exp` does not.
    """
    small = torch.exp(-x.abs())
    larger, smaller = 1 / (1 + small), small / (1 + small)
    positive = x >= 0
    return torch.where(positive, larger, smaller), torch.where(positive, smaller, larger)


def silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x sigmoid(x)` and its derivative `sigmoid(x) (1 + x sigmoid(-x))`."""
    up, down = sigmoids(x)
    return x * up, up * (1 + x * down)


class _Silu(torch.autograd.Function):
    """Keeps the input alone, not four float32 intermediates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return silu_and_slope(wide(x))[0].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (wide(grad) * silu_and_slope(wide(x))[1]).to(x.dtype)


def _check(x: Tensor) -> None:
    check_floating("x", x, "(*)")


@op(check=_check, differentiable=("x",), rows=("x",), invariant=True)
def silu(x: Tensor) -> Tensor:
    """`x sigmoid(x)`, element by element.

    Args:
        x: (*), floating point.

    Returns:
        (*) of the same dtype.

    Raises:
        TypeError: x is not a floating-point tensor.

    Numerics:
        float32 (float64 for float64), rounded once. Large negative x gives -0, not NaN; -inf gives NaN.

    Gradients:
        x, from `sigmoid(x) (1 + x sigmoid(-x))` in float32, rounded once.
    """
    result: Tensor = _Silu.apply(x)
    return result


def _normal(*shape: int, scale: float = 2.0) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {"x": torch.randn(shape, generator=generator, dtype=torch.float64) * scale}


def _strided(generator: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn(12, 10, generator=generator, dtype=torch.float64).T[::2]}


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    edges = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 60.0, -60.0, 90.0, -90.0, 3e4, -3e4], dtype=torch.float64)
    return {"x": torch.stack([edges, torch.randn(10, generator=generator, dtype=torch.float64) * 50])}


@silu.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _normal(4, 16, 256))
    yield Case("ragged", _normal(3, 37))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("empty", _normal(2, 0), frozenset({"empty"}))
    yield Case("small", _normal(2, 5), frozenset({"gradcheck"}))
    yield Case("qwen3_8b", _normal(8192, 12288), frozenset({"bench"}))


@silu.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("integers", lambda _: {"x": torch.zeros(3, dtype=torch.int64)}, TypeError, r"^x:")
    yield ErrorCase("not_a_tensor", lambda _: {"x": 1.0}, TypeError, r"^x:")
