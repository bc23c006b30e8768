"""The dispatcher: what is chosen, why, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import rlk_ops
from rlk_ops.registry import Op, Unsupported, dispatch, find_op, require_invariance, use


def make(**options):
    def scale(x, *, factor=2.0, bias=None):
        return x * factor + (0.0 if bias is None else bias)

    defaults = {"check": None, "differentiable": ("x",), "rows": (), "masked": (), "invariant": True}
    return Op(scale, **{**defaults, **options})


X = torch.tensor([1.0, 2.0])


def test_the_newest_implementation_that_can_run_is_chosen():
    op = make()
    op.impl("old")(lambda x, *, factor=2.0, bias=None: x * 0 + 1)
    op.impl("new", reason=lambda x, **_: "needs two dimensions" if x.ndim < 2 else None)(lambda x, **_: x * 0 + 2)
    assert op.explain(X) == {"new": "needs two dimensions", "old": None, "reference": None}
    assert op(X).tolist() == [1.0, 1.0]
    assert op(X[None]).tolist() == [[2.0, 2.0]]
    assert list(op.implementations) == ["new", "old", "reference"]


def test_an_option_that_an_implementation_lacks_is_refused_only_when_set():
    op = make()
    op.impl("plain")(lambda x, *, factor=2.0: x * factor * 10)
    assert op.selected(X) == "plain"
    assert op.explain(X, bias=1.0)["plain"] == "does not support option bias"
    assert op(X, bias=1.0).tolist() == [3.0, 5.0]
    with pytest.raises(Unsupported, match="'plain' was asked for and refuses: plain: does not support option bias"):
        op(X, bias=1.0, impl="plain")


def test_gradients_rule_out_what_has_no_backward():
    op = make()
    op.impl("forward_only", differentiable=False)(lambda x, *, factor=2.0, bias=None: x * factor)
    leaf = X.clone().requires_grad_()
    assert op.selected(X) == "forward_only"
    assert op.selected(leaf) == "reference"
    with torch.no_grad():
        assert op.selected(leaf) == "forward_only"


def test_invariance_refuses_by_name_and_never_falls_back():
    op = make(invariant=False)
    op.impl("fast")(lambda x, **_: x)
    with require_invariance(), pytest.raises(Unsupported, match="scale: no implementation runs.*batch invariance"):
        op(X)
    op.impl("steady", invariant=True)(lambda x, **_: x * 0 + 7)
    with require_invariance():
        assert op(X).tolist() == [7.0, 7.0]


def test_overrides_by_context_nest_and_end():
    logits, ids = torch.randn(2, 5), torch.tensor([1, 2])
    hidden, weight = torch.randn(2, 4), torch.randn(5, 4)
    with use(linear_logp="reference"):
        assert rlk_ops.linear_logp.selected(hidden, weight, ids) == "reference"
        with use(linear_logp="chunked"):
            assert rlk_ops.linear_logp.selected(hidden, weight, ids) == "chunked"
        assert rlk_ops.linear_logp.selected(hidden, weight, ids) == "reference"
    assert rlk_ops.linear_logp.selected(hidden, weight, ids) == "chunked"
    with use(logp="triton"), pytest.raises(Unsupported, match="no such implementation"):
        rlk_ops.logp(logits, ids)
    with pytest.raises(ValueError, match="did you mean 'logp'"), use(logpp="reference"):
        pass


def test_overrides_by_argument_beat_the_context():
    hidden, weight, ids = torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 2])
    with use(linear_logp="reference"):
        assert rlk_ops.linear_logp.selected(hidden, weight, ids, impl="chunked") == "chunked"


def test_overrides_by_environment(monkeypatch):
    hidden, weight, ids = torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 2])
    monkeypatch.setenv("RLK_USE", "linear_logp=reference, logp=reference")
    assert rlk_ops.linear_logp.selected(hidden, weight, ids) == "reference"
    with use(linear_logp="chunked"):
        assert rlk_ops.linear_logp.selected(hidden, weight, ids) == "chunked"
    monkeypatch.setenv("RLK_USE", "linear_logp")
    with pytest.raises(ValueError, match="not of the form op=implementation"):
        rlk_ops.linear_logp(hidden, weight, ids)


def test_an_exception_inside_an_implementation_is_not_a_refusal():
    op = make()

    @op.impl("buggy")
    def buggy(x, **_):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        op(X)


def test_dispatch_explains_by_name():
    chosen, reasons = dispatch("silu", X)
    assert chosen in reasons
    assert reasons[chosen] is None
    with pytest.raises(ValueError, match="did you mean 'silu'"):
        find_op("sillu")


def test_wrong_keywords_are_named_with_the_nearest():
    with pytest.raises(TypeError, match="logp: .*temprature.*did you mean 'temperature'"):
        rlk_ops.logp(torch.randn(1, 3), torch.tensor([0]), temprature=1.0)


def test_names_are_registered_once():
    op = make()
    op.impl("one")(lambda x, **_: x)
    with pytest.raises(ValueError, match="registered already"):
        op.impl("one")(lambda x, **_: x)
    op.unregister("one")
    with pytest.raises(KeyError, match="no implementation named 'one'"):
        op.unregister("one")


def test_an_operator_of_another_module_is_not_replaced():
    def silu(x):
        return x

    with pytest.raises(ValueError, match=r"'silu' is registered already, by rlk_ops\.ops\.silu"):
        rlk_ops.op(silu)
    assert find_op("silu") is rlk_ops.silu


def test_importing_is_light_and_needs_no_gpu():
    code = (
        "import sys, rlk_ops; rlk_ops.registry.ops(); "
        "print([m for m in ('transformers','vllm','ray','deepspeed','flashinfer','flash_attn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    )
    assert done.stdout == "[]\n", done.stderr
