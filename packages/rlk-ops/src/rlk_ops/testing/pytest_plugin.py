"""The pytest plug-in: validate your own implementation inside your own suite.

```python
def test_my_kernel(gold_path):
    gold_path(rlk_ops.logp, "mine")             # fails with the report where a relation does not hold
    gold_path("linear_logp", my_function, relations=["accuracy", "gradients"])
```

`--rlk-device cuda` chooses the device of every such test, `--rlk-relation NAME` (repeatable) limits the relations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plug-in's options."""
    group = parser.getgroup("rlk-ops", "gold path of rlk-ops")
    group.addoption("--rlk-device", default=None, help="device of the gold_path fixture: cpu, cuda, cuda:1, rocm")
    group.addoption("--rlk-relation", action="append", default=None, help="a relation to check; may be repeated")


@pytest.fixture
def gold_path(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function with the arguments of :func:`rlk_ops.testing.validate` that fails the test with the report."""
    from rlk_ops.testing import validate

    def check(op: Any, impl: Any = "reference", **options: Any) -> Any:
        options.setdefault("device", request.config.getoption("--rlk-device"))
        options.setdefault("relations", request.config.getoption("--rlk-relation"))
        report = validate(op, impl, **options)
        if not report.passed:
            pytest.fail(str(report), pytrace=False)
        return report

    return check
