"""The relations that hold a candidate against the gold path within a tolerance."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.autograd.gradcheck import gradcheck as finite_differences

from rlk_ops.testing.tensors import map_tensors, named_tensors, sliced, transposed
from rlk_ops.testing.trial import Arguments, Skip, Trial, tensors_only

_DETERMINISTIC: Any = torch.utils.deterministic  # its stub lacks the switch

ALL_COMBINATIONS = 4  # arguments up to which every combination of requires_grad is tried


def accuracy(trial: Trial) -> Iterator[str]:
    """Every output: there, of the reference's dtype and shape, near the gold path."""
    with torch.no_grad():
        yield from trial.differences(trial.run(trial.fresh()))


def gradients(trial: Trial) -> Iterator[str]:
    """The gradient of every differentiable argument under a random upstream gradient."""
    _need_gradients(trial)
    yield from trial.differences(trial.run(trial.fresh(), trial.differentiable))


def requires_grad(trial: Trial) -> Iterator[str]:
    """Every combination of requires_grad gives the same gradients; no output requires one if no input does."""
    _need_gradients(trial)
    for wanted in _combinations(trial.differentiable):
        run = trial.run(trial.fresh(), wanted)
        for text in trial.differences(run):
            yield f"requires_grad of {', '.join(wanted)} only: {text}"
    outputs = trial.run(trial.fresh()).outputs
    yield from (f"{name}: requires a gradient, and no input does" for name, t in outputs.items() if t.requires_grad)


def gradcheck(trial: Trial) -> Iterator[str]:
    """Gradients against finite differences in float64, for cases that are small and smooth."""
    if "gradcheck" not in trial.case.tags:
        raise Skip("only for cases tagged gradcheck")
    if trial.dtype != torch.float64:
        raise Skip("only in float64")
    _need_gradients(trial)
    arguments = trial.fresh()
    leaves = arguments_with_gradient(trial, arguments)

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        replaced = replace_tensors(trial, arguments, dict(zip(leaves, values, strict=True)))
        result = trial.op(**replaced, impl=trial.implementation.name)
        return tuple(t for _, t in named_tensors(result) if t.requires_grad)

    try:
        finite_differences(function, tuple(t.clone().requires_grad_() for t in leaves.values()))
    except GradcheckError as error:
        yield " ".join(str(error).split())[:600]


def upstream(trial: Trial) -> Iterator[str]:
    """Transposed, sliced and expanded (stride 0) upstream gradients give what their contiguous copies give."""
    _need_gradients(trial)
    outputs = trial.run(trial.fresh()).outputs
    plain = trial.upstream(outputs)
    for label, view in (("transposed", transposed), ("sliced", sliced)):
        run = trial.run(trial.fresh(), trial.differentiable, {name: view(t) for name, t in plain.items()})
        yield from (f"{label} upstream: {text}" for text in trial.differences(run))
    expanded = {name: t.flatten()[:1].squeeze(0).expand(t.shape) for name, t in plain.items() if t.numel()}
    if len(expanded) == len(plain):
        run = trial.run(trial.fresh(), trial.differentiable, expanded)
        standard = trial.standard_of(trial.fresh, {name: t.contiguous() for name, t in expanded.items()})
        yield from (f"expanded upstream: {text}" for text in trial.differences(run, standard))


def strides(trial: Trial) -> Iterator[str]:
    """Transposed, sliced and expanded (stride 0) arguments give the values of their contiguous copies."""
    for label, view in (("transposed", transposed), ("sliced", sliced)):
        run = trial.run(map_tensors(trial.fresh(), view), trial.differentiable)
        yield from (f"{label} arguments: {text}" for text in trial.differences(run))
    for name, value in tensors_only(trial.source).items():
        where = _finite_slice(value) if isinstance(value, Tensor) and value.is_floating_point() else None
        if where is not None:
            yield from _expanded(trial, name, *where)


def poisoned(trial: Trial) -> Iterator[str]:
    """Fresh memory holds NaN: whatever is read before it is written shows."""
    with _poisoned_memory():
        run = trial.run(trial.fresh(), trial.differentiable)
    yield from trial.differences(run)


def replace_tensors(trial: Trial, arguments: Arguments, values: dict[str, Tensor]) -> Arguments:
    """The arguments with the named differentiable tensors replaced."""
    replaced = dict(arguments)
    for name, value in tensors_only({k: arguments[k] for k in trial.op.differentiable if k in arguments}).items():
        if isinstance(value, Tensor):
            replaced[name] = values.get(name, value)
        else:
            replaced[name] = type(value)(values.get(f"{name}[{i}]", item) for i, item in enumerate(value))
    return replaced


def arguments_with_gradient(trial: Trial, arguments: Arguments) -> dict[str, Tensor]:
    """The differentiable tensors by path."""
    chosen = {name: arguments[name] for name in trial.op.differentiable if name in arguments}
    return {name: t for name, t in named_tensors(tensors_only(chosen)) if name in trial.differentiable}


def _finite_slice(tensor: Tensor) -> tuple[int, int] | None:
    """(dimension, index) of a slice that can stand for all: garbage in a masked slot must not spread to the others."""
    for dimension in range(tensor.ndim):
        if tensor.numel() and tensor.shape[dimension] > 1:
            finite = tensor.movedim(dimension, 0).reshape(tensor.shape[dimension], -1).isfinite().all(1)
            if bool(finite.any()):
                return dimension, int(finite.nonzero()[0])
    return None


def _expanded(trial: Trial, name: str, dimension: int, index: int) -> Iterator[str]:
    def expanded() -> Arguments:
        made = trial.fresh()
        one = made[name].narrow(dimension, index, 1).clone()
        return {**made, name: one.expand(made[name].shape)}

    def copied() -> Arguments:
        made = expanded()
        return {**made, name: made[name].contiguous()}

    run = trial.run(expanded(), trial.differentiable)
    yield from (f"{name} expanded: {text}" for text in trial.differences(run, trial.standard_of(copied)))


def _combinations(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    if len(names) > ALL_COMBINATIONS:
        return [(name,) for name in names]
    return [chosen for size in range(1, len(names)) for chosen in itertools.combinations(names, size)]


def _need_gradients(trial: Trial) -> None:
    if not trial.implementation.differentiable:
        raise Skip("the implementation has no backward")
    if not trial.differentiable:
        raise Skip("no argument is differentiable")


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """PyTorch's deterministic mode fills what torch.empty gives with NaN (integers: the largest value)."""
    mode, filled = torch.get_deterministic_debug_mode(), _DETERMINISTIC.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    _DETERMINISTIC.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        _DETERMINISTIC.fill_uninitialized_memory = filled
        torch.set_deterministic_debug_mode(mode)
