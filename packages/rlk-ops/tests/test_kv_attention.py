"""`kv_attention` against `attention` on each row's own keys; paging; what lies past a row's length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlk_ops import attention, kv_attention


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_query(q: Tensor, k: Tensor, v: Tensor, place: int, window: int | None, softcap: float | None) -> np.ndarray:
    """One head's query at `place` over its keys, in numpy."""
    first = 0 if window is None else max(0, place - window + 1)
    keys, values = k[first : place + 1].numpy(), v[first : place + 1].numpy()
    scores = keys @ q.numpy() / np.sqrt(len(q))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    weights = np.exp(scores - scores.max())
    return (weights @ values) / weights.sum()


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 1.2}, {"window": 5, "softcap": 2.0}])
def test_each_query_against_numpy(queries: int, options: dict[str, Any]) -> None:
    lengths = torch.tensor([4, 9, 12, 5])
    q, (k, v) = normal(0, 4, queries, 6, 8), normal(1, 2, 4, 12, 3, 8)
    out = kv_attention(q, k, v, lengths=lengths, **options)
    for b, i, h in np.ndindex(4, queries, 6):
        expected = one_query(
            q[b, i, h],
            k[b, :, h // 2],
            v[b, :, h // 2],
            int(lengths[b]) - queries + i,
            options.get("window"),
            options.get("softcap"),
        )
        np.testing.assert_allclose(out[b, i, h].numpy(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_paged_is_contiguous(size: int) -> None:
    batch, queries, table = 3, 2, 5
    capacity, pages = table * size, 19
    q, (k, v) = normal(2, batch, queries, 4, 8), normal(3, 2, pages, size, 2, 8)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(4))[: batch * table].view(batch, table)
    lengths = torch.tensor([max(1, capacity - 1), min(2, capacity), capacity])
    used = torch.arange(table) * size < lengths[:, None]
    garbage = torch.where(used, order, torch.tensor([-7, 10**6, 3, -1, 99]))
    gathered = [torch.stack([x[order[b]].reshape(capacity, 2, 8) for b in range(batch)]) for x in (k, v)]
    expected = kv_attention(q, *gathered, lengths=lengths)
    assert torch.equal(kv_attention(q, k, v, lengths=lengths, block_table=garbage), expected)


def test_garbage_past_the_length_changes_nothing() -> None:
    q, cache = normal(5, 3, 2, 4, 8), normal(6, 2, 3, 10, 2, 8)
    lengths = torch.tensor([2, 7, 10])
    clean = kv_attention(q, *cache, lengths=lengths, window=4)
    cache[:, torch.arange(10) >= lengths[:, None]] = torch.nan
    cache[:, 1, :2] = torch.inf  # left every query's window
    leaves = [q.requires_grad_(), *(x.requires_grad_() for x in cache.unbind())]
    out = kv_attention(*leaves, lengths=lengths, window=4)
    assert torch.equal(out, clean)
    gradients = torch.autograd.grad(out.sum(), leaves)
    hidden = torch.arange(10) >= lengths[:, None]
    hidden[1, :2] = True
    for gradient in gradients[1:]:
        assert (gradient[hidden] == 0).all()
        assert gradient[~hidden].isfinite().all()
    assert gradients[0].isfinite().all()


def test_chunks_and_decode_give_the_prefill() -> None:
    length, chunk = 11, 4
    q, (k, v) = normal(7, 2, length, 4, 8), normal(8, 2, 2, 16, 2, 8)
    whole = attention(q, k[:, :length], v[:, :length])
    for step in (1, chunk):
        for start in range(0, length, step):
            stop = min(start + step, length)
            part = kv_attention(q[:, start:stop], k, v, lengths=torch.full((2,), stop))
            torch.testing.assert_close(part, whole[:, start:stop], rtol=1e-11, atol=1e-12)


def test_a_query_before_position_zero_gives_zero() -> None:
    q, (k, v) = normal(9, 2, 3, 2, 4), normal(10, 2, 2, 5, 1, 4)
    leaves = [x.requires_grad_() for x in (q, k.clone(), v.clone())]
    out = kv_attention(*leaves, lengths=torch.tensor([0, 2]))
    assert (out[0] == 0).all()
    assert (out[1, 0] == 0).all()
    assert (out[1, 1:] != 0).all()
    gradient = torch.autograd.grad(out.sum(), leaves)[0]
    assert (gradient[0] == 0).all()
    assert (gradient[1, 0] == 0).all()


@pytest.mark.parametrize("paged", [False, True])
def test_gradients_by_finite_differences(paged: bool) -> None:
    table = torch.tensor([[2, 0], [1, -1]]) if paged else None
    shape = (3, 2, 1, 2) if paged else (2, 4, 1, 2)
    leaves = tuple(x.requires_grad_() for x in (normal(11, 2, 2, 2, 2), normal(12, *shape), normal(13, *shape)))
    lengths = torch.tensor([3, 2])
    assert torch.autograd.gradcheck(
        lambda q, k, v: kv_attention(q, k, v, lengths=lengths, block_table=table, softcap=1.5, scale=0.9), leaves
    )


def test_low_precision_is_rounded_once() -> None:
    q, cache = normal(14, 3, 1, 4, 32).bfloat16(), normal(15, 2, 3, 40, 2, 32).bfloat16()
    lengths = torch.tensor([40, 17, 1])
    exact = kv_attention(q.double(), *cache.double(), lengths=lengths)
    out = kv_attention(q, *cache, lengths=lengths)
    assert out.dtype == torch.bfloat16
    assert (out == exact.bfloat16()).float().mean() > 0.99
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)
