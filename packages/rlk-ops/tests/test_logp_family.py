"""logp, linear_logp and ratio_kl against loops in float64, and the faults that others met."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlk_ops import linear_logp, logp, ratio_kl
from rlk_ops.ops.logits import transform_logits

IMPLS = ("reference", "chunked")


def by_hand(raw, token, *, scale=1.0, cap=None, temperature=1.0, keep=None):
    """One row in plain Python: (log-prob, entropy)."""
    xs = []
    for column, x in enumerate(raw):
        if x == -math.inf or (keep is not None and column not in keep):
            xs.append(-math.inf)
            continue
        x = x * scale
        x = cap * math.tanh(x / cap) if cap else x
        xs.append(x / temperature)
    top = max(xs)
    total = math.fsum(math.exp(x - top) for x in xs)
    table = [x - top - math.log(total) for x in xs]
    entropy = -math.fsum(math.exp(t) * t for t in table if t > -math.inf)
    return table[token], entropy


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"softcap": 2.0}, {"logit_scale": 1.7, "softcap": 3.0, "temperature": 1.4}],
)
def test_values_equal_a_loop(seed, options):
    logits = 3 * draw(seed, 4, 9)
    logits[1, 2] = -math.inf
    ids = torch.tensor([0, 8, 3, 5])
    got, entropy = logp(logits, ids, return_entropy=True, **options)
    names = {"logit_scale": "scale", "softcap": "cap", "temperature": "temperature"}
    for row in range(4):
        hand = by_hand(logits[row].tolist(), int(ids[row]), **{names[k]: v for k, v in options.items()})
        assert (got[row].item(), entropy[row].item()) == pytest.approx(hand, abs=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["mask", "ids", "vocab_size"])
def test_support_and_padded_head_equal_a_loop(impl, kind):
    hidden, weight, bias = draw(1, 4, 6), draw(2, 11, 6), draw(3, 11)
    ids, kept = torch.tensor([1, 4, 0, 7]), [{1, 3}, {4}, {0, 2, 9}, {7, 8}]
    options = {"vocab_size": 8}
    if kind == "mask":
        options = {"support": torch.tensor([[c in keep for c in range(11)] for keep in kept])}
    elif kind == "ids":
        options = {"support": torch.tensor([[*sorted(keep), *[-1] * (4 - len(keep))] for keep in kept])}
    else:
        kept = [set(range(8))] * 4
    got = linear_logp(hidden, weight, ids, bias=bias, impl=impl, memory_budget=200, **options)
    raw = hidden @ weight.T + bias
    for row in range(4):
        hand, _ = by_hand(raw[row].tolist(), int(ids[row]), keep=kept[row])
        assert got[row].item() == pytest.approx(hand, abs=1e-12)


def test_temperature_divides_before_the_softmax_on_every_row():
    logits, ids = 4 * draw(0, 5, 7), torch.tensor([0, 1, 2, 3, 4])
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0], dtype=torch.float64)
    each = [logp(logits[i], ids[i], temperature=float(temperature[i])).item() for i in range(5)]
    assert logp(logits, ids, temperature=temperature).tolist() == pytest.approx(each, abs=1e-12)


def test_softcap_does_not_revive_a_banned_token():
    raw = torch.tensor([[1.0, -math.inf, 2.0]], requires_grad=True)
    x = transform_logits(raw, softcap=1.0, logit_scale=2.0, temperature=0.5)
    assert x[0, 1] == -math.inf
    torch.log_softmax(x, -1)[0, 0].backward()
    assert raw.grad[0, 1] == 0.0
    assert raw.grad.isfinite().all()


@pytest.mark.parametrize("banned", [slice(0, 256), slice(256, 512), slice(0, 599)])
def test_whole_tiles_of_minus_infinity(banned):
    bias = draw(0, 600)
    bias[banned] = -math.inf
    hidden, weight, ids = draw(1, 3, 4), draw(2, 600, 4), torch.tensor([599, 599, 599])
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    got = linear_logp(leaves[0], leaves[1], ids, bias=leaves[2], memory_budget=3 * 256 * 8 * 4, impl="chunked")
    gold = torch.log_softmax(hidden @ weight.T + bias, -1)[:, 599]
    assert torch.allclose(got, gold, atol=1e-12)
    got.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    assert leaves[2].grad[banned].eq(0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_banned_target_is_minus_infinity_with_finite_gradients_elsewhere(impl):
    bias = torch.zeros(5, dtype=torch.float64)
    bias[2] = -math.inf
    hidden, weight = draw(1, 2, 3).requires_grad_(), draw(2, 5, 3).requires_grad_()
    got = linear_logp(hidden, weight, torch.tensor([2, 0]), bias=bias, impl=impl)
    assert got[0] == -math.inf
    assert got[1].isfinite()
    got.backward(torch.ones(2, dtype=torch.float64))
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_nan_alone(bad):
    logits = draw(0, 3, 6)
    logits[1] = bad if bad == -math.inf else logits[1]
    logits[1, 4] = bad
    for softcap in (None, 2.0):
        got, entropy = logp(logits, torch.tensor([0, 1, 2]), return_entropy=True, softcap=softcap)
        assert got.isnan().tolist() == [False, True, False]
        assert entropy.isnan().tolist() == [False, True, False]


def test_entropy_at_zero_probability_has_a_finite_gradient():
    logits = torch.tensor([[0.0, -2000.0, -math.inf]], requires_grad=True)
    _, entropy = logp(logits, torch.tensor([0]), return_entropy=True)
    assert entropy.item() == 0.0
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_masked_garbage_reaches_nothing(impl):
    hidden, weight = draw(0, 2, 3, 4), draw(1, 9, 4)
    ids, mask = torch.randint(0, 9, (2, 3)), torch.tensor([[1, 0, 1], [0, 1, 1]])
    clean = hidden.clone()
    hidden[0, 1], hidden[1, 0] = math.nan, math.inf
    dirty_ids = torch.where(mask.bool(), ids, 10**12)
    results = []
    for h, i in ((clean, ids), (hidden, dirty_ids)):
        leaves = [t.clone().requires_grad_() for t in (h, weight)]
        out, entropy = linear_logp(*leaves, i, mask=mask, return_entropy=True, impl=impl)
        (out.sum() + entropy.sum()).backward()
        results.append((out, entropy, leaves[0].grad, leaves[1].grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[1][2][0, 1].eq(0).all()
    assert results[1][0][0, 1] == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_counted_gives_zero_with_a_live_graph(impl):
    hidden, weight = draw(0, 3, 4).requires_grad_(), draw(1, 9, 4).requires_grad_()
    out = linear_logp(hidden, weight, torch.full((3,), -100), impl=impl)
    assert out.tolist() == [0, 0, 0]
    out.sum().backward()
    assert hidden.grad.eq(0).all()
    assert weight.grad.eq(0).all()


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000, 1023, 1025])
def test_any_vocabulary_size_and_never_a_positive_log_prob(vocabulary):
    hidden, weight = draw(0, 5, 3).float(), draw(1, vocabulary, 3).float()
    ids = torch.randint(0, vocabulary, (5,))
    got = linear_logp(hidden, weight, ids, memory_budget=5 * 100 * 16)
    gold = torch.log_softmax((hidden.double() @ weight.double().T), -1).gather(1, ids[:, None])[:, 0]
    assert torch.allclose(got.double(), gold, atol=1e-5)
    assert (got <= 0).all()


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_only_the_gradients_that_were_asked_for(wanted):
    leaves = [t.requires_grad_(w) for t, w in zip((draw(0, 3, 4), draw(1, 7, 4), draw(2, 7)), wanted)]
    out = linear_logp(leaves[0], leaves[1], torch.tensor([1, 2, 3]), bias=leaves[2], impl="chunked")
    assert out.requires_grad == any(wanted)
    if any(wanted):
        out.sum().backward()
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_weight_gradients_accumulate_in_fp32_however_many_chunks():
    hidden, weight = draw(0, 4096, 8).bfloat16(), draw(1, 16, 8).bfloat16()
    ids = torch.randint(0, 16, (4096,), generator=torch.Generator().manual_seed(0))
    gold = weight.double().requires_grad_()
    torch.log_softmax(hidden.double() @ gold.T, -1).gather(1, ids[:, None]).sum().backward()
    errors = []
    for budget in (1 << 30, 16 * 16 * 4 * 4):
        leaf = weight.clone().requires_grad_()
        linear_logp(hidden, leaf, ids, memory_budget=budget, impl="chunked").sum().backward()
        errors.append(((leaf.grad.double() - gold.grad).norm() / gold.grad.norm()).item())
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    assert max(errors) < 4e-3  # one rounding to bfloat16


class Largest(TorchDispatchMode):
    """Remembers the most elements that any result had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.numel())
        return result


