"""The matrix product, accumulated in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_floating, check_out_dtype, check_same
from rlk_ops.ops.precision import rows_matmul
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


def _check(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> None:
    check_floating("a", a, "(*, K)", min_ndim=1)
    check_floating("b", b, "(K, N)", ndim=2)
    check_same("b", b, "a", a)
    if b.shape[0] != a.shape[-1]:
        raise ValueError(f"b: expected K = {a.shape[-1]} rows, the last dimension of a, got shape {tuple(b.shape)}")
    check_out_dtype(out_dtype, a.dtype, default=None)


@op(check=_check, differentiable=("a", "b"), rows=("a",))
def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """`a @ b`, one accumulator per element.

    Args:
        a: (*, K), floating point.
        b: (K, N), of the same dtype; any strides, so a weight (N, K) is passed as `weight.T`.
        out_dtype: dtype of the result; None: the inputs' dtype. float64 inputs give float64.

    Returns:
        (*, N) of `out_dtype`.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.

    Numerics:
        One `torch.matmul` of the inputs widened to float32 (float64 for float64), IEEE products whatever the process
        allows, rounded once to `out_dtype`.

    Gradients:
        a and b, each one float32 product of the widened upstream gradient, rounded once to the input's dtype.
    """
    return rows_matmul(a, b).to(out_dtype or a.dtype)


def _product(*shape: int, columns: int, **options: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        a = torch.randn(*shape, generator=generator, dtype=torch.float64)
        b = torch.randn(shape[-1], columns, generator=generator, dtype=torch.float64) * max(shape[-1], 1) ** -0.5
        return {"a": a, "b": b, **options}

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    a = torch.randn(40, 2, 6, generator=generator, dtype=torch.float64).permute(2, 1, 0)[::2]
    return {"a": a, "b": torch.randn(17, 40, generator=generator, dtype=torch.float64).T}


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    """Rows of very different sizes."""
    arguments = _product(7, 64, columns=9)(generator)
    arguments["a"] *= torch.logspace(-4, 3, 7, dtype=torch.float64)[:, None]
    return arguments


@matmul.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _product(48, 128, columns=96))
    yield Case("ragged", _product(3, 7, 37, columns=53))
    yield Case("one_row", _product(64, columns=33))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("no_row", _product(0, 5, columns=3), frozenset({"empty"}))
    yield Case("no_inner", _product(2, 0, columns=3), frozenset({"empty"}))
    yield Case("small", _product(2, 3, 4, columns=3), frozenset({"gradcheck"}))
    yield Case("qwen3_8b_up", _product(4096, 4096, columns=12288), frozenset({"bench"}))
    yield Case("qwen3_8b_up_decode", _product(64, 4096, columns=12288), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_product(4, 6, columns=5)(generator), **changes}


@matmul.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("inner", _wrong(b=torch.zeros(5, 5, dtype=torch.float64)), ValueError, r"^b:")
    yield ErrorCase("b_rank", _wrong(b=torch.zeros(6, dtype=torch.float64)), ValueError, r"^b:")
    yield ErrorCase("a_rank", _wrong(a=torch.zeros((), dtype=torch.float64)), ValueError, r"^a:")
    yield ErrorCase("integers", _wrong(a=torch.zeros(4, 6, dtype=torch.int64)), TypeError, r"^a:")
    yield ErrorCase("mixed_dtypes", _wrong(a=torch.zeros(4, 6).half(), b=torch.zeros(6, 5)), TypeError, r"^b:")
    yield ErrorCase("integer_result", _wrong(out_dtype=torch.int32), TypeError, r"^out_dtype:")
    yield ErrorCase("mixed_devices", _wrong(b=torch.zeros(6, 5, device="meta")), ValueError, r"^b:")
