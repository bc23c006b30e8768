"""The tolerance table and what it allows for one output."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """What one output or gradient may differ by; the formula stands at the head of `tolerances.toml`.

    Attributes:
        factor: times the error of the reference in the dtype under test.
        floor: relative to the magnitude of the gold values: what rounding them costs.
        tiny: absolute.
        cap: times the largest gold value; whatever the reference's own error is, no error may pass this.
        unit: the least that counts as the largest gold value for the cap.
    """

    factor: float
    floor: float
    tiny: float
    cap: float
    unit: float

    def allowed(self, gold: Tensor, eager_error: float) -> Tensor:
        """The allowed error of each element; `gold` is float64."""
        magnitude = torch.where(gold.isfinite(), gold.abs(), 0.0)
        largest = float(magnitude.max()) if gold.numel() else 0.0
        rms = float(magnitude.square().mean().sqrt()) if gold.numel() else 0.0
        cap = self.cap * max(self.unit, largest) + self.tiny
        return (self.factor * eager_error + self.floor * (magnitude + rms) + self.tiny).clamp(max=cap)


def find_tolerance(op: str, case: str, inputs: torch.dtype, output: torch.dtype, *, gradient: bool) -> Tolerance:
    """The table's entry for an output (or gradient) of one dtype that `op` computed from inputs of another."""
    table, kind, name = _table(), "gradient" if gradient else "output", dtype_name(output)
    if name not in table["default"]:
        raise ValueError(f"tolerances.toml has no table for {name}; it has {', '.join(table['default'])}")
    own = table["op"].get(op, {})
    entry = {"unit": table["unit"][kind], **table["default"][name]}
    for scope in (own, own.get("case", {}).get(case, {})):
        entry |= scope.get(dtype_name(inputs), {}).get(kind, {})
    return Tolerance(**entry)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("rlk_ops.testing") / "tolerances.toml").read_text())
