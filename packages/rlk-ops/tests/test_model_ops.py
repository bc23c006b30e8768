"""The transformer's operators against formulas in float64, PyTorch's own functions and Transformers' Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rlk_ops import attention, embedding, kv_attention, lm_head, matmul, rms_norm, rope, sample, silu, swiglu
from rlk_ops.ops.precision import ieee_float32, reduced_float32
from rlk_ops.registry import Op
from rlk_ops.testing.case import Case, ErrorCase

OPS: list[Op[Any]] = [attention, kv_attention, rms_norm, rope, silu, swiglu, embedding, lm_head, matmul, sample]
INVARIANT: list[Op[Any]] = [rms_norm, rope, silu, swiglu, embedding]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everyday(tag: str | None = None) -> list[Any]:
    pairs = [(op, case) for op in OPS for case in op.list_cases() if "bench" not in case.tags]
    chosen = [(op, case) for op, case in pairs if tag is None or tag in case.tags]
    return [pytest.param(op, case, id=f"{op.name}-{case.name}") for op, case in chosen]


def build(case: Case | ErrorCase, dtype: torch.dtype | None = None) -> dict[str, Any]:
    arguments = dict(case.build(torch.Generator().manual_seed(11)))
    if dtype is not None:
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                arguments[name] = value.to(dtype)
    return arguments


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# Every operator's own cases.


@pytest.mark.parametrize(
    ("op", "case"), [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in op.list_errors()]
)
def test_wrong_calls_raise_and_name_the_argument(op: Op[Any], case: ErrorCase) -> None:
    with pytest.raises(case.raises, match=case.match):
        op(**build(case))


@pytest.mark.parametrize(("op", "case"), everyday("gradcheck"))
def test_gradients_by_finite_differences(op: Op[Any], case: Case) -> None:
    arguments = build(case)
    names = [name for name in op.differentiable if arguments.get(name) is not None]
    leaves = tuple(arguments[name].clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(lambda *xs: op(**{**arguments, **dict(zip(names, xs))}, impl="reference"), leaves)


@pytest.mark.parametrize(("op", "case"), everyday())
def test_every_combination_of_requires_grad(op: Op[Any], case: Case) -> None:
    arguments = build(case)
    names = [name for name in op.differentiable if arguments.get(name) is not None]

    def gradients(wanted: tuple[bool, ...]) -> list[Tensor | None]:
        leaves = {name: arguments[name].clone().requires_grad_(flag) for name, flag in zip(names, wanted)}
        results = outputs(op(**{**arguments, **leaves}, impl="reference"))
        assert results[0].requires_grad == any(wanted)
        if any(wanted):
            sum((out * (i + 1)).sum() for i, out in enumerate(results) if out.requires_grad).backward()  # type: ignore[union-attr]
        return [leaf.grad for leaf in leaves.values()]

    complete = gradients((True,) * len(names))
    for wanted in product([False, True], repeat=len(names)):
        for flag, gradient, expected in zip(wanted, gradients(wanted), complete):
            if flag:
                torch.testing.assert_close(gradient, expected, rtol=0, atol=0, equal_nan=True)
            else:
                assert gradient is None
    if "empty" in case.tags:
        assert all(gradient is not None and (gradient == 0).all() for gradient in complete)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("op", "case"), [p for p in everyday() if p.values[0] not in (sample,)])
def test_low_precision_is_the_float64_result_rounded(op: Op[Any], case: Case, dtype: torch.dtype) -> None:
    arguments = {**build(case, dtype), **({"shared_prefix": None} if op is attention else {})}
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in arguments.items()}
    for result, exact in zip(outputs(op(**arguments, impl="reference")), outputs(op(**wide, impl="reference"))):
        expected_dtype = torch.float32 if op is lm_head else dtype
        assert result.dtype == expected_dtype
        resolution = torch.finfo(result.dtype).eps
        size = exact.abs().masked_fill(~exact.isfinite(), 0).max() if exact.numel() else 0
        narrow = 3e-4 * size if case.name == "extreme" else 2e-6 * size
        torch.testing.assert_close(
            result.double(), exact.to(result.dtype).double(), rtol=resolution, atol=float(narrow) + 1e-7, equal_nan=True
        )


@pytest.mark.parametrize(("op", "case"), everyday())
def test_strides_do_not_matter(op: Op[Any], case: Case) -> None:
    arguments = build(case)

    def spread(x: Any) -> Any:
        """The same values with reversed strides and gaps."""
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        wide = torch.stack([x, torch.zeros_like(x)], -1).permute(*range(x.ndim - 1, -1, -1), x.ndim).contiguous()
        return wide[..., 0].permute(*range(x.ndim - 1, -1, -1))

    dense = {n: x.contiguous() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    strided = {n: spread(x) for n, x in arguments.items()}
    assert all(torch.equal(strided[n], x) or x.isnan().any() for n, x in dense.items() if isinstance(x, Tensor))
    for one, other in zip(outputs(op(**dense, impl="reference")), outputs(op(**strided, impl="reference"))):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", INVARIANT, ids=lambda op: op.name)
def test_a_row_has_the_same_bits_in_any_batch(op: Op[Any], dtype: torch.dtype) -> None:
    """Widths that are no multiple of a vector: a row falls into vector bodies and tails, depending on its place."""
    for seed, width in enumerate((1, 6, 38, 250, 1026)):
        arguments, rows, whole = _batch(op, dtype, width, seed)
        upstream = normal(99, *whole.shape).to(whole.dtype)
        gradients = _row_gradients(op, arguments, whole, upstream)
        for start, stop in ((0, 1), (1, 2), (6, 7), (0, 3), (2, 7), (4, 6)):
            part = {n: (x[start:stop].clone() if n in rows else x).detach() for n, x in arguments.items()}
            for name in set(rows) & set(op.differentiable):
                part[name].requires_grad_()
            out = outputs(op(**part, impl="reference"))[0]
            assert torch.equal(out, whole[start:stop]), (width, start, stop)
            for name, gradient in _row_gradients(op, part, out, upstream[start:stop]).items():
                assert torch.equal(gradient, gradients[name][start:stop]), (name, width, start, stop)


def _batch(op: Op[Any], dtype: torch.dtype, width: int, seed: int) -> tuple[dict[str, Any], list[str], Tensor]:
    if op is embedding:
        arguments = {"token_ids": torch.arange(7) % 5, "weight": normal(seed, 5, width).to(dtype)}
    elif op is rope:
        positions = torch.arange(21).view(7, 3) * 97
        arguments = {"x": normal(seed, 7, 3, 2, 2 * width).to(dtype), "positions": positions}
    else:
        names = {"rms_norm": ["x", "residual"], "silu": ["x"], "swiglu": ["gate", "up"]}[op.name]
        arguments = {name: (normal(seed + i, 7, width) * 3).to(dtype) for i, name in enumerate(names)}
        if op is rms_norm:
            arguments["weight"] = normal(seed + 5, width).to(dtype)
    rows = [name for name in op.rows if name in arguments]
    for name in set(rows) & set(op.differentiable):
        arguments[name].requires_grad_()
    return arguments, rows, outputs(op(**arguments, impl="reference"))[0]


def _row_gradients(op: Op[Any], arguments: dict[str, Any], out: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    names = [n for n in op.rows if n in op.differentiable and arguments.get(n) is not None]
    leaves = [arguments[n] for n in names]
    return dict(zip(names, torch.autograd.grad(out, leaves, upstream))) if names else {}


# rms_norm


def test_rms_norm_is_qwen3s() -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x, weight = normal(0, 3, 5, 40).float(), normal(1, 40).float()
    theirs = Qwen3RMSNorm(40, eps=1e-5)
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5), theirs(x), rtol=2e-6, atol=1e-6)


def test_rms_norm_formula_and_gradients_against_plain_autograd() -> None:
    x, weight = normal(2, 4, 3, 13).requires_grad_(), normal(3, 13).requires_grad_()
    upstream = normal(4, 13).expand(4, 3, 13)
    plain = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    ours = rms_norm(x, weight, eps=1e-3)
    torch.testing.assert_close(ours, plain, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(ours, functional.rms_norm(x, (13,), weight, 1e-3), rtol=1e-13, atol=1e-14)
    wanted = torch.autograd.grad(plain, (x, weight), upstream)
    for ours_one, expected in zip(torch.autograd.grad(ours, (x, weight), upstream), wanted):
        torch.testing.assert_close(ours_one, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_with_a_residual_is_an_addition_and_a_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (normal(5 + i, *shape).to(dtype) for i, shape in enumerate([(6, 50), (6, 50), (50,)]))
    normed, summed = rms_norm(x, weight, residual=residual)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, rms_norm(summed, weight))


def test_rms_norm_weight_gradient_is_summed_in_float32() -> None:
    rows = 3000
    x = torch.ones(rows, 4, dtype=torch.bfloat16)
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(
        weight.grad.double(), torch.full((4,), float(rows), dtype=torch.float64), rtol=2**-8, atol=0
    )


def test_rms_norm_spoilt_row_spoils_no_other() -> None:
    x, weight = normal(8, 5, 12).float(), normal(9, 12).float()
    clean = rms_norm(x, weight)
    x[1, 3], x[3, 0] = torch.nan, torch.inf
    spoilt = rms_norm(x, weight)
    assert torch.equal(spoilt[[0, 2, 4]], clean[[0, 2, 4]])
    assert spoilt[1].isnan().all()


# rope


def test_rope_is_qwen3s() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=16, rope_theta=1e6)
    q, k = normal(10, 2, 7, 4, 16).float(), normal(11, 2, 7, 2, 16).float()
    positions = torch.stack([torch.arange(7), torch.arange(7) + 300])
    cosine, sine = Qwen3RotaryEmbedding(config)(q, positions)
    expected = apply_rotary_pos_emb(q, k, cosine, sine, unsqueeze_dim=2)
    for ours, theirs in zip((rope(q, positions), rope(k, positions)), expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotary_dim", [None, 6])
def test_rope_is_a_complex_product(rotary_dim: int | None) -> None:
    x, positions = normal(12, 2, 4, 3, 10), torch.tensor([[0, 1, 77, 131071], [5, 6, 7, 8]])
    rotated = rope(x, positions, theta=1e4, rotary_dim=rotary_dim).numpy()
    width = rotary_dim or 10
    half = width // 2
    values = x.numpy()[..., :half] + 1j * x.numpy()[..., half:width]
    for i in range(half):
        turn = np.exp(1j * positions.numpy() * 1e4 ** (-2 * i / width))
        expected = values[..., i] * turn[..., None]
        np.testing.assert_allclose(rotated[..., i], expected.real, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(rotated[..., half + i], expected.imag, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(rotated[..., width:], x.numpy()[..., width:])


def test_rope_far_positions_are_exact_in_float32() -> None:
    x, positions = normal(13, 1, 3, 1, 128), torch.tensor([131071, 1_000_003, 16_777_217])
    torch.testing.assert_close(rope(x.float(), positions).double(), rope(x, positions), rtol=0, atol=1e-6)


def test_rope_scores_depend_on_the_distance_only() -> None:
    q, k = normal(14, 1, 1, 1, 32), normal(15, 1, 1, 1, 32)

    def score(i: int, j: int) -> float:
        return float((rope(q, torch.tensor([i])) * rope(k, torch.tensor([j]))).sum())

    assert score(12, 5) == pytest.approx(score(1012, 1005), rel=1e-9)
    assert score(12, 5) != pytest.approx(score(12, 6), rel=1e-3)


def test_rope_defaults_and_both_spellings_of_positions() -> None:
    x, positions = normal(16, 3, 5, 2, 8), torch.arange(5)
    assert torch.equal(rope(x, positions), rope(x, positions.expand(3, 5), theta=1e6, rotary_dim=8))


# silu, swiglu


def test_silu_and_swiglu_are_torchs_formulas() -> None:
    gate, up = normal(17, 2, 40, 9).mul(6).unbind()
    torch.testing.assert_close(silu(gate), functional.silu(gate), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(swiglu(gate, up), functional.silu(gate) * up, rtol=1e-14, atol=1e-15)


def test_silu_at_the_edges() -> None:
    x = torch.tensor([0.0, 100.0, -100.0, 1e4, -1e4, 2.0**127, -(2.0**127)], requires_grad=True)
    out = silu(x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.tolist() == pytest.approx([0.0, 100.0, 0.0, 1e4, 0.0, 2.0**127, 0.0], abs=1e-30)
    assert gradient.tolist() == [0.5, 1.0, pytest.approx(0, abs=1e-30), 1.0, 0.0, 1.0, 0.0]


def test_swiglu_rounds_once() -> None:
    gate, up = (normal(18, 2, 4096) * 2).bfloat16().unbind()
    exact = functional.silu(gate.double()) * up.double()
    assert (swiglu(gate, up) == exact.bfloat16()).float().mean() > 0.999
    twice = functional.silu(gate) * up
    assert (twice == exact.bfloat16()).float().mean() < 0.9


def test_activations_keep_only_their_inputs() -> None:
    gate, up = (x.requires_grad_() for x in normal(19, 2, 64).bfloat16())
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        silu(gate)
        swiglu(gate, up)
    assert {x.data_ptr() for x in kept} == {gate.data_ptr(), up.data_ptr()}


# embedding


def test_embedding_is_torchs_and_its_gradient_is_a_one_hot_product() -> None:
    token_ids = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(20))
    weight = normal(21, 11, 6).requires_grad_()
    out = embedding(token_ids, weight)
    assert torch.equal(out, functional.embedding(token_ids, weight))
    upstream = normal(22, 9, 6).expand(4, 9, 6)
    (gradient,) = torch.autograd.grad(out, weight, upstream)
    one_hot = functional.one_hot(token_ids, 11).double().flatten(0, 1)
    torch.testing.assert_close(gradient, one_hot.T @ upstream.reshape(-1, 6), rtol=1e-12, atol=1e-13)


def test_embedding_gradient_is_summed_in_float32_and_in_order() -> None:
    weight = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    token_ids = torch.tensor([2] * 3000 + [0])
    (gradient,) = torch.autograd.grad(embedding(token_ids, weight).sum(), weight)
    torch.testing.assert_close(gradient, torch.tensor([[1.0, 1], [0, 0], [3000, 3000]]).bfloat16(), rtol=0, atol=0)
    weight = torch.zeros(2, 3, requires_grad=True)
    upstream = normal(23, 500, 3).float()
    (gradient,) = torch.autograd.grad(embedding(torch.ones(500, dtype=torch.int64), weight), weight, upstream)
    total = np.zeros(3, dtype=np.float32)
    for row in upstream.numpy():
        total = total + row
    assert torch.equal(gradient[1], torch.from_numpy(total))


def test_embedding_takes_any_integer_ids() -> None:
    weight = normal(24, 5, 2)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(embedding(torch.tensor([4, 0], dtype=dtype), weight), weight[[4, 0]])


# lm_head, matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lm_head_logits_and_gradients_against_numpy(dtype: torch.dtype) -> None:
    hidden, weight, bias = (normal(25 + i, *shape).to(dtype) for i, shape in enumerate([(2, 5, 48), (70, 48), (70,)]))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logits = lm_head(hidden, weight, bias=bias)
    assert logits.dtype == torch.float32
    h, w, b = (x.detach().double().numpy() for x in leaves)
    np.testing.assert_allclose(logits.detach().numpy(), h @ w.T + b, rtol=1e-5, atol=1e-5)
    upstream = normal(30, 2, 5, 70).float()
    u = upstream.double().numpy()
    expected = (u @ w, np.einsum("abv,abh->vh", u, h), u.sum((0, 1)))
    for gradient, wanted in zip(torch.autograd.grad(logits, leaves, upstream), expected):
        assert gradient.dtype == dtype
        tolerance = torch.finfo(dtype).eps
        np.testing.assert_allclose(gradient.double().numpy(), wanted, rtol=tolerance, atol=1e-4)


def test_result_dtypes() -> None:
    a, b = normal(31, 3, 4).bfloat16(), normal(32, 4, 5).bfloat16()
    assert matmul(a, b).dtype == torch.bfloat16
    wide = matmul(a, b, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(matmul(a, b), wide.bfloat16())
    assert lm_head(a, b.T, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert lm_head(a.double(), b.T.double()).dtype == torch.float64
    assert matmul(a.double(), b.double()).dtype == torch.float64
    with pytest.raises(ValueError, match="out_dtype"):
        matmul(a.double(), b.double(), out_dtype=torch.float32)


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (0, 7)])
def test_matmul_takes_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    a, b = normal(33, *shape), normal(34, 9, 7).T
    out = matmul(a, b)
    assert out.shape == (*shape[:-1], 9)
    np.testing.assert_allclose(out.numpy(), a.numpy() @ b.numpy(), rtol=1e-12, atol=1e-13)


def test_matmul_accumulates_in_float32_where_terms_cancel() -> None:
    a = torch.tensor([[4096.0, 1.0, -4096.0]], dtype=torch.bfloat16)
    b = torch.ones(3, 1, dtype=torch.bfloat16)
    assert matmul(a, b).item() == 1.0


class _SeenPrecision(TorchDispatchMode):
    """Whether reduced float32 products were allowed while each product ran, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.reduced.append(reduced_float32())
        return func(*args, **(kwargs or {}))


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: matmul(x, x.T),
        lambda x: lm_head(x, x),
        lambda x: attention(x[None, :, None], x[None, :, None], x[None, :, None], impl="reference"),
    ],
)
def test_products_are_ieee_forward_and_backward(call: Callable[[Tensor], Tensor], precision: str) -> None:
    x = normal(35, 8, 8).float().requires_grad_()
    with matmul_precision(precision):
        assert reduced_float32()
        seen = _SeenPrecision()
        with seen:
            call(x).square().sum().backward()
        assert len(seen.reduced) >= 3
        assert not any(seen.reduced)
        assert reduced_float32()
        assert torch.get_float32_matmul_precision() == precision


def test_ieee_blocks_nest_and_restore() -> None:
    with matmul_precision("high"):
        with ieee_float32():
            with ieee_float32():
                assert not reduced_float32()
            assert not reduced_float32()
        assert reduced_float32()
    assert not reduced_float32()
