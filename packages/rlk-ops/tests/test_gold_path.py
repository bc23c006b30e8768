"""The gold path catches what it exists to catch: one deliberately wrong candidate per kind of fault."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import rlk_ops
from rlk_ops.ops.logits import ActiveRows
from rlk_ops.testing import validate
from rlk_ops.testing.cli import main
from rlk_ops.testing.compare import compare
from rlk_ops.testing.report import Report
from rlk_ops.testing.tolerance import find_tolerance

pytest_plugins = ["pytester"]
KEYS = ("temperature", "logit_scale", "softcap", "vocab_size", "support")


def right(logits, token_ids, *, mask=None, ignore_index=-100, return_entropy=False, validate=True,
          inplace_backward=False, **options):  # fmt: skip
    """A right candidate, to be bent in one place."""
    return rlk_ops.logp.reference(
        logits, token_ids, mask=mask, ignore_index=ignore_index, return_entropy=return_entropy, **options
    )


def softcap_times_tanh(logits, token_ids, *, softcap=None, **options):
    if softcap is not None:
        logits = logits * torch.tanh(logits / softcap)
    return right(logits, token_ids, **options)


def temperature_after_softmax(logits, token_ids, *, temperature=1.0, **options):
    out = right(logits, token_ids, **options)
    return tuple(part / temperature for part in out) if isinstance(out, tuple) else out / temperature


def drops_softcap(logits, token_ids, *, softcap=None, **options):
    return right(logits, token_ids, **options)


def multiplies_by_the_mask(logits, token_ids, *, mask=None, **options):
    out = right(logits, token_ids if mask is None else torch.where(mask.bool(), token_ids, 0), **options)
    if mask is None:
        return out
    return tuple(part * mask for part in out) if isinstance(out, tuple) else out * mask


def ignores_the_tail_of_the_vocabulary(logits, token_ids, **options):
    whole = logits.shape[-1] // 256 * 256
    if whole and whole != logits.shape[-1]:
        tail = torch.arange(logits.shape[-1], device=logits.device) >= whole
        keep = torch.nn.functional.one_hot(token_ids.clamp(min=0), logits.shape[-1]).bool()
        logits = torch.where(tail & ~keep, -torch.inf, logits)
    return right(logits, token_ids, **options)


def sums_in_low_precision(logits, token_ids, **options):
    if logits.dtype != torch.bfloat16:
        return right(logits, token_ids, **options)
    out = right(logits, token_ids, **options)
    return tuple(p.bfloat16().float() for p in out) if isinstance(out, tuple) else out.bfloat16().float()


def returns_the_inputs_dtype(logits, token_ids, **options):
    out = right(logits, token_ids, **options)
    return tuple(p.to(logits.dtype) for p in out) if isinstance(out, tuple) else out.to(logits.dtype)


def leaves_memory_unwritten(logits, token_ids, **options):
    out = right(logits, token_ids, **options)
    if isinstance(out, tuple) or out.numel() < 4:
        return out
    fresh = torch.empty_like(out)
    flat = out.reshape(-1)
    return torch.cat([flat[:-1], fresh.reshape(-1)[-1:]]).reshape(out.shape)


def halves_the_gradient(logits, token_ids, **options):
    return right(logits.detach() / 2 + logits / 2, token_ids, **options)


def ignores_strides(logits, token_ids, **options):
    flat = logits.as_strided(logits.shape, torch.empty(logits.shape, device="meta").stride())
    return right(flat, token_ids, **options)


def writes_into_its_input(logits, token_ids, **options):
    out = right(logits, token_ids, **options)
    with torch.no_grad():
        logits.mul_(1.5)
    return out


def changes_from_run_to_run(logits, token_ids, **options):
    noise = 1.0 + 1e-7 * torch.rand((), dtype=logits.dtype)
    return right(logits * noise, token_ids, **options)


def loses_an_output(logits, token_ids, *, return_entropy=False, **options):
    return right(logits, token_ids, **options)


WRONG = {
    softcap_times_tanh: "accuracy",
    temperature_after_softmax: "accuracy",
    drops_softcap: "accuracy",
    multiplies_by_the_mask: "masking",
    ignores_the_tail_of_the_vocabulary: "accuracy",
    sums_in_low_precision: "accuracy",
    returns_the_inputs_dtype: "accuracy",
    leaves_memory_unwritten: "poisoned",
    halves_the_gradient: "gradients",
    ignores_strides: "strides",
    writes_into_its_input: "unmodified",
    changes_from_run_to_run: "determinism",
    loses_an_output: "accuracy",
}


@pytest.mark.parametrize(("candidate", "relation"), WRONG.items(), ids=[f.__name__ for f in WRONG])
def test_a_wrong_candidate_is_caught(candidate, relation):
    report = validate(rlk_ops.logp, candidate, relations=[relation])
    assert not report.passed
    assert report.failures, str(report)
    assert {failure.relation for failure in report.failures} == {relation}


def test_a_right_candidate_passes():
    report = validate(rlk_ops.logp, right)
    assert report.passed, str(report)


def test_a_false_promise_of_invariance_is_caught():
    def depends_on_the_batch(logits, token_ids, **options):
        out = right(logits, token_ids, **options)
        nudge = 1.0 + 1e-6 * len(logits)
        return tuple(part * nudge for part in out) if isinstance(out, tuple) else out * nudge

    rlk_ops.logp.impl("depends", invariant=True)(depends_on_the_batch)
    try:
        report = validate(rlk_ops.logp, "depends", relations=["invariance"])
    finally:
        rlk_ops.logp.unregister("depends")
    assert not report.passed
    assert report.failures


def test_a_choice_by_batch_size_is_caught():
    rlk_ops.logp.impl("small", reason=lambda logits, *_, **__: None if len(logits) < 3 else "too many rows")(right)
    try:
        report = validate(rlk_ops.logp, relations=["invariance"])
    finally:
        rlk_ops.logp.unregister("small")
    assert any("small is eligible for one batch size only" in text for f in report.failures for text in f.details)


@torch.library.custom_op("rlk_ops_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


@torch.library.custom_op("rlk_ops_test::double_badly_described", mutates_args=())
def double_badly_described(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


double.register_fake(torch.empty_like)
double_badly_described.register_fake(lambda x: x.new_empty((*x.shape, 1)))
for described in (double, double_badly_described):
    described.register_autograd(lambda ctx, grad: 2.0 * grad)


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("custom", [double, double_badly_described], ids=["right", "wrong"])
def test_custom_operators_are_found_and_checked_as_pytorch_expects_them(custom):
    def through_custom(x):
        return rlk_ops.silu.reference(custom(x) / 2.0)

    report = validate(rlk_ops.silu, through_custom, relations=["opcheck"], cases=["ragged"])
    assert [result.status for result in report.results] == ["passed" if custom is double else "failed"]
    if custom is double_badly_described:
        assert "rlk_ops_test.double_badly_described" in str(report)


def test_nan_passes_only_where_gold_has_it_and_the_case_says_so():
    gold, tolerance = (
        torch.tensor([1.0, torch.nan]),
        find_tolerance("x", "y", torch.float32, torch.float32, gradient=False),
    )
    assert compare("out", gold, gold, tolerance, nan_allowed=True) is None
    assert "out[1]: got nan, expected nan" in str(compare("out", gold, gold, tolerance))
    assert "out[0]: got nan" in str(compare("out", torch.tensor([torch.nan] * 2), gold, tolerance, nan_allowed=True))
    assert "out[1]: got 0" in str(compare("out", torch.tensor([1.0, 0.0]), gold, tolerance, nan_allowed=True))
    assert compare("out", None, gold, tolerance) == "out: missing"


def test_a_broken_reference_does_not_widen_the_tolerance_past_its_cap():
    gold = torch.tensor([1.0, 2.0], dtype=torch.float64)
    wrong = (gold * 1.01).float()
    tolerance = find_tolerance("x", "y", torch.bfloat16, torch.float32, gradient=False)
    assert compare("out", wrong, gold, tolerance, eager=wrong) is not None


def test_missing_checks_of_arguments_are_caught():
    silent = rlk_ops.registry.Op(right, check=None, differentiable=("logits",), rows=(), masked=(), invariant=False)
    silent.errors(rlk_ops.logp.list_errors)
    report = validate(silent, relations=["errors"])
    assert not report.passed


def test_a_failure_names_case_output_element_and_both_values():
    text = str(validate(rlk_ops.logp, drops_softcap, relations=["accuracy"], cases=["scale_softcap"]))
    assert "accuracy / scale_softcap / float32" in text
    assert "got" in text
    assert "expected" in text
    assert "allowed" in text


def test_a_candidate_that_refuses_everything_does_not_pass():
    rlk_ops.logp.impl("refuses", reason=lambda *a, **k: "never today")(right)
    try:
        report = validate(rlk_ops.logp, "refuses", relations=["accuracy"])
    finally:
        rlk_ops.logp.unregister("refuses")
    assert not report.passed
    assert "never today" in str(report)


def test_report_survives_json():
    report = validate(rlk_ops.silu, relations=["accuracy"])
    assert Report.from_json(report.to_json()) == report


def test_command_line_verdicts(capsys, tmp_path):
    assert main(["validate", "--op", "silu", "--json", str(tmp_path / "r.json")]) == 0
    assert "silu / reference on cpu: passed" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())[0]["passed"] is True
    rlk_ops.logp.impl("bent")(drops_softcap)
    try:
        assert main(["validate", "--op", "logp", "--impl", "bent", "--relation", "accuracy"]) == 1
    finally:
        rlk_ops.logp.unregister("bent")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["validate", "--op", "logpp"], "did you mean 'logp'"),
        (["validate", "--op", "logp", "--impl", "tritn"], "no implementation of logp named 'tritn'"),
        (["validate", "--op", "logp", "--relation", "accurcy"], "did you mean 'accuracy'"),
        (["validate", "--op", "logp", "--case", "nope"], "no case of logp named 'nope'"),
        (["validate", "--op", "logp", "--dtype", "int3"], "--dtype 'int3'"),
        (["validate", "--impl", "chunked"], "name it with --op"),
        (["validate", "--op", "logp", "--device", "tpu"], "tpu"),
        (["nothing"], "invalid choice"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(capsys, argv, message):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_module_entry_point_lists_operators():
    done = subprocess.run([sys.executable, "-m", "rlk_ops", "validate", "--list"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "linear_logp: chunked, reference" in done.stdout


def test_explain_names_the_choice_and_the_refusals(capsys):
    assert main(["explain", "--op", "linear_logp"]) == 0
    assert capsys.readouterr().out.startswith("linear_logp: chunked")


def test_plug_in_validates_a_users_kernel(pytester):
    pytester.makepyfile(
        """
        import rlk_ops

        def test_good(gold_path):
            gold_path(rlk_ops.silu, relations=["accuracy"])

        def test_bad(gold_path):
            def bent(x):
                return rlk_ops.silu.reference(x) * 1.01
            gold_path("silu", bent)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--rlk-relation", "accuracy")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*silu / bent on cpu: FAILED*"])


def test_active_rows_leave_no_trace_of_masked_ones():
    ids = torch.tensor([1, 10**9, 2])
    options = dict.fromkeys(KEYS)
    options |= {"temperature": 1.0, "logit_scale": 1.0}
    rows = ActiveRows.of(ids, torch.tensor([1, 0, 1]), -100, **options)
    assert rows.token_ids.tolist() == [1, 2]
    assert rows.scatter(torch.tensor([5.0, 6.0])).tolist() == [5.0, 0.0, 6.0]
