"""The gold path: validate an implementation of an operator against its reference.

`validate(op, "mine")` runs every relation on every case and returns a report that names the case, the output and the
worst element of whatever failed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Case": "case",
    "ErrorCase": "case",
    "validate": "harness",
    "RELATIONS": "harness",
    "Report": "report",
    "Result": "report",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(f"rlk_ops.testing.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rlk_ops.testing' has no attribute {name!r}")
