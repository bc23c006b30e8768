"""The relations whose threshold is zero: not one bit may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlk_ops.testing.compare import compare_bits
from rlk_ops.testing.tensors import map_tensors, named_tensors
from rlk_ops.testing.trial import Arguments, Run, Skip, Tensors, Trial, tensors_only


def determinism(trial: Trial) -> Iterator[str]:
    """Two runs give the same bits, forward and backward."""
    first, second = (trial.run(trial.fresh(), trial.differentiable) for _ in range(2))
    yield from _differing_bits("second run", second, first)


def unmodified(trial: Trial) -> Iterator[str]:
    """The call leaves its arguments as they were, unless working in place was asked for."""
    arguments = trial.fresh()
    in_place = [name for name, value in arguments.items() if "inplace" in name and value]
    if in_place:
        raise Skip(f"{in_place[0]} is set")
    before = dict(named_tensors(map_tensors(tensors_only(arguments), torch.clone)))
    trial.run(arguments, trial.differentiable)
    for name, tensor in named_tensors(tensors_only(arguments)):
        text = compare_bits(f"argument {name}", tensor, before[name])
        if text:
            yield f"{text} after the call"


def masking(trial: Trial) -> Iterator[str]:
    """Garbage in masked slots changes no output and no gradient, and gets a zero gradient."""
    slots = masked_slots(trial)
    if not slots:
        raise Skip("the case has no masked slot in a parameter that may hold garbage")
    clean = trial.run(trial.fresh(), trial.differentiable)
    for value in (torch.nan, torch.inf, -torch.inf):
        arguments = trial.fresh()
        for name, slot in slots.items():
            arguments[name] = _spoiled(arguments[name], slot.to(trial.device.torch_device), value)
        run = trial.run(arguments, trial.differentiable)
        yield from _differing_bits(f"{value} in masked slots of {', '.join(slots)}", run, clean)
        for name, slot in slots.items():
            gradient = run.gradients.get(name)
            if gradient is not None and bool((gradient.cpu()[slot] != 0).any()):
                yield f"gradient of {name}: not zero in masked slots that hold {value}"


def masked_slots(trial: Trial) -> Tensors:
    """Parameter name to a bool tensor over its leading dimensions: True where it may hold garbage."""
    arguments = trial.source
    masks = [(name, value == 0) for name, value in tensors_only(arguments).items() if name.endswith("mask")]
    token_ids, ignored = arguments.get("token_ids"), _ignore_index(trial)
    if token_ids is not None and ignored is not None:
        masks.append(("token_ids", token_ids == ignored))
    slots: Tensors = {}
    for parameter in trial.op.masked:
        value = arguments.get(parameter)
        for name, mask in masks:
            if isinstance(value, Tensor) and name != parameter and value.shape[: mask.ndim] == mask.shape:
                slots[parameter] = slots.get(parameter, torch.zeros_like(mask)) | mask
    return {name: slot for name, slot in slots.items() if bool(slot.any())}


def invariance(trial: Trial) -> Iterator[str]:
    """A row has the same bits alone, elsewhere in the batch, among other rows and in a larger batch.

    That the same implementation is eligible for every batch size holds for all; the bits only where they are promised.
    """
    rows = _Rows(trial)
    yield from rows.choice_differs()
    if not trial.implementation.invariant:
        raise Skip("the implementation does not promise batch invariance")
    for label, arguments, taken, kept in rows.surroundings():
        yield from (f"{label}: {text}" for text in rows.differences(arguments, taken, kept))


class _Rows:
    """A trial's batch, taken apart and put together again.

    Attributes:
        trial: the trial.
        count: rows of the batch.
        names: the arguments that have the batch as their leading dimension.
        gradients: those of them whose gradients are compared.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.arguments, self.other = trial.source, trial.build(1)
        present = [n for n in trial.op.rows if isinstance(self.arguments.get(n), Tensor) and self.arguments[n].ndim]
        if not present:
            raise Skip("no argument has rows")
        self.count = int(self.arguments[present[0]].shape[0])
        self.names = [n for n in present if self.arguments[n].shape[0] == self.count]
        if self.count == 0:
            raise Skip("the batch is empty")
        if any(self.arguments[n].shape != self.other[n].shape for n in self.names):
            raise Skip("the case's shapes depend on its seed")
        outputs = trial.run(trial.fresh()).outputs
        if not any(self.is_row(t) for t in outputs.values()):
            raise Skip("no output has rows")
        # An output over all rows (a loss) scales its gradients with the batch.
        per_row = all(self.is_row(t) for t in outputs.values() if t.is_floating_point())
        self.gradients = [n for n in self.names if n in trial.differentiable] if per_row else []
        self.base = trial.run(trial.fresh(), self.gradients) if self.gradients else Run(outputs)

    def is_row(self, output: Tensor) -> bool:
        return output.ndim > 0 and output.shape[0] == self.count

    def take(self, source: Mapping[str, Any], index: Tensor) -> Arguments:
        return {**self.arguments, **{n: source[n].index_select(0, index) for n in self.names}}

    def mixed(self, rows: Tensor) -> Arguments:
        """`rows` of this case among the rows of another draw."""
        made = {**self.arguments, **{n: self.other[n].clone() for n in self.names}}
        for name in self.names:
            made[name][rows] = self.arguments[name][rows]
        return made

    def doubled(self) -> Arguments:
        both = {n: torch.cat([self.other[n], self.arguments[n]]) for n in self.names}
        return {**self.arguments, **both}

    def surroundings(self) -> Iterator[tuple[str, Arguments, Tensor, Tensor]]:
        """(label, arguments, their rows that are compared, the rows of the base run that these must equal)."""
        every = torch.arange(self.count)
        for row in sorted({0, self.count // 2, self.count - 1}):
            alone = torch.tensor([row])
            yield f"row {row} alone", self.take(self.arguments, alone), torch.tensor([0]), alone
            yield f"row {row} among other rows", self.mixed(alone), alone, alone
        yield "rows in reverse", self.take(self.arguments, every.flip(0)), every, every.flip(0)
        yield "batch doubled", self.doubled(), every + self.count, every

    def choice_differs(self) -> Iterator[str]:
        cast, explain = self.trial.cast, self.trial.op.explain
        expected = explain(**cast(self.arguments))
        for arguments in (self.take(self.arguments, torch.tensor([0])), self.doubled()):
            try:
                found = explain(**cast(arguments))
            except (ValueError, TypeError) as error:
                raise Skip(f"its rows are not free: {error}") from None
            for name, reason in found.items():
                if (reason is None) != (expected[name] is None):
                    yield f"implementation {name} is eligible for one batch size only: {reason or expected[name]}"

    def differences(self, arguments: Arguments, taken: Tensor, kept: Tensor) -> Iterator[str]:
        run = self._run(arguments, taken, kept)
        for name, expected in {**self.base.outputs, **_present(self.base.gradients, "gradient of ")}.items():
            if not self.is_row(expected):
                continue
            actual = {**run.outputs, **_present(run.gradients, "gradient of ")}.get(name)
            rows = None if actual is None else actual.detach().cpu()[taken]
            text = compare_bits(name, rows, expected.detach().cpu()[kept])
            if text:
                yield text

    def _run(self, arguments: Arguments, taken: Tensor, kept: Tensor) -> Run:
        if not self.gradients:
            return self.trial.run(self.trial.cast(arguments))
        device = self.trial.device.torch_device
        outputs = self.trial.run(self.trial.cast(arguments)).outputs
        plain, upstream = self.trial.upstream(self.base.outputs), self.trial.upstream(outputs)
        for name, value in upstream.items():
            if self.is_row(self.base.outputs[name]):
                value[taken.to(device)] = plain[name][kept.to(device)]
        return self.trial.run(self.trial.cast(arguments), self.gradients, upstream)


def _present(gradients: Mapping[str, Tensor | None], prefix: str) -> Tensors:
    return {prefix + name: t for name, t in gradients.items() if t is not None}


def _differing_bits(label: str, run: Run, expected: Run) -> Iterator[str]:
    for name, value in expected.outputs.items():
        text = compare_bits(name, run.outputs.get(name), value)
        if text:
            yield f"{label}: {text}"
    for name, gradient in expected.gradients.items():
        if gradient is not None:
            text = compare_bits(f"gradient of {name}", run.gradients.get(name), gradient)
            if text:
                yield f"{label}: {text}"


def _spoiled(tensor: Tensor, slot: Tensor, value: float) -> Tensor:
    spoiled = tensor.clone()
    spoiled[slot] = value if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 2
    return spoiled


def _ignore_index(trial: Trial) -> int | None:
    parameter = trial.op.signature.parameters.get("ignore_index")
    chosen = trial.source.get("ignore_index", parameter.default if parameter is not None else None)
    return int(chosen) if chosen is not None else None
