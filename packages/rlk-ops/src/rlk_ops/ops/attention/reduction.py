"""The softmax reduction under `attention` and `kv_attention`, and which keys a query sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlk_ops.ops.precision import ieee_matmul, wide

Dense = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def visible_keys(
    query_positions: Tensor, keys: int, *, causal: bool, window: int | None, padding: Tensor | None
) -> Tensor:
    """Which keys each query sees.

    Args:
        query_positions: (B or 1, Sq) int64, counted so that key j has position j.
        keys: number of keys Sk.
        causal: only keys at or before the query.
        window: with causal, only the last `window` of them.
        padding: (B, Sk) bool, True = attended.

    Returns:
        (B or 1, Sq, Sk) bool.
    """
    key = torch.arange(keys, device=query_positions.device)
    query = query_positions[:, :, None]
    visible = (key <= query) if causal else torch.ones_like(query + key, dtype=torch.bool)
    if window is not None:
        visible = visible & (key > query - window)
    return visible if padding is None else visible & padding[:, None, :]


def select_visible(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q with 0 where it sees no key, k and v with 0 where no query sees them: what is hidden may hold NaN."""
    seeing, seen = visible.any(2)[:, :, None, None], visible.any(1)[:, :, None, None]
    return torch.where(seeing, q, 0), torch.where(seen, k, 0), torch.where(seen, v, 0)


def with_a_key(k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same reduction with one hidden key where there is none, so that a maximum exists and the graph lives."""
    if k.shape[1]:
        return k, v, visible
    return pad(k, (0, 0, 0, 0, 0, 1)), pad(v, (0, 0, 0, 0, 0, 1)), pad(visible, (0, 1))


def softmax_reduction(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float | None, softcap: float | None
) -> Tensor:
    """`softmax(softcap(q k^T scale)) v` over the visible keys, written out.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Sk, Hk, D), Hq a multiple of Hk: query head h reads key head h // (Hq / Hk).
        v: as k.
        visible: (B or 1, Sq, Sk) bool.
        scale: factor of the scores; None: D^-1/2.
        softcap: cap of `cap tanh(score / cap)`, or None.

    Returns:
        (B, Sq, Hq, D) of q's dtype; 0 where a query sees no key.
    """
    k, v, visible = with_a_key(k, v, visible)
    queries, keys, values = (wide(x) for x in select_visible(q, k, v, visible))
    batch, length, heads, width = q.shape
    groups, shared = k.shape[2], heads // k.shape[2]
    grouped = queries.reshape(batch, length, groups, shared, width).permute(0, 2, 3, 1, 4)
    rows = grouped.reshape(batch, groups, shared * length, width)
    scores = ieee_matmul(rows, keys.permute(0, 2, 3, 1)) * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible[:, None, None].expand(batch, groups, shared, -1, -1).reshape(scores.shape)
    result = ieee_matmul(_softmax(scores.masked_fill(~seen, -torch.inf)), values.permute(0, 2, 1, 3))
    result = result.view(batch, groups, shared, length, width).permute(0, 3, 1, 2, 4)
    return result.reshape(batch, length, heads, width).to(q.dtype)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, 0 with gradient 0 for a row of -inf."""
    top = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == -torch.inf, 0))
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1)


def prepend(
    prefix: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """k, v and their padding mask with the prefix's keys, all attended, in front of every row's."""
    if prefix is None:
        return k, v, padding
    keys, values = (part.expand(len(k), -1, -1, -1) for part in prefix)
    if padding is not None:
        padding = pad(padding, (keys.shape[1], 0), value=True)
    return torch.cat([keys, k], 1), torch.cat([values, v], 1), padding


def by_sequence(
    dense: Dense,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """`dense` on each packed sequence of (1, S, ...) tensors, or once where nothing is packed."""
    if cu_seqlens_q is None or cu_seqlens_k is None or len(cu_seqlens_q) == 1:
        return dense(q, k, v, padding)
    edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    spans = zip(edges_q, edges_q[1:], edges_k, edges_k[1:], strict=False)
    parts = [
        dense(q[:, a:b], k[:, c:d], v[:, c:d], padding if padding is None else padding[:, c:d]) for a, b, c, d in spans
    ]
    return torch.cat(parts, dim=1)
