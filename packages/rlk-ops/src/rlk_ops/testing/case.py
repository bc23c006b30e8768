"""Cases of the gold path: a deterministic call of an operator, and a call that must raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One deterministic call.

    Attributes:
        name: unique within the operator: "realistic", "ragged", "extreme", "strided", "empty", "softcap", ...
        build: generator -> keyword arguments *by parameter name* (tensors first and positional included). Floating
            tensors are built in float64 on the CPU; the harness casts them to the dtype under test, keeping strides,
            and moves them to the device under test. Integer and bool tensors keep their dtype.
        tags: "gradcheck" (small and smooth enough for a float64 finite-difference check), "bench" (a real model's
            shape: only built for benches, never in the everyday suite), "extreme" (outputs may be inf or NaN in named
            rows; compared with equal_nan), "empty".
    """

    name: str
    build: Callable[[torch.Generator], Mapping[str, Any]]
    tags: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class ErrorCase:
    """A call that must raise.

    Attributes:
        name: unique within the operator.
        build: as for :class:`Case`.
        raises: the exception type.
        match: regular expression that the message matches; it names the argument.
    """

    name: str
    build: Callable[[torch.Generator], Mapping[str, Any]]
    raises: type[Exception]
    match: str
