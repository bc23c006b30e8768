"""One implementation on one case in one dtype, and the gold results that it is held against."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlk_ops.device import Device
from rlk_ops.registry import REFERENCE, Implementation, Op
from rlk_ops.testing.case import Case
from rlk_ops.testing.compare import compare
from rlk_ops.testing.tensors import map_tensors, named_tensors, recast
from rlk_ops.testing.tolerance import find_tolerance

Arguments = dict[str, Any]
Tensors = dict[str, Tensor]

LARGE = 1 << 24  # elements of the arguments from which the gold path runs in float32


class Skip(Exception):
    """A relation does not apply to this case; the message says why."""


@dataclass(frozen=True)
class Run:
    """What one call gave.

    Attributes:
        outputs: by name: "out", "out[1]", "loss", "metrics.kl".
        gradients: by argument; None where autograd has none. Empty where no gradient was asked for.
    """

    outputs: Tensors
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Standard:
    """What a candidate is held against.

    Attributes:
        gold: the gold path on the same, already rounded arguments.
        eager: the reference in the dtype under test; a candidate's error is measured by its error.
    """

    gold: Run
    eager: Run


@dataclass(frozen=True, eq=False)
class Trial:
    """One implementation on one case in one dtype on one device.

    Attributes:
        op: the operator.
        implementation: the candidate.
        case: what it is called with.
        dtype: of the floating arguments.
        device: where.
    """

    op: Op[Any]
    implementation: Implementation
    case: Case
    dtype: torch.dtype
    device: Device

    @functools.cached_property
    def source(self) -> Arguments:
        """The arguments as the case builds them: float64, on the CPU."""
        return self.build(0)

    def build(self, seed: int) -> Arguments:
        """The case drawn from another seed: other content, the same kind of content."""
        name = f"{self.op.name}/{self.case.name}/{seed}"
        return dict(self.case.build(torch.Generator().manual_seed(zlib.crc32(name.encode()))))

    def cast(self, source: Arguments) -> Arguments:
        """A fresh copy of built arguments in the dtype under test, on the device under test, strides kept."""
        copies: Arguments = map_tensors(source, lambda t: recast(t, self.dtype, self.device.torch_device))
        return copies

    def fresh(self) -> Arguments:
        """A fresh copy of this trial's arguments."""
        return self.cast(self.source)

    def in_gold_dtype(self, arguments: Arguments) -> Arguments:
        """The same, already rounded, values for the gold path."""
        elements = sum(t.numel() for _, t in named_tensors(dict(tensors_only(arguments))))
        dtype = torch.float32 if elements > LARGE else torch.float64
        wide: Arguments = map_tensors(arguments, lambda t: recast(t.detach(), dtype, t.device))
        return wide

    @functools.cached_property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the floating arguments that gradients flow to, nested ones as "shared_prefix[0]"."""
        if not self.implementation.differentiable:
            return ()
        return tuple(name for name, t in self._leaves(self.source) if t.is_floating_point())

    @functools.cached_property
    def standard(self) -> Standard:
        """What this trial's arguments should give."""
        return self.standard_of(self.fresh)

    def standard_of(self, make: Callable[[], Arguments], upstream: Mapping[str, Tensor] | None = None) -> Standard:
        """What other arguments, or another upstream gradient, should give; `make` builds fresh arguments."""
        eager = self._run(REFERENCE, make(), self.differentiable, upstream)
        gold = self._run(REFERENCE, self.in_gold_dtype(make()), self.differentiable, upstream)
        return Standard(gold, eager)

    def run(
        self, arguments: Arguments, wanted: Collection[str] = (), upstream: Mapping[str, Tensor] | None = None
    ) -> Run:
        """Call the candidate; `wanted` names the arguments whose gradients are computed as well."""
        return self._run(self.implementation.name, arguments, wanted, upstream)

    def upstream(self, outputs: Mapping[str, Tensor]) -> Tensors:
        """A random upstream gradient for each output: the same values, up to rounding, in every dtype."""
        made = {}
        for name, output in outputs.items():
            if output.is_floating_point():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{self.op.name}/{name}".encode()))
                values = torch.randn(output.shape, generator=generator, dtype=torch.float64)
                narrow = self.output_dtypes.get(name, output.dtype)
                made[name] = values.to(narrow).to(output.device, output.dtype)
        return made

    @functools.cached_property
    def output_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each output of the reference in the dtype under test."""
        return {name: t.dtype for name, t in self._run(REFERENCE, self.fresh(), ()).outputs.items()}

    def differences(self, run: Run, standard: Standard | None = None) -> list[str]:
        """Sentences about every output and gradient of `run` that is out of tolerance."""
        should = standard or self.standard
        gold, eager = should.gold, should.eager
        found = [self._output_difference(name, run.outputs.get(name), should) for name in gold.outputs]
        found += [f"{name}: the reference has no such output" for name in run.outputs if name not in gold.outputs]
        for name, actual in run.gradients.items():
            found.append(self._gradient_difference(name, actual, gold.gradients[name], eager.gradients[name]))
        return [text for text in found if text is not None]

    def _output_difference(self, name: str, actual: Tensor | None, should: Standard) -> str | None:
        eager = should.eager.outputs[name]
        if actual is not None and actual.dtype != eager.dtype:
            return f"{name}: {actual.dtype}, the reference gives {eager.dtype}"
        return self._difference(name, actual, should.gold.outputs[name], eager, gradient=False)

    def _gradient_difference(
        self, name: str, actual: Tensor | None, gold: Tensor | None, eager: Tensor | None
    ) -> str | None:
        label = f"gradient of {name}"
        if gold is None:
            return (
                None if actual is None or not bool(actual.any()) else f"{label}: not zero, and the reference has none"
            )
        if actual is not None and actual.dtype != self.dtype:
            return f"{label}: {actual.dtype}, the argument is {self.dtype}"
        return self._difference(label, actual, gold, eager, gradient=True)

    def _difference(
        self, name: str, actual: Tensor | None, gold: Tensor, eager: Tensor | None, *, gradient: bool
    ) -> str | None:
        dtype = actual.dtype if actual is not None and actual.is_floating_point() else torch.float32
        return compare(
            name,
            actual,
            gold,
            find_tolerance(self.op.name, self.case.name, self.dtype, dtype, gradient=gradient),
            eager=eager,
            nan_allowed="extreme" in self.case.tags,
        )

    def _leaves(self, arguments: Arguments) -> list[tuple[str, Tensor]]:
        chosen = {name: arguments[name] for name in self.op.differentiable if name in arguments}
        return list(named_tensors(dict(tensors_only(chosen))))

    def _run(
        self,
        implementation: str,
        arguments: Arguments,
        wanted: Collection[str],
        upstream: Mapping[str, Tensor] | None = None,
    ) -> Run:
        leaves = {name: t.requires_grad_() for name, t in self._leaves(arguments) if name in wanted}
        with torch.set_grad_enabled(bool(leaves) or torch.is_grad_enabled()):
            outputs = dict(named_tensors(self.op(**arguments, impl=implementation)))
        if not leaves:
            return Run(outputs)
        live = {name: t for name, t in outputs.items() if t.requires_grad}
        given = self.upstream(live) if upstream is None else upstream
        if not live:
            return Run(outputs, dict.fromkeys(leaves))
        gradients = torch.autograd.grad(
            list(live.values()),
            list(leaves.values()),
            [given[name].to(t.dtype) for name, t in live.items()],
            allow_unused=True,
        )
        return Run({name: t.detach() for name, t in outputs.items()}, dict(zip(leaves, gradients, strict=True)))


def tensors_only(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that hold tensors: a tensor, or a tuple or list of tensors."""

    def holds(value: Any) -> bool:
        is_sequence = isinstance(value, tuple | list) and len(value) > 0
        return isinstance(value, Tensor) or (is_sequence and all(isinstance(item, Tensor) for item in value))

    return {name: value for name, value in arguments.items() if holds(value)}


def typical_call(op: Op[Any], device: Device, dtype: torch.dtype = torch.float32) -> Arguments:
    """The arguments of the operator's first everyday case, for asking which implementation would run."""
    case: Case = next(case for case in op.list_cases() if "bench" not in case.tags)
    return Trial(op, op.implementations[REFERENCE], case, dtype, device).fresh()
