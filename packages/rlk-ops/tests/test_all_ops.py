"""The one suite that walks the registry: every operator, every implementation, every relation, every case."""

from __future__ import annotations

import os

import pytest
import torch

from rlk_ops.device import Device
from rlk_ops.registry import ops
from rlk_ops.testing import validate
from rlk_ops.testing.bitwise import masked_slots
from rlk_ops.testing.trial import Trial

BACKEND = os.environ.get("RLK_TEST_BACKEND", "cpu")
PAIRS = [(name, impl) for name, op in ops().items() for impl in op.implementations]


@pytest.mark.parametrize(("name", "impl"), PAIRS, ids=[f"{name}-{impl}" for name, impl in PAIRS])
def test_gold_path(name, impl):
    report = validate(name, impl, device=BACKEND)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", list(ops()))
def test_every_operator_has_the_cases_and_errors_that_the_gold_path_needs(name):
    op = ops()[name]
    cases = op.list_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert any("empty" in case.tags for case in cases), "an empty case"
    assert op.list_errors(), "calls that must raise"
    if op.differentiable:
        assert any("gradcheck" in case.tags for case in cases), "a case for finite differences"
    assert "Numerics:" in op.__doc__
    assert "Gradients:" in op.__doc__


@pytest.mark.parametrize("name", list(ops()))
def test_the_choice_does_not_look_at_the_number_of_rows(name):
    op = ops()[name]
    case = next(case for case in op.list_cases() if not case.tags & {"bench", "empty"})
    call = dict(case.build(torch.Generator().manual_seed(0)))
    rows = [key for key in op.rows if isinstance(call.get(key), torch.Tensor) and call[key].ndim]
    if not rows:
        pytest.skip("no parameter of this operator carries the batch in its leading dimension")
    twice = {key: torch.cat([value, value]) if key in rows else value for key, value in call.items()}
    assert op.selected(**call) == op.selected(**twice)


@pytest.mark.parametrize("name", [name for name, op in ops().items() if op.masked])
def test_some_case_has_garbage_slots_for_every_parameter_that_may_hold_garbage(name):
    op = ops()[name]
    device = Device("cpu")
    cases = [case for case in op.list_cases() if "bench" not in case.tags]
    trials = [Trial(op, op.implementations["reference"], case, torch.float32, device) for case in cases]
    assert {parameter for trial in trials for parameter in masked_slots(trial)} == set(op.masked)
