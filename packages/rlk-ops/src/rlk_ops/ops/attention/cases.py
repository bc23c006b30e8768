"""The gold-path cases of `attention`, and calls of it that must raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlk_ops.testing.case import Case, ErrorCase

Build = Callable[[torch.Generator], dict[str, Any]]


def heads(batch: int, queries: int, keys: int, query_heads: int, key_heads: int, width: int, **options: Any) -> Build:
    """Normal q, k and v of these sizes, with `options`."""

    def build(generator: torch.Generator) -> dict[str, Any]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        q = normal(batch, queries, query_heads, width)
        k, v = normal(2, batch, keys, key_heads, width)
        return {"q": q, "k": k, "v": v, **options}

    return build


def _padded(generator: torch.Generator) -> dict[str, Any]:
    """Padding on the right, on the left, in the middle and everywhere."""
    arguments = heads(4, 9, 9, 4, 2, 16)(generator)
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[0, 6:] = mask[1, :4] = mask[2, 3:5] = mask[3] = False
    return {**arguments, "key_padding_mask": mask}


def _packed(generator: torch.Generator) -> dict[str, Any]:
    """Sequences of unequal lengths, one without a query, one without a key."""
    edges_q = torch.tensor([0, 5, 5, 12, 14, 15], dtype=torch.int32)
    edges_k = torch.tensor([0, 5, 8, 15, 15, 25], dtype=torch.int32)
    return {**heads(1, 15, 25, 4, 2, 16)(generator), "cu_seqlens_q": edges_q, "cu_seqlens_k": edges_k}


def _prefixed(batch: int, prefix: int, length: int, **options: Any) -> Build:
    def build(generator: torch.Generator) -> dict[str, Any]:
        arguments = heads(batch, length, length, 4, 2, 16, **options)(generator)
        k, v = torch.randn(2, 1, prefix, 2, 16, generator=generator, dtype=torch.float64)
        return {**arguments, "shared_prefix": (k, v)}

    return build


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    """Scores around 500: a softmax that does not subtract the maximum overflows."""
    arguments = heads(2, 7, 7, 2, 2, 16)(generator)
    arguments["q"][..., 0], arguments["k"][..., 0] = 100.0, 20.0
    return arguments


def _strided(generator: torch.Generator) -> dict[str, Any]:
    """Heads before tokens, every other token, and a v of stride 0."""
    q = torch.randn(2, 4, 12, 16, generator=generator, dtype=torch.float64).transpose(1, 2)[:, ::2]
    k = torch.randn(16, 2, 6, 2, generator=generator, dtype=torch.float64).permute(3, 2, 1, 0)
    return {"q": q, "k": k, "v": torch.randn(1, 6, 2, 16, generator=generator, dtype=torch.float64).expand(2, 6, 2, 16)}


def cases() -> Iterator[Case]:
    """A realistic call, a ragged one, an extreme one, strided and empty ones, one per option, real models' shapes."""
    smooth, empty, bench = frozenset({"gradcheck"}), frozenset({"empty"}), frozenset({"bench"})
    yield Case("realistic", heads(2, 48, 48, 8, 2, 64))
    yield Case("ragged", heads(3, 7, 19, 6, 3, 10))
    yield Case("more_queries_than_keys", heads(2, 6, 4, 2, 1, 8))
    yield Case("bidirectional", heads(2, 5, 11, 4, 4, 8, causal=False))
    yield Case("decode", heads(3, 1, 33, 4, 1, 32))
    yield Case("scale", heads(2, 9, 9, 2, 2, 16, scale=0.7))
    yield Case("window", heads(2, 12, 17, 4, 2, 16, window=5))
    yield Case("softcap", heads(2, 9, 9, 4, 2, 16, softcap=3.0))
    yield Case("key_padding", _padded)
    yield Case("packed", _packed)
    yield Case("shared_prefix", _prefixed(3, 11, 6))
    yield Case("shared_prefix_window", _prefixed(2, 5, 8, window=6))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("no_query", heads(2, 0, 5, 2, 1, 8), empty)
    yield Case("no_key", heads(2, 3, 0, 2, 1, 8), empty)
    yield Case("no_sequence", heads(0, 3, 3, 2, 1, 8), empty)
    yield Case("small", heads(1, 3, 4, 2, 1, 3), smooth)
    yield Case("small_softcap_window", heads(1, 3, 3, 2, 2, 2, softcap=2.0, window=2), smooth)
    yield Case("qwen3_8b_prefill", heads(2, 4096, 4096, 32, 8, 128), bench)
    yield Case("qwen3_8b_decode", heads(64, 1, 4096, 32, 8, 128), bench)


