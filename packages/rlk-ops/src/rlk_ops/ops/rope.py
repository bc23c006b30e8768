"""Rotary position embedding in GPT-NeoX's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_count, check_device, check_floating, check_integers, check_positive
from rlk_ops.ops.precision import wide
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


def _check(x: Tensor, positions: Tensor, theta: float, rotary_dim: int | None) -> None:
    check_floating("x", x, "(B, S, heads, D)", ndim=4)
    check_integers("positions", positions, "(B, S) or (S,)")
    check_device("positions", positions, "x", x)
    batch, length, _, width = x.shape
    if tuple(positions.shape) not in ((batch, length), (length,)):
        expected = f"({batch}, {length}) or ({length},)"
        raise ValueError(f"positions: expected shape (B, S) or (S,) = {expected}, got {tuple(positions.shape)}")
    check_positive("theta", theta)
    if rotary_dim is not None:
        check_count("rotary_dim", rotary_dim)
    if (rotary_dim or width) > width or (rotary_dim or width) % 2:
        name = "x" if rotary_dim is None else "rotary_dim"
        raise ValueError(
            f"{name}: expected an even number of rotated dimensions, at most D = {width}, got {rotary_dim or width}"
        )


@op(check=_check, differentiable=("x",), rows=("x", "positions"), invariant=True)
def rope(x: Tensor, positions: Tensor, *, theta: float = 1e6, rotary_dim: int | None = None) -> Tensor:
    """Rotate pairs of dimensions by angles that grow with the position (Su et al., "RoFormer", 2021).

    GPT-NeoX's layout: with R = rotary_dim, dimension i is paired with i + R / 2 for i < R / 2, and the pair is rotated
    by `position * theta^(-2i / R)`. Dimensions from R on pass through.

    Args:
        x: (B, S, heads, D), floating point.
        positions: (B, S) or (S,), integer; the position of each token in its own sequence.
        theta: base of the frequencies, above 0.
        rotary_dim: R, even, at most D; None: D.

    Returns:
        (B, S, heads, D) of the same dtype.

    Raises:
        ValueError, TypeError: shapes or types do not fit, or R is odd or too large; the message names the argument.

    Numerics:
        Angles, sines and cosines in float64, so position 100000 is as exact as position 1 (an angle formed in float32
        is off by up to 4e-3 there); the rotation in float32 (float64 for float64), rounded once.

    Gradients:
        x: the rotation by the opposite angle, rounded once.
    """
    half = (rotary_dim or x.shape[-1]) // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions.double()[..., None, None] * theta**-exponents
    values = wide(x)
    cosine, sine = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    first, second, rest = values[..., :half], values[..., half : 2 * half], values[..., 2 * half :]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat([*rotated, rest], dim=-1).to(x.dtype)


def _tokens(
    batch: int, length: int, heads: int, width: int, **options: Any
) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        x = torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64)
        return {"x": x, "positions": torch.randint(0, 4096, (batch, length), generator=generator), **options}

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    x = torch.randn(2, 3, 5, 32, generator=generator, dtype=torch.float64).transpose(1, 2)[..., ::2]
    return {"x": x, "positions": torch.arange(20).view(2, 10)[:, ::2]}


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    return {**_tokens(1, 6, 2, 16)(generator), "positions": torch.tensor([[0, -3, 1, 32767, 131071, 1_000_003]])}


@rope.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _tokens(2, 16, 4, 128))
    yield Case("ragged", _tokens(3, 7, 5, 10))
    yield Case("one_row_of_positions", _tokens(3, 7, 2, 16, positions=torch.arange(7)))
    yield Case("theta", _tokens(2, 5, 2, 16, theta=1e4))
    yield Case("partial", _tokens(2, 5, 2, 20, rotary_dim=12))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("empty", _tokens(2, 0, 3, 8), frozenset({"empty"}))
    yield Case("small", _tokens(2, 2, 2, 6, rotary_dim=4), frozenset({"gradcheck"}))
    yield Case("qwen3_8b_q", _tokens(4, 4096, 32, 128), frozenset({"bench"}))
    yield Case("qwen3_8b_decode", _tokens(64, 1, 32, 128), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_tokens(2, 3, 2, 8)(generator), **changes}


@rope.errors
def _errors() -> Iterator[ErrorCase]:
    yield ErrorCase("x_rank", _wrong(x=torch.zeros(2, 3, 8)), ValueError, r"^x:")
    yield ErrorCase("odd_width", _wrong(x=torch.zeros(2, 3, 2, 7)), ValueError, r"^x:")
    yield ErrorCase("float_positions", _wrong(positions=torch.zeros(2, 3)), TypeError, r"^positions:")
    yield ErrorCase("positions_shape", _wrong(positions=torch.arange(2)), ValueError, r"^positions:")
    yield ErrorCase("odd_rotary_dim", _wrong(rotary_dim=3), ValueError, r"^rotary_dim:")
    yield ErrorCase("large_rotary_dim", _wrong(rotary_dim=10), ValueError, r"^rotary_dim:")
    yield ErrorCase("zero_theta", _wrong(theta=0.0), ValueError, r"^theta:")
    yield ErrorCase(
        "mixed_devices", _wrong(positions=torch.zeros(3, dtype=torch.int64, device="meta")), ValueError, "^positions:"
    )
