"""SwiGLU's product: the gate through SiLU, times the other projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_ops.ops.arguments import check_floating, check_same, check_shape
from rlk_ops.ops.precision import wide
from rlk_ops.ops.silu import silu_and_slope
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


class _Swiglu(torch.autograd.Function):
    """Keeps the two inputs alone; the activation is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return (silu_and_slope(wide(gate))[0] * wide(up)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        gate, up = ctx.saved_tensors
        activation, slope = silu_and_slope(wide(gate))
        for_gate, for_up = ctx.needs_input_grad
        grad_gate = (wide(grad) * wide(up) * slope).to(gate.dtype) if for_gate else None
        return grad_gate, (wide(grad) * activation).to(up.dtype) if for_up else None


def _check(gate: Tensor, up: Tensor) -> None:
    check_floating("gate", gate, "(*, I)", min_ndim=1)
    check_floating("up", up, "(*, I)", min_ndim=1)
    check_same("up", up, "gate", gate)
    check_shape("up", up, tuple(gate.shape), "(*, I)")


@op(check=_check, differentiable=("gate", "up"), rows=("gate", "up"), invariant=True)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, element by element (Shazeer, "GLU Variants Improve Transformer", 2020).

    Args:
        gate: (*, I), floating point.
        up: (*, I), of the same dtype.

    Returns:
        (*, I) of the same dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.

    Numerics:
        float32 (float64 for float64), rounded once: the activation is not rounded before the product.

    Gradients:
        gate and up, in float32, each rounded once.
    """
    result: Tensor = _Swiglu.apply(gate, up)
    return result


def _pair(*shape: int) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        gate, up = torch.randn((2, *shape), generator=generator, dtype=torch.float64) * 2
        return {"gate": gate, "up": up}

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    both = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    return {"gate": both[:, :10], "up": both[:, 10:]}


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    edges = torch.tensor([0.0, -0.0, 60.0, -60.0, 90.0, -90.0, 200.0, -3e4], dtype=torch.float64)
    return {"gate": edges, "up": torch.randn(8, generator=generator, dtype=torch.float64) * 100}


@swiglu.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _pair(4, 16, 256))
    yield Case("ragged", _pair(3, 37))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("empty", _pair(0, 8), frozenset({"empty"}))
    yield Case("small", _pair(2, 3), frozenset({"gradcheck"}))
    yield Case("qwen3_8b", _pair(8192, 12288), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_pair(2, 3)(generator), **changes}


@swiglu.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("shape", _wrong(up=torch.zeros(2, 1, dtype=torch.float64)), ValueError, r"^up:")
    yield ErrorCase("mixed_dtypes", _wrong(up=torch.zeros(2, 3).half()), TypeError, r"^up:")
    yield ErrorCase("integers", _wrong(gate=torch.zeros(2, 3, dtype=torch.int64)), TypeError, r"^gate:")
    yield ErrorCase("mixed_devices", _wrong(up=torch.zeros(2, 3, device="meta")), ValueError, r"^up:")