def errors() -> Iterator[ErrorCase]:
    """One call per argument that is wrong."""

    def wrong(**changes: Any) -> Build:
        return lambda generator: {**heads(2, 3, 4, 4, 2, 8)(generator), **changes}

    def zeros(*shape: int, **options: Any) -> Tensor:
        return torch.zeros(shape, **{"dtype": torch.float64, **options})

    edges = torch.tensor([0, 3])
    yield ErrorCase("rank", wrong(q=zeros(3, 4, 8)), ValueError, r"^q:")
    yield ErrorCase("integers", wrong(q=zeros(2, 3, 4, 8, dtype=torch.int64)), TypeError, r"^q:")
    yield ErrorCase("mixed_dtypes", wrong(k=zeros(2, 4, 2, 8).half()), TypeError, r"^k:")
    yield ErrorCase("mixed_devices", wrong(v=zeros(2, 4, 2, 8, device="meta")), ValueError, r"^v:")
    yield ErrorCase("head_dim", wrong(k=zeros(2, 4, 2, 6)), ValueError, r"^k:")
    yield ErrorCase("head_count", wrong(k=zeros(2, 4, 3, 8), v=zeros(2, 4, 3, 8)), ValueError, r"^k:")
    yield ErrorCase("value_shape", wrong(v=zeros(2, 5, 2, 8)), ValueError, r"^v:")
    yield ErrorCase("batch", wrong(k=zeros(1, 4, 2, 8), v=zeros(1, 4, 2, 8)), ValueError, r"^k:")
    yield ErrorCase("zero_scale", wrong(scale=0.0), ValueError, r"^scale:")
    yield ErrorCase("zero_window", wrong(window=0), ValueError, r"^window:")
    yield ErrorCase("bidirectional_window", wrong(window=2, causal=False), ValueError, r"^window:")
    yield ErrorCase("negative_softcap", wrong(softcap=-1.0), ValueError, r"^softcap:")
    yield ErrorCase("mask_shape", wrong(key_padding_mask=torch.ones(2, 3)), ValueError, r"^key_padding_mask:")
    yield ErrorCase("packed_batch", wrong(cu_seqlens_q=edges, cu_seqlens_k=edges), ValueError, r"^cu_seqlens_q:")
    one = {name: zeros(1, length, count, 8) for name, length, count in (("q", 3, 4), ("k", 4, 2), ("v", 4, 2))}
    yield ErrorCase("missing_edges", wrong(**one, cu_seqlens_q=edges), ValueError, r"^cu_seqlens_k:")
    yield ErrorCase("short_edges", wrong(**one, cu_seqlens_q=edges, cu_seqlens_k=edges), ValueError, r"^cu_seqlens_k:")
    descending = {"cu_seqlens_q": torch.tensor([0, 2, 1, 3]), "cu_seqlens_k": torch.tensor([0, 1, 2, 4])}
    yield ErrorCase("descending_edges", wrong(**one, **descending), ValueError, r"^cu_seqlens_q:")
    unequal = {"cu_seqlens_q": edges, "cu_seqlens_k": torch.tensor([0, 2, 4])}
    yield ErrorCase("unequal_edges", wrong(**one, **unequal), ValueError, r"^cu_seqlens_k:")
    yield ErrorCase("prefix_not_a_pair", wrong(shared_prefix=zeros(1, 3, 2, 8)), TypeError, r"^shared_prefix:")
    batched = (zeros(2, 3, 2, 8), zeros(2, 3, 2, 8))
    yield ErrorCase("prefix_batch", wrong(shared_prefix=batched), ValueError, r"^shared_prefix:")
