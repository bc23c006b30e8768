"""`attention` against explicit loops in float64, its hidden slots, its gradients, and its two implementations."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlk_ops import Unsupported, attention, use

IMPLEMENTATIONS = ("reference", "sdpa")


def loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    shared_prefix: tuple[Tensor, Tensor] | None = None,
) -> np.ndarray:
    """Attention one query and one key at a time, in float64; a hidden key is never touched."""
    batch, queries, heads, width = q.shape
    prefix = 0 if shared_prefix is None else shared_prefix[0].shape[1]
    total, group = prefix + k.shape[1], heads // k.shape[2]
    out = np.zeros(q.shape)
    for b, i, h in product(range(batch), range(queries), range(heads)):
        place = total - queries + i
        scores, values = [], []
        for j in range(total):
            hidden = (causal and j > place) or (window is not None and j <= place - window)
            if j >= prefix and key_padding_mask is not None and not key_padding_mask[b, j - prefix]:
                hidden = True
            if hidden:
                continue
            key, value = (k[b, j - prefix], v[b, j - prefix]) if j >= prefix else (t[0, j] for t in shared_prefix or ())
            score = float(np.dot(q[b, i, h].double().numpy(), key[h // group].double().numpy()))
            score *= 1 / math.sqrt(width) if scale is None else scale
            scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
            values.append(value[h // group].double().numpy())
        if scores:
            weights = np.exp(np.array(scores) - max(scores))
            out[b, i, h] = (weights[:, None] * np.array(values)).sum(0) / weights.sum()
    return out


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(seed: int, batch: int, queries: int, keys: int, heads: int, groups: int, width: int) -> dict[str, Any]:
    k, v = normal(seed + 1000, 2, batch, keys, groups, width)
    return {"q": normal(seed, batch, queries, heads, width), "k": k, "v": v}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(24))
def test_every_option_against_loops(seed: int, impl: str) -> None:
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 4))
    batch, queries, keys = (int(rng.integers(1, high)) for high in (4, 8, 9))
    given = inputs(seed, batch, queries, keys, groups * int(rng.integers(1, 4)), groups, int(rng.integers(1, 9)))
    options: dict[str, Any] = {"causal": bool(rng.random() < 0.7)}
    if rng.random() < 0.3:
        options["scale"] = float(rng.random()) + 0.1
    if rng.random() < 0.5:
        options["key_padding_mask"] = torch.from_numpy(rng.random((batch, keys)) < 0.6)
    if options["causal"] and rng.random() < 0.5:
        options["window"] = int(rng.integers(1, 6))
    if impl == "reference" and rng.random() < 0.4:
        options["softcap"] = 1.5
    if rng.random() < 0.4:
        prefix = normal(seed + 7, 2, 1, int(rng.integers(0, 5)), *given["k"].shape[2:])
        options["shared_prefix"] = (prefix[0], prefix[1])
    result = attention(**given, **options, impl=impl)
    np.testing.assert_allclose(result.numpy(), loops(**given, **options), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_plain_causal_agrees_with_torch(impl: str) -> None:
    given = inputs(3, 2, 33, 33, 4, 4, 16)
    q, k, v = given["q"].transpose(1, 2), given["k"].transpose(1, 2), given["v"].transpose(1, 2)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attention(**given, impl=impl), expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 3}, {"prefix": 4}])
def test_packed_sequences_are_each_their_own_call(options: dict[str, Any], impl: str) -> None:
    given = inputs(4, 1, 15, 25, 4, 2, 8)
    options = dict(options)
    if length := options.pop("prefix", 0):
        options["shared_prefix"] = tuple(normal(8, 2, 1, length, 2, 8))
    edges_q, edges_k = [0, 5, 5, 12, 14, 15], [0, 5, 8, 15, 15, 25]
    packed = attention(
        **given, **options, cu_seqlens_q=torch.tensor(edges_q), cu_seqlens_k=torch.tensor(edges_k).int(), impl=impl
    )
    for a, b, c, d in zip(edges_q, edges_q[1:], edges_k, edges_k[1:]):
        alone = loops(given["q"][:, a:b], given["k"][:, c:d], given["v"][:, c:d], **options)
        np.testing.assert_allclose(packed[:, a:b].numpy(), alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_hidden_keys_and_blind_queries_may_hold_nan(impl: str) -> None:
    """Left padding, with NaN in every padded q, k and v: the outputs and gradients of the stripped sequences."""
    real = [6, 2, 0, 4]
    given = inputs(5, 4, 6, 6, 4, 2, 8)
    mask = torch.arange(6) >= 6 - torch.tensor(real)[:, None]
    for tensor in given.values():
        tensor[~mask] = torch.nan
        tensor.requires_grad_()
    out = attention(**given, key_padding_mask=mask, impl=impl)
    upstream = normal(6, *out.shape)
    gradients = torch.autograd.grad(out, tuple(given.values()), upstream)
    assert (out[~mask] == 0).all()
    for gradient in gradients:
        assert (gradient[~mask] == 0).all()
    for row, length in enumerate(real):
        alone = {name: x.detach()[row : row + 1, 6 - length :].requires_grad_() for name, x in given.items()}
        expected = attention(**alone, impl="reference")
        torch.testing.assert_close(out[row : row + 1, 6 - length :], expected, rtol=1e-11, atol=1e-12)
        wanted = torch.autograd.grad(expected, tuple(alone.values()), upstream[row : row + 1, 6 - length :])
        for gradient, one in zip(gradients, wanted):
            torch.testing.assert_close(gradient[row : row + 1, 6 - length :], one, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_keys_that_left_every_window_are_not_read(impl: str) -> None:
    given = inputs(7, 2, 3, 10, 2, 1, 4)
    clean = attention(**given, window=2, impl=impl)
    for name in ("k", "v"):
        given[name][:, :6] = torch.nan
    assert torch.equal(attention(**given, window=2, impl=impl), clean)
    given["k"][:, 6] = torch.nan
    assert attention(**given, window=2, impl=impl).isnan().any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}, {"padded": True}])
def test_gradients_by_finite_differences(options: dict[str, Any], impl: str) -> None:
    options = dict(options)
    if options.pop("padded", False):
        options["key_padding_mask"] = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]])
    given = inputs(9, 2, 3, 4, 2, 1, 2)
    prefix = tuple(normal(10, 2, 1, 2, 1, 2))
    names = [*given]

    def call(*tensors: Tensor) -> Tensor:
        values = dict(zip(names, tensors))
        return attention(**values, shared_prefix=(tensors[3], tensors[4]), **options, impl=impl)

    assert torch.autograd.gradcheck(call, tuple(x.clone().requires_grad_() for x in (*given.values(), *prefix)))


def test_softcap_gradient_by_finite_differences() -> None:
    given = tuple(x.requires_grad_() for x in inputs(11, 1, 3, 3, 2, 1, 2).values())
    assert torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, softcap=0.8, scale=1.3), given)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_every_combination_of_requires_grad(impl: str) -> None:
    given = inputs(12, 2, 4, 4, 2, 1, 4)
    upstream = normal(13, 2, 4, 2, 4)
    full = [x.clone().requires_grad_() for x in given.values()]
    expected = torch.autograd.grad(attention(*full, impl=impl), full, upstream)
    for wanted in product([False, True], repeat=3):
        tensors = [x.clone().requires_grad_(flag) for x, flag in zip(given.values(), wanted)]
        out = attention(*tensors, impl=impl)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward(upstream)
        for tensor, flag, gradient in zip(tensors, wanted, expected):
            assert (tensor.grad is not None) == flag
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_about_one_rounding(dtype: torch.dtype, impl: str) -> None:
    wide = inputs(14, 2, 40, 40, 4, 2, 32)
    narrow = {name: x.to(dtype) for name, x in wide.items()}
    exact = attention(**{name: x.double() for name, x in narrow.items()})
    result = attention(**narrow, impl=impl)
    assert result.dtype == dtype
    rounding = (exact.to(dtype).double() - exact).abs().max() + 1e-7
    assert (result.double() - exact).abs().max() <= (1 if impl == "reference" else 4) * rounding + 1e-6


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strides_of_inputs_and_upstream_gradient_do_not_matter(impl: str) -> None:
    base = normal(15, 3, 2, 4, 12, 16)[..., ::2]
    tensors = [x.transpose(1, 2)[:, ::2].requires_grad_() for x in base]
    copies = [x.detach().contiguous().requires_grad_() for x in tensors]
    upstream = normal(16, 1).expand(2, 6, 4, 8)
    results = [attention(*group, impl=impl) for group in (tensors, copies)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)
    gradients = [
        torch.autograd.grad(results[0], tensors, upstream),
        torch.autograd.grad(results[1], copies, upstream.contiguous()),
    ]
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 3, 0), (2, 0, 3), (0, 3, 3), (2, 0, 0)])
def test_empty_inputs_give_zeros_and_a_live_graph(batch: int, queries: int, keys: int, impl: str) -> None:
    tensors = [x.requires_grad_() for x in inputs(17, batch, queries, keys, 2, 1, 4).values()]
    out = attention(*tensors, impl=impl)
    assert out.shape == tensors[0].shape
    assert (out == 0).all()
    out.sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()


def test_large_scores_do_not_overflow() -> None:
    given = {name: x.float() * 60 for name, x in inputs(18, 1, 9, 9, 2, 2, 16).items()}
    expected = loops(**given)
    np.testing.assert_allclose(attention(**given).numpy(), expected, rtol=2e-3, atol=2e-2)
    assert torch.isfinite(attention(**given, impl="reference")).all()


def test_sdpa_is_chosen_where_it_can_and_says_why_not() -> None:
    given = {name: x.float() for name, x in inputs(19, 1, 4, 4, 2, 1, 8).items()}
    assert attention.selected(**given) == "sdpa"
    assert attention.selected(**given, softcap=2.0) == "reference"
    assert "softcap" in (attention.explain(**given, softcap=2.0)["sdpa"] or "")
    with use(attention="sdpa"), pytest.raises(Unsupported, match="softcap"):
        attention(**given, softcap=2.0)


def test_sdpa_refuses_products_that_are_not_ieee() -> None:
    given = {name: x.float() for name, x in inputs(20, 1, 4, 4, 2, 1, 8).items()}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert "TF32" in (attention.explain(**given)["sdpa"] or "")
        assert attention.selected(**given) == "reference"
        assert attention.selected(**{name: x.double() for name, x in given.items()}) == "sdpa"
    finally:
        torch.set_float32_matmul_precision(before)
    assert attention.selected(**given) == "sdpa"
