"""Attention of new tokens over a cache of keys and values, contiguous or paged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_device, check_integers, check_shape, check_values
from rlk_ops.ops.attention import check_heads, check_scores
from rlk_ops.ops.attention.reduction import softmax_reduction, visible_keys
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> None:
    legend = "(B, S_max, Hk, D)" if block_table is None else "(pages, page_size, Hk, D)"
    check_heads(q, k_cache, v_cache, ("k_cache", "v_cache"), legend)
    check_scores(scale, window, softcap)
    check_integers("lengths", lengths, "(B,)")
    check_device("lengths", lengths, "q", q)
    check_shape("lengths", lengths, (len(q),), "(B,)")
    if block_table is not None:
        _check_pages(q, k_cache, lengths, block_table)
        return
    if len(k_cache) != len(q):
        raise ValueError(f"k_cache: expected batch B = {len(q)} as in q, got shape {tuple(k_cache.shape)}")
    check_values("lengths", lengths, 0, k_cache.shape[1])


def _check_pages(q: Tensor, k_cache: Tensor, lengths: Tensor, block_table: Tensor) -> None:
    check_integers("block_table", block_table, "(B, pages per sequence)")
    check_device("block_table", block_table, "q", q)
    if block_table.ndim != 2 or len(block_table) != len(q):
        raise ValueError(f"block_table: expected shape ({len(q)}, pages per sequence), got {tuple(block_table.shape)}")
    pages, size = k_cache.shape[:2]
    if size == 0:
        raise ValueError(f"k_cache: expected pages of at least one token, got shape {tuple(k_cache.shape)}")
    check_values("lengths", lengths, 0, block_table.shape[1] * size)
    check_values("block_table", block_table[_used_pages(lengths, block_table, size)], 0, pages - 1)


def _used_pages(lengths: Tensor, block_table: Tensor, size: int) -> Tensor:
    first_token = torch.arange(block_table.shape[1], device=lengths.device) * size
    return first_token < lengths[:, None]


def _gather_pages(cache: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """(B, pages per sequence * page_size, Hk, D); entries of the table past a row's length are not followed."""
    used = _used_pages(lengths, block_table, cache.shape[1])
    if len(cache) == 0:
        return cache.new_zeros(len(lengths), 0, *cache.shape[2:])
    return cache[torch.where(used, block_table, 0).long()].flatten(1, 2)


@op(
    check=_check,
    differentiable=("q", "k_cache", "v_cache"),
    rows=("q", "k_cache", "v_cache", "lengths", "block_table"),
)
def kv_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    lengths: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each row's last Sq tokens over its cache: decode with Sq = 1, chunked prefill with Sq > 1.

    The new tokens' keys and values are in the cache already. Query i of a row stands at `length - Sq + i`.

    Args:
        q: (B, Sq, Hq, D), floating point.
        k_cache: (B, S_max, Hk, D), of the same dtype; Hk divides Hq. With a block table (pages, page_size, Hk, D).
        v_cache: as k_cache.
        lengths: (B,) integer, the tokens of each row, the new ones included.
        block_table: (B, pages per sequence) integer: the pages of each row in order. Entries past a row's length are
            not read and may hold anything.
        scale: factor of the scores, above 0; None: D^-1/2.
        window: w >= 1: a query at i sees keys j with `i - w < j <= i`.
        softcap: cap above 0; scores become `cap tanh(score / cap)` after the scale.

    Returns:
        (B, Sq, Hq, D) of the same dtype. A query before position 0, where a row is shorter than Sq, gives 0.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices, lengths, pages or options do not fit; the message names the
            argument.

    Numerics:
        The reduction of `attention`. What the cache holds past a row's length, or before its window, changes nothing.

    Gradients:
        q, k_cache and v_cache, in float32, each rounded once.
    """
    lengths = lengths.long()
    if block_table is not None:
        k_cache, v_cache = (_gather_pages(cache, block_table, lengths) for cache in (k_cache, v_cache))
    longest = int(lengths.max()) if len(lengths) else 0
    k, v = k_cache[:, :longest], v_cache[:, :longest]
    positions = lengths[:, None] + torch.arange(-q.shape[1], 0, device=q.device)
    visible = visible_keys(positions, longest, causal=True, window=window, padding=None)
    return softmax_reduction(q, k, v, visible, scale=scale, softcap=softcap)


def _cached(
    batch: int, queries: int, capacity: int, query_heads: int, key_heads: int, width: int, **options: Any
) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        q = torch.randn(batch, queries, query_heads, width, generator=generator, dtype=torch.float64)
        k, v = torch.randn(2, batch, capacity, key_heads, width, generator=generator, dtype=torch.float64)
        lengths = torch.randint(min(queries, capacity), capacity + 1, (batch,), generator=generator)
        return {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, **options}

    return build


def _garbage(generator: torch.Generator) -> dict[str, Any]:
    """NaN past each length; a row of length 0; a row shorter than Sq."""
    arguments = _cached(4, 3, 20, 4, 2, 16, lengths=torch.tensor([0, 2, 11, 20]))(generator)
    for name in ("k_cache", "v_cache"):
        arguments[name][torch.arange(20) >= arguments["lengths"][:, None]] = torch.nan
    return arguments


def paged(batch: int, queries: int, pages: int, size: int, table: int, **options: Any) -> Any:
    """Shuffled pages, lengths that end inside a page, -1 in the table's unused entries."""

    def build(generator: torch.Generator) -> dict[str, Any]:
        arguments = _cached(batch, queries, table * size, 4, 2, 16, **options)(generator)
        k, v = torch.randn(2, pages, size, 2, 16, generator=generator, dtype=torch.float64)
        order = torch.randperm(pages, generator=generator)[: batch * table].view(batch, table)
        used = torch.arange(table) * size < arguments["lengths"][:, None]
        return {**arguments, "k_cache": k, "v_cache": v, "block_table": torch.where(used, order, -1).int()}

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    arguments = _cached(2, 2, 12, 4, 2, 8)(generator)
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)[:, ::2]
    return {**arguments, "lengths": torch.tensor([6, 3])}


