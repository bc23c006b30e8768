"""How wide an operator computes: float32, or float64 for float64; IEEE products whatever the process allows."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_MKLDNN: Any = torch.backends.mkldnn
_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, _MKLDNN.matmul)
_lock = threading.Lock()
_inside = 0
_outside: list[str] = []


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an operator computes in: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that operators compute in."""
    return x.to(wide_dtype(x.dtype))


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Within the block float32 products are IEEE: neither TF32 nor bfloat16 passes, whatever the process chose.

    The choice is one per process, so blocks of several threads share it: the first sets it, the last restores it.
    """
    global _inside
    with _lock:
        if _inside == 0:
            _outside[:] = [backend.fp32_precision for backend in _BACKENDS]
            for backend in _BACKENDS:
                backend.fp32_precision = "ieee"
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                for backend, precision in zip(_BACKENDS, _outside, strict=True):
                    backend.fp32_precision = precision


class _IeeeMatmul(torch.autograd.Function):
    """`a @ b` with both directions in IEEE float32; autograd's own backward would run outside the block."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with ieee_float32():
            return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        grad_a = _IeeeMatmul.apply(grad, b.mT) if ctx.needs_input_grad[0] else None
        grad_b = _IeeeMatmul.apply(a.mT, grad) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b


def ieee_matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a (..., M, K) @ b (..., K, N)`, equal leading dimensions, differentiable; IEEE float32 forward and backward.

    Args:
        a: float32 or float64.
        b: of the same dtype.

    Returns:
        (..., M, N) of that dtype.
    """
    product: Tensor = _IeeeMatmul.apply(a, b)
    return product


def rows_matmul(rows: Tensor, b: Tensor) -> Tensor:
    """`rows (*, K) @ b (K, N)` as one product, with the inputs widened; (*, N) in float32, or float64 for float64."""
    *leading, inner = rows.shape
    return ieee_matmul(wide(rows).reshape(math.prod(leading), inner), wide(b)).view(*leading, b.shape[1])


def reduced_float32() -> bool:
    """Whether the process allows float32 products to be computed in TF32 or bfloat16."""
    everywhere: Any = torch.backends
    return any(backend.fp32_precision in ("tf32", "bf16") for backend in (everywhere, *_BACKENDS))
