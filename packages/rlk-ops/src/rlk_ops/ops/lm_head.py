"""The language model's head: hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_floating, check_out_dtype, check_same, check_shape
from rlk_ops.ops.precision import rows_matmul, wide
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    check_floating("hidden", hidden, "(*, H)", min_ndim=1)
    check_floating("weight", weight, "(V, H)", ndim=2)
    check_same("weight", weight, "hidden", hidden)
    check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]), "(V, H)")
    if bias is not None:
        check_floating("bias", bias, "(V,)", ndim=1)
        check_same("bias", bias, "hidden", hidden)
        check_shape("bias", bias, (weight.shape[0],), "(V,)")
    if out_dtype is None:
        raise TypeError("out_dtype: expected a float dtype, got None")
    check_out_dtype(out_dtype, hidden.dtype, default=torch.float32)


@op(check=_check, differentiable=("hidden", "weight", "bias"), rows=("hidden",))
def lm_head(
    hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Logits `hidden @ weight.T + bias`, float32 by default: a logit rounded to bfloat16 cannot be mended later.

    Args:
        hidden: (*, H), floating point.
        weight: (V, H), of the same dtype.
        bias: (V,), of the same dtype, or None.
        out_dtype: dtype of the logits. float64 inputs give float64.

    Returns:
        (*, V) logits.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.

    Numerics:
        One `torch.matmul` of the inputs widened to float32 (float64 for float64), IEEE products, the bias added in the
        same width, rounded once to `out_dtype`.

    Gradients:
        hidden, weight and bias, each reduced in float32 over the whole call and rounded once to the input's dtype.
    """
    logits = rows_matmul(hidden, weight.T)
    if bias is not None:
        logits = logits + wide(bias)
    result = torch.promote_types(out_dtype, hidden.dtype) if hidden.dtype == torch.float64 else out_dtype
    return logits.to(result)


def _head(
    *shape: int, vocabulary: int, bias: bool = False, **options: Any
) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        hidden = torch.randn(*shape, generator=generator, dtype=torch.float64)
        weight = torch.randn(vocabulary, shape[-1], generator=generator, dtype=torch.float64) * 0.02
        arguments = {"hidden": hidden, "weight": weight, **options}
        if bias:
            arguments["bias"] = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        return arguments

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    hidden = torch.randn(12, 3, 8, generator=generator, dtype=torch.float64).permute(2, 1, 0)[::2]
    weight = torch.randn(12, 31, generator=generator, dtype=torch.float64).T
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": torch.randn(1, dtype=torch.float64, generator=generator).expand(31),
    }


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    arguments = _head(5, 32, vocabulary=40, bias=True)(generator)
    arguments["hidden"] *= 1e3
    arguments["bias"][::4] = -torch.inf
    return arguments


@lm_head.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _head(4, 16, 64, vocabulary=1000))
    yield Case("ragged", _head(7, 37, vocabulary=251))
    yield Case("bias", _head(5, 24, vocabulary=77, bias=True))
    yield Case("extreme", _extreme, frozenset({"extreme"}))
    yield Case("strided", _strided)
    yield Case("empty", _head(2, 0, 16, vocabulary=9, bias=True), frozenset({"empty"}))
    yield Case("narrow", _head(5, 24, vocabulary=77, out_dtype=torch.float32))
    yield Case("small", _head(2, 3, 4, vocabulary=5, bias=True), frozenset({"gradcheck"}))
    yield Case("qwen3_0_6b", _head(4096, 1024, vocabulary=151936), frozenset({"bench"}))
    yield Case("qwen3_8b_decode", _head(64, 4096, vocabulary=151936), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_head(4, 6, vocabulary=5)(generator), **changes}


@lm_head.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("hidden_size", _wrong(weight=torch.zeros(5, 7, dtype=torch.float64)), ValueError, r"^weight:")
    yield ErrorCase("bias_shape", _wrong(bias=torch.zeros(6, dtype=torch.float64)), ValueError, r"^bias:")
    yield ErrorCase("mixed_dtypes", _wrong(weight=torch.zeros(5, 6).half()), TypeError, r"^weight:")
    yield ErrorCase("integers", _wrong(hidden=torch.zeros(4, 6, dtype=torch.int64)), TypeError, r"^hidden:")
    yield ErrorCase("integer_result", _wrong(out_dtype=torch.int64), TypeError, r"^out_dtype:")
    yield ErrorCase("no_result_dtype", _wrong(out_dtype=None), TypeError, r"^out_dtype:")
    yield ErrorCase("mixed_devices", _wrong(bias=torch.zeros(5, device="meta")), ValueError, r"^bias:")