def test_no_n_by_v_tensor_exists():
    tokens, vocabulary, width, budget = 512, 4096, 16, 1 << 20
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    ids = torch.randint(0, vocabulary, (tokens,))
    with Largest() as seen:
        out, entropy = linear_logp(hidden, weight, ids, memory_budget=budget, return_entropy=True, impl="chunked")
        (out.sum() + entropy.sum()).backward()
    assert seen.most <= max(budget // 16, weight.numel())
    assert seen.most < tokens * vocabulary / 8
    with Largest() as naive:
        linear_logp(hidden, weight, ids, impl="reference")
    assert naive.most == tokens * vocabulary


def test_results_do_not_depend_on_the_tiles_beyond_rounding():
    hidden, weight = draw(0, 37, 8).float(), draw(1, 701, 8).float()
    ids = torch.randint(0, 701, (37,))
    one = linear_logp(hidden, weight, ids, impl="chunked")
    for budget in (1, 5000, 70000):
        assert torch.allclose(linear_logp(hidden, weight, ids, memory_budget=budget, impl="chunked"), one, atol=2e-6)


def test_backward_in_place_leaves_the_gradient_in_the_logits():
    base, ids = draw(0, 3, 4, 9), torch.randint(0, 9, (3, 4))
    mask = torch.tensor([[1, 1, 0, 1]] * 3)
    gold = base.clone().requires_grad_()
    logp(gold, ids, mask=mask, temperature=0.7).sum().backward()
    leaf = base.clone().requires_grad_()
    inner = leaf * 1.0
    address = inner.data_ptr()
    logp(inner, ids, mask=mask, temperature=0.7, inplace_backward=True).sum().backward()
    assert torch.allclose(leaf.grad, gold.grad, atol=1e-14)
    assert inner.data_ptr() == address
    assert torch.allclose(inner.detach(), gold.grad, atol=1e-14)


def test_transposed_logits_with_a_unit_last_stride_are_read_right():
    square = draw(0, 6, 6)
    ids = torch.arange(6)
    assert torch.allclose(logp(square.T, ids), logp(square.T.contiguous(), ids))


@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "abs"])
def test_ratio_and_kl_equal_a_loop_and_clamp_before_the_exponential(kl):
    logits, ids = draw(0, 4, 6), torch.tensor([0, 1, 2, 3])
    lp = logp(logits, ids)
    old = lp + torch.tensor([0.3, -0.2, 30.0, -30.0])
    ref = lp + torch.tensor([-0.4, 0.1, 300.0, -300.0])
    leaf = logits.clone().requires_grad_()
    ratio, estimate = ratio_kl(leaf, ids, old, ref, kl=kl)
    for row in range(4):
        d = max(-20.0, min(20.0, (lp - old)[row].item()))
        assert ratio[row].item() == pytest.approx(math.exp(d), rel=1e-9)
        k = (lp - ref)[row].item()
        c = max(-20.0, min(20.0, k))
        hand = {"k1": k, "k2": c * c / 2, "k3": math.exp(-c) - 1 + c, "abs": abs(k)}[kl]
        assert estimate[row].item() == pytest.approx(hand, rel=1e-9)
    (ratio.sum() + estimate.sum()).backward()
    assert leaf.grad.isfinite().all()
    if kl in ("k2", "k3"):
        assert leaf.grad[2:].eq(0).all()  # both clamps bite there


def test_types_follow_the_inputs():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2):
        hidden, weight = draw(0, 2, 4).to(dtype), draw(1, 5, 4).to(dtype)
        assert linear_logp(hidden, weight, torch.tensor([0, 1])).dtype == expected
        assert logp(hidden, torch.tensor([0, 1])).dtype == expected
