"""Attention over tensors laid out as (B, S, H, D): contract, reference, cases, implementations by name."""

from __future__ import annotations

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_count, check_device, check_floating, check_integers, check_positive, check_same
from rlk_ops.ops.attention.cases import cases, errors
from rlk_ops.ops.attention.reduction import by_sequence, prepend, softmax_reduction, visible_keys
from rlk_ops.ops.attention.sdpa import refusal, sdpa_attention
from rlk_ops.registry import op


def check_heads(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str], legend: str) -> None:
    """Raise unless q (B, Sq, Hq, D), k and v fit together; k and v go by `names`."""
    check_floating("q", q, "(B, Sq, Hq, D)", ndim=4)
    for name, value in zip(names, (k, v), strict=True):
        check_floating(name, value, legend, ndim=4)
        check_same(name, value, "q", q)
    if q.shape[3] == 0 or q.shape[2] == 0:
        raise ValueError(f"q: expected at least one head and one dimension, got shape {tuple(q.shape)}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"{names[0]}: expected head dimension D = {q.shape[3]} as in q, got shape {tuple(k.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{names[0]}: expected a number of heads that divides q's {q.shape[2]}, got {k.shape[2]}")
    if v.shape != k.shape:
        raise ValueError(f"{names[1]}: expected {names[0]}'s shape {tuple(k.shape)}, got {tuple(v.shape)}")


def check_scores(scale: float | None, window: int | None, softcap: float | None) -> None:
    """Raise unless the options of the scores are None or in their ranges."""
    if scale is not None:
        check_positive("scale", scale)
    if window is not None:
        check_count("window", window)
    if softcap is not None:
        check_positive("softcap", softcap)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    key_padding_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    window: int | None,
    softcap: float | None,
    shared_prefix: tuple[Tensor, Tensor] | None,
) -> None:
    check_heads(q, k, v, ("k", "v"), "(B, Sk, Hk, D)")
    if len(k) != len(q):
        raise ValueError(f"k: expected batch B = {len(q)} as in q, got shape {tuple(k.shape)}")
    check_scores(scale, window, softcap)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected True or False, got {causal!r}")
    if window is not None and not causal:
        raise ValueError("window: needs causal=True; a window of a bidirectional attention is not defined here")
    if key_padding_mask is not None:
        _check_padding(key_padding_mask, k)
    _check_packing(q, k, cu_seqlens_q, cu_seqlens_k)
    if shared_prefix is not None:
        _check_prefix(shared_prefix, k)


def _check_padding(mask: Tensor, k: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.is_complex():
        raise TypeError(f"key_padding_mask: expected a bool or 0/1 tensor of shape (B, Sk), got {mask!r}")
    check_device("key_padding_mask", mask, "k", k)
    if mask.shape != k.shape[:2]:
        raise ValueError(f"key_padding_mask: expected shape (B, Sk) = {tuple(k.shape[:2])}, got {tuple(mask.shape)}")


def _check_packing(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> None:
    given = {"cu_seqlens_q": (cu_q, q), "cu_seqlens_k": (cu_k, k)}
    if cu_q is None and cu_k is None:
        return
    for name, (edges, packed) in given.items():
        if edges is None:
            raise ValueError(f"{name}: is missing; packed sequences need cu_seqlens_q and cu_seqlens_k")
        check_integers(name, edges, "(sequences + 1,)")
        if len(packed) != 1:
            raise ValueError(f"{name}: packed sequences have B = 1, got B = {len(packed)}")
        if edges.ndim != 1 or len(edges) < 1:
            raise ValueError(f"{name}: expected shape (sequences + 1,), got {tuple(edges.shape)}")
        if edges[0] != 0 or edges[-1] != packed.shape[1] or bool((edges.diff() < 0).any()):
            raise ValueError(f"{name}: expected offsets that ascend from 0 to {packed.shape[1]}, got {edges.tolist()}")
    if cu_q is not None and cu_k is not None and len(cu_q) != len(cu_k):
        raise ValueError(f"cu_seqlens_k: expected {len(cu_q)} offsets as in cu_seqlens_q, got {len(cu_k)}")


def _check_prefix(prefix: tuple[Tensor, Tensor], k: Tensor) -> None:
    if not isinstance(prefix, (tuple, list)) or len(prefix) != 2:
        raise TypeError(f"shared_prefix: expected a pair (k, v) of shape (1, P, Hk, D), got {type(prefix).__name__}")
    for part in prefix:
        check_floating("shared_prefix", part, "(1, P, Hk, D)", ndim=4)
        check_same("shared_prefix", part, "k", k)
        if part.shape[0] != 1 or part.shape[2:] != k.shape[2:] or part.shape != prefix[0].shape:
            expected = f"(1, P, {k.shape[2]}, {k.shape[3]})"
            raise ValueError(
                f"shared_prefix: expected (k, v), both of shape (1, P, Hk, D) = {expected}, got {tuple(part.shape)}"
            )


@op(
    check=_check,
    differentiable=("q", "k", "v"),
    rows=("q", "k", "v", "key_padding_mask"),
    masked=("k", "v"),
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    shared_prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Scaled dot-product attention.

    Query head h reads key head `h // (Hq / Hk)`: Hk = Hq is multi-head, Hk = 1 multi-query, between them grouped.
    With Sq queries and Sk keys, query i stands at `Sk - Sq + i`: the last query is aligned with the last key.

    Args:
        q: (B, Sq, Hq, D), floating point.
        k: (B, Sk, Hk, D), of the same dtype; Hk divides Hq.
        v: as k.
        causal: a query sees the keys at or before its position.
        scale: factor of the scores, above 0; None: D^-1/2.
        key_padding_mask: (B, Sk), bool or 0/1, True = attended. Positions are counted with the padding.
        cu_seqlens_q: (sequences + 1,) integer offsets of packed sequences, from 0 to Sq; B = 1. A sequence sees itself
            only, and its queries and keys are aligned at its own end.
        cu_seqlens_k: as cu_seqlens_q, from 0 to Sk; both or neither.
        window: w >= 1, causal only: a query at i sees keys j with `i - w < j <= i`.
        softcap: cap above 0; scores become `cap tanh(score / cap)` after the scale.
        shared_prefix: (k, v), both (1, P, Hk, D): keys that stand before every row's (every packed sequence's) own.
            Positions count them; the padding mask does not cover them.

    Returns:
        (B, Sq, Hq, D) of the same dtype. A query that sees no key gives 0.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message names the argument.

    Numerics:
        Scores, softmax and the sum over the values in float32 (float64 for float64) with IEEE products, rounded once. A
        key that no query sees is read as 0, so it may hold NaN; so is a query that sees no key.

    Gradients:
        q, k, v and both parts of shared_prefix, in float32, each rounded once. Hidden keys and blind queries get 0.
    """

    def dense(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        k, v, padding = prepend(shared_prefix, k, v, padding)
        positions = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)[None]
        visible = visible_keys(positions, k.shape[1], causal=causal, window=window, padding=padding)
        return softmax_reduction(q, k, v, visible, scale=scale, softcap=softcap)

    padding = None if key_padding_mask is None else key_padding_mask.bool()
    return by_sequence(dense, q, k, v, padding, cu_seqlens_q, cu_seqlens_k)


attention.cases(cases)
attention.errors(errors)
attention.impl("sdpa", reason=refusal)(sdpa_attention)