@kv_attention.cases
def _cases() -> Iterator[Case]:
    smooth, empty, bench = frozenset({"gradcheck"}), frozenset({"empty"}), frozenset({"bench"})
    yield Case("decode", _cached(5, 1, 64, 8, 2, 64))
    yield Case("chunked_prefill", _cached(3, 7, 40, 6, 3, 10))
    yield Case("garbage", _garbage, frozenset({"extreme"}))
    yield Case("paged", paged(3, 1, 17, 8, 4))
    yield Case("paged_chunk", paged(3, 5, 17, 8, 4))
    yield Case("scale", _cached(2, 2, 12, 2, 2, 16, scale=0.7))
    yield Case("window", _cached(3, 4, 30, 4, 2, 16, window=6))
    yield Case("softcap", _cached(2, 3, 12, 4, 1, 16, softcap=2.0))
    yield Case("strided", _strided)
    yield Case("no_sequence", _cached(0, 1, 8, 2, 1, 8), empty)
    yield Case("no_query", _cached(2, 0, 8, 2, 1, 8), empty)
    yield Case("small", _cached(2, 2, 3, 2, 1, 2), smooth)
    yield Case("qwen3_8b_decode", _cached(64, 1, 4096, 32, 8, 128), bench)
    yield Case("qwen3_8b_chunk", _cached(4, 512, 4096, 32, 8, 128), bench)


@kv_attention.errors
def _errors() -> Iterator[ErrorCase]:
    def wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
        return lambda generator: {**_cached(2, 1, 8, 4, 2, 8)(generator), **changes}

    def zeros(*shape: int, **options: Any) -> Tensor:
        return torch.zeros(shape, **{"dtype": torch.float64, **options})

    table = torch.zeros(2, 4, dtype=torch.int32)
    yield ErrorCase("q_rank", wrong(q=zeros(2, 4, 8)), ValueError, r"^q:")
    yield ErrorCase("head_count", wrong(q=zeros(2, 1, 3, 8)), ValueError, r"^k_cache:")
    yield ErrorCase("value_shape", wrong(v_cache=zeros(2, 9, 2, 8)), ValueError, r"^v_cache:")
    yield ErrorCase("batch", wrong(q=zeros(3, 1, 4, 8), lengths=torch.ones(3).int()), ValueError, r"^k_cache:")
    yield ErrorCase("mixed_dtypes", wrong(v_cache=zeros(2, 8, 2, 8).half()), TypeError, r"^v_cache:")
    yield ErrorCase("float_lengths", wrong(lengths=torch.ones(2)), TypeError, r"^lengths:")
    yield ErrorCase("lengths_shape", wrong(lengths=torch.ones(2, 1).int()), ValueError, r"^lengths:")
    yield ErrorCase("long_length", wrong(lengths=torch.tensor([1, 9])), ValueError, r"^lengths:")
    yield ErrorCase("negative_length", wrong(lengths=torch.tensor([1, -1])), ValueError, r"^lengths:")
    yield ErrorCase("window", wrong(window=0), ValueError, r"^window:")
    yield ErrorCase("softcap", wrong(softcap=0.0), ValueError, r"^softcap:")
    yield ErrorCase("table_shape", wrong(block_table=table[0]), ValueError, r"^block_table:")
    yield ErrorCase(
        "no_such_page", wrong(block_table=table + 2, lengths=torch.tensor([1, 9])), ValueError, r"^block_table:"
    )
    yield ErrorCase("float_table", wrong(block_table=table.float()), TypeError, r"^block_table:")
