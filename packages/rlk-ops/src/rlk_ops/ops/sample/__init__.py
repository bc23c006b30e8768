"""Sampling: one token per row, seeded per request, the same at any place in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_device, check_integers, check_shape
from rlk_ops.ops.sample.philox import gumbel
from rlk_ops.ops.sample.support import check_logits, check_options, kept, sampling_support, scale, usable_rows
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase

__all__ = ["sample", "sampling_support"]

_OPTIONS = ("temperature", "top_k", "top_p", "min_p")


def _check(
    logits: Tensor, temperature: object, top_k: object, top_p: object, min_p: object, seeds: Tensor, positions: Tensor
) -> None:
    check_logits(logits)
    check_options(logits, temperature, top_k, top_p, min_p)
    for name, value in (("seeds", seeds), ("positions", positions)):
        check_integers(name, value, "(B,)")
        check_shape(name, value, (len(logits),), "(B,), one per row,")
        check_device(name, value, "logits", logits)


@op(check=_check, rows=("logits", *_OPTIONS, "seeds", "positions"), invariant=True)
@torch.no_grad()
def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    The processed distribution is `softmax(logits / temperature)`, truncated by top-k, then top-p, then min-p as
    :func:`sampling_support` says, and renormalised. The draw is Gumbel-max: `argmax(z + g)` over the support, the noise
    g of a row and column a pure function of (seed, position, column) through Philox4x32-10. The same logits, seed and
    position give the same token at any batch position and batch size.

    Args:
        logits: (B, V), floating point; -inf is legal and never drawn.
        temperature: a number or (B,), >= 0. 0 takes the largest logit, the lowest id on ties, ignores the three
            truncations, and reports the log-prob at temperature 1.
        top_k: an integer or (B,), >= 1; V or more keeps all. None: not used.
        top_p: a number or (B,), in (0, 1]; 1 keeps all. None: not used.
        min_p: a number or (B,), in [0, 1]; 0 keeps all. None: not used.
        seeds: (B,) integer, all 64 bits count: one per request.
        positions: (B,) integer: the index of the token that is drawn, in its request.

    Returns:
        token_ids (B,) int64, and logps (B,) float32 (float64 for float64): the drawn tokens' log-probs under the
        processed distribution. A row that is -inf everywhere, or that holds NaN or +inf (also after the division by its
        temperature), gets token -1 and log-prob NaN; the other rows are not affected.

    Raises:
        ValueError, TypeError: an argument is of another shape, type or range; the message names it.

    Numerics:
        float32, or float64 for float64 logits; the nucleus is summed in float64. The noise is exact to 2^-32 in
        probability. Equal keys take the lowest id.

    Gradients:
        None: a draw is not differentiable, and no graph is recorded.
    """
    scaled, greedy = scale(logits, temperature)
    scaled = scaled.masked_fill(~kept(scaled, greedy, top_k, top_p, min_p), -torch.inf)
    if isinstance(temperature, Tensor) or temperature > 0:
        noise = gumbel(seeds, positions, scaled.shape[1], scaled.dtype)
        keys = scaled + noise.masked_fill_(greedy, 0)
    else:
        keys = scaled
    token_ids = keys.argmax(-1, keepdim=True)
    logps = torch.log_softmax(scaled, -1).gather(1, token_ids)
    return token_ids.masked_fill(~usable_rows(scaled), -1).squeeze(1), logps.squeeze(1)


def _row(batch: int, columns: int, **options: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        logits = 2 * torch.randn(batch, columns, generator=generator, dtype=torch.float64)
        seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
        return {"logits": logits, **options, "seeds": seeds, "positions": torch.arange(batch) * 3}

    return build


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    arguments = _row(7, 300)(generator)
    logits = arguments["logits"]
    logits[0, :256] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] *= 1e4
    logits[5] = -torch.inf
    logits[5, 299] = 0.0
    return arguments


def _strided(generator: torch.Generator) -> dict[str, Any]:
    arguments = _row(5, 40)(generator)
    logits = torch.empty(40, 10, dtype=torch.float64).t()[::2]
    return {**arguments, "logits": logits.copy_(arguments["logits"])}


@sample.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _row(8, 4096))
    yield Case("ragged", _row(3, 1001, temperature=0.7))
    yield Case("one_column", _row(3, 1))
    yield Case("extreme", _extreme, frozenset({"extreme"}))
    yield Case("strided", _strided)
    yield Case("empty", _row(0, 17), frozenset({"empty"}))
    yield Case("greedy", _row(4, 515, temperature=0.0))
    yield Case("top_k", _row(4, 515, top_k=20))
    yield Case("top_p", _row(4, 515, top_p=0.9))
    yield Case("min_p", _row(4, 515, min_p=0.05))
    yield Case("all_options", _row(4, 515, temperature=1.3, top_k=100, top_p=0.95, min_p=0.01))
    per_row = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64),
        "top_k": torch.tensor([5, 515, 1, 60]),
    }
    per_row["top_p"] = torch.tensor([1.0, 0.5, 0.9, 1.0], dtype=torch.float64)
    yield Case("per_row", _row(4, 515, **per_row, min_p=torch.tensor([0.0, 0.1, 0.0, 0.02], dtype=torch.float64)))
    yield Case("qwen3_decode", _row(64, 151936, temperature=1.0), frozenset({"bench"}))
    yield Case("qwen3_decode_truncated", _row(64, 151936, top_k=50, top_p=0.95), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_row(2, 9)(generator), **changes}


@sample.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("logits_rank", _wrong(logits=torch.zeros(9)), ValueError, "logits")
    yield ErrorCase("no_column", _wrong(logits=torch.zeros(2, 0)), ValueError, "logits")
    yield ErrorCase("integer_logits", _wrong(logits=torch.zeros(2, 9, dtype=torch.int64)), TypeError, "logits")
    yield ErrorCase("negative_temperature", _wrong(temperature=-0.1), ValueError, "temperature")
    yield ErrorCase("nan_temperature", _wrong(temperature=torch.tensor([1.0, float("nan")])), ValueError, "temperature")
    yield ErrorCase("temperature_shape", _wrong(temperature=torch.ones(3)), ValueError, "temperature")
    yield ErrorCase("zero_top_k", _wrong(top_k=0), ValueError, "top_k")
    yield ErrorCase("fractional_top_k", _wrong(top_k=2.5), TypeError, "top_k")
    yield ErrorCase("zero_top_p", _wrong(top_p=0.0), ValueError, "top_p")
    yield ErrorCase("large_top_p", _wrong(top_p=1.01), ValueError, "top_p")
    yield ErrorCase("large_min_p", _wrong(min_p=torch.tensor([0.0, 1.5])), ValueError, "min_p")
    yield ErrorCase("float_seeds", _wrong(seeds=torch.zeros(2)), TypeError, "seeds")
    yield ErrorCase("seeds_shape", _wrong(seeds=torch.zeros(3, dtype=torch.int64)), ValueError, "seeds")
    yield ErrorCase("positions_shape", _wrong(positions=torch.zeros(2, 1, dtype=torch.int64)), ValueError, "positions")
