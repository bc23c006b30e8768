"""Attention through PyTorch's `scaled_dot_product_attention`, for tensors laid out as (B, S, H, D)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlk_ops.ops.attention.reduction import by_sequence, prepend, select_visible, visible_keys, with_a_key
from rlk_ops.ops.precision import reduced_float32, wide


def refusal(
    q: Tensor, k: Tensor, v: Tensor, *, shared_prefix: tuple[Tensor, Tensor] | None = None, **_: Any
) -> str | None:
    """Why SDPA may not run this call, or None."""
    if q.dtype == torch.float32 and reduced_float32():
        return "float32 products would be TF32 or bfloat16, as the process allows"
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *(shared_prefix or ())))
    if trained and q.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        return "its backward adds in any order on an accelerator unless torch.use_deterministic_algorithms(True)"
    return None


def sdpa_attention(
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
    shared_prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`attention` without softcap, which SDPA does not have."""

    def dense(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        k, v, padding = prepend(shared_prefix, k, v, padding)
        keys, queries = k.shape[1], q.shape[1]
        if padding is None and window is None and keys and (not causal or queries in (1, keys)):
            return _attend(q, k, v, None, causal and queries > 1, scale)
        positions = torch.arange(keys - queries, keys, device=q.device)[None]
        visible = visible_keys(positions, keys, causal=causal, window=window, padding=padding)
        return _masked(q, *with_a_key(k, v, visible), scale)

    padding = None if key_padding_mask is None else key_padding_mask.bool()
    return by_sequence(dense, q, k, v, padding, cu_seqlens_q, cu_seqlens_k)


def _masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """A query that sees no key is given them all and its result dropped: SDPA's backends differ on such rows."""
    seeing = visible.any(2, keepdim=True)
    result = _attend(*select_visible(q, k, v, visible), visible | ~seeing, False, scale)
    return torch.where(seeing[..., None], result, 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    if not q.numel():  # PyTorch 2.11 returns None for bfloat16 queries without elements on an accelerator
        return q + 0 * (k.sum() + v.sum())
    # On a CPU the fused kernel rounds its probabilities to bfloat16 between the two products; float32 costs no more.
    queries, keys, values = (wide(x) if x.device.type == "cpu" else x for x in (q, k, v))
    result = scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=None if visible is None else visible[:, None].expand(len(q), -1, -1, -1),
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return result.transpose(1, 2).to(q.dtype)
