"""Token embedding: rows of a table, with a backward that adds in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_ops.ops.arguments import check_device, check_floating, check_integers, check_values
from rlk_ops.ops.precision import wide, wide_dtype
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


def _check(token_ids: Tensor, weight: Tensor) -> None:
    check_integers("token_ids", token_ids, "(*)")
    check_floating("weight", weight, "(V, H)", ndim=2)
    check_device("token_ids", token_ids, "weight", weight)
    check_values("token_ids", token_ids, 0, weight.shape[0] - 1)


class _Embedding(torch.autograd.Function):
    """A gather whose backward sums each token's rows in float32, in the order in which they appear."""

    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.weight = (weight.shape, weight.dtype)
        return weight[token_ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (token_ids,), (shape, dtype) = ctx.saved_tensors, ctx.weight
        table = torch.zeros(shape, dtype=wide_dtype(dtype), device=grad.device)
        if grad.numel():
            order = token_ids.flatten().argsort(stable=True)
            present, counts = token_ids.flatten()[order].unique_consecutive(return_counts=True)
            rows = wide(grad.reshape(-1, shape[1])[order])
            table[present] = torch.segment_reduce(rows, "sum", lengths=counts, axis=0)
        return None, table.to(dtype)


@op(check=_check, differentiable=("weight",), rows=("token_ids",), invariant=True)
def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` by token id.

    Args:
        token_ids: (*), integer, in [0, V).
        weight: (V, H), floating point.

    Returns:
        (*, H) of the weight's dtype.

    Raises:
        ValueError, TypeError: an id is outside [0, V), or types and devices do not fit; the message names the argument.

    Numerics:
        A copy, exact.

    Gradients:
        weight: a token's upstream gradients are summed in the order in which it appears, in float32 (float64 for
        float64), and rounded once. Two runs give the same bits.
    """
    result: Tensor = _Embedding.apply(token_ids.long(), weight)
    return result


def _lookup(*shape: int, vocabulary: int, width: int) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
        return {"token_ids": torch.randint(0, vocabulary, shape, generator=generator), "weight": weight}

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    weight = torch.randn(12, 40, generator=generator, dtype=torch.float64).T[::2]
    return {"token_ids": torch.randint(0, 20, (5, 3), generator=generator).T, "weight": weight}


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    """Every token the same: one row of the gradient takes the whole sum. An unused row holds NaN."""
    weight = torch.randn(6, 8, generator=generator, dtype=torch.float64) * 1e4
    weight[1] = torch.nan
    return {"token_ids": torch.full((3, 700), 5), "weight": weight}


@embedding.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _lookup(4, 32, vocabulary=1000, width=64))
    yield Case("ragged", _lookup(13, vocabulary=7, width=5))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("scalar", _lookup(vocabulary=7, width=5))
    yield Case("empty", _lookup(2, 0, vocabulary=7, width=5), frozenset({"empty"}))
    yield Case("small", _lookup(2, 3, vocabulary=4, width=2), frozenset({"gradcheck"}))
    yield Case("qwen3_0_6b", _lookup(8, 4096, vocabulary=151936, width=1024), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_lookup(2, 3, vocabulary=4, width=2)(generator), **changes}


@embedding.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("id_too_large", _wrong(token_ids=torch.tensor([0, 4])), ValueError, r"^token_ids:")
    yield ErrorCase("negative_id", _wrong(token_ids=torch.tensor([-100, 0])), ValueError, r"^token_ids:")
    yield ErrorCase("float_ids", _wrong(token_ids=torch.zeros(2)), TypeError, r"^token_ids:")
    yield ErrorCase("weight_rank", _wrong(weight=torch.zeros(4)), ValueError, r"^weight:")
    yield ErrorCase("integer_weight", _wrong(weight=torch.zeros(4, 2, dtype=torch.int64)), TypeError, r"^weight:")
    yield ErrorCase("mixed_devices", _wrong(weight=torch.zeros(4, 2, device="meta")), ValueError, r"^token_ids:")
