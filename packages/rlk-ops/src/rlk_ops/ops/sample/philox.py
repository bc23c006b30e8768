"""Philox4x32-10, a counter-based random generator, and the Gumbel noise that `sample` draws from it.

Source of the algorithm and its constants: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011, and the known-answer vectors of the Random123 library. A number is a pure function of key and counter: no
state, so a row's noise cannot depend on its place in a batch, on the batch's size, or on what was drawn before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORDS = 4
_BLOCKS_AT_ONCE = 1 << 15  # 256 KiB per int64 temporary: ten rounds of them stay in the level-2 cache


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor], *, rounds: int = 10) -> tuple[Tensor, ...]:
    """Four random 32-bit words per counter.

    Args:
        counter: four int64 tensors of values in [0, 2^32), broadcastable against each other.
        key: two such tensors.
        rounds: 10 is the standard generator.

    Returns:
        Four int64 tensors of values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # An int64 product wraps modulo 2^64, which is what the unsigned product's two halves need.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) ^ (c1 ^ k0)) & _MASK, ((first >> 32) ^ (c3 ^ k1)) & _MASK
        c1, c3 = second & _MASK, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_words(seeds: Tensor, positions: Tensor, columns: int) -> Tensor:
    """One 32-bit word for every (row, column): word `column % 4` of the block `column // 4`.

    The key is the seed (low word, high word); the counter is (column // 4, position low, position high, 0).

    Args:
        seeds: (B,) int64, all 64 bits used.
        positions: (B,) int64.
        columns: number of columns V.

    Returns:
        (B, V) int64 of values in [0, 2^32).
    """
    blocks = torch.arange((columns + _WORDS - 1) // _WORDS, device=seeds.device)[None, :]
    seeds, positions = seeds.long()[:, None], positions.long()[:, None]
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    counter = (blocks, positions & _MASK, (positions >> 32) & _MASK, torch.zeros_like(positions))
    return torch.stack(philox4x32(counter, key), dim=-1).flatten(-2)[:, :columns]


def gumbel(seeds: Tensor, positions: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise, `-log(-log(1 - v))` with `v = (word + 1/2) / 2^32`.

    Large noise, which decides the draw, comes from small v, where floats are dense: a token's probability is off by
    about 2^-32, not 2^-24. `v` is held below 1 so that no noise is -inf.

    Args:
        seeds: (B,) int64.
        positions: (B,) int64.
        columns: number of columns V.
        dtype: float32 or float64.

    Returns:
        (B, V) of `dtype`.
    """
    noise = torch.empty(len(seeds), columns, dtype=dtype, device=seeds.device)
    step = max(1, _BLOCKS_AT_ONCE * _WORDS // max(columns, 1))
    for start in range(0, len(seeds), step):
        rows = slice(start, start + step)
        v = random_words(seeds[rows], positions[rows], columns).to(dtype)
        v.mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
        noise[rows] = v.neg_().log1p_().neg_().log_().neg_()
    return noise
