"""The dispatcher: which implementation of an operator runs for these inputs, and why.

An operator *is* its reference: a plain PyTorch function under :func:`op`. It is the contract, the gold path and the
last resort. Faster implementations register beside it with :meth:`Op.impl`. One call selects one implementation by
device, architecture, dtype, strides, options and the need of gradients, never by batch size or token count: a choice
that looked at those could give the trainer and the rollout engine different kernels for the same row.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, overload

import torch

R = TypeVar("R")
Reason = Callable[..., str | None]
Check = Callable[..., None]

ENVIRONMENT_VARIABLE = "RLK_USE"
ENTRY_POINT_GROUP = "rlk_ops.impls"
REFERENCE = "reference"

_REGISTRY: dict[str, Op[Any]] = {}
_forced: ContextVar[Mapping[str, str]] = ContextVar("rlk_ops_use", default={})  # noqa: B039 - never mutated
_invariant: ContextVar[bool] = ContextVar("rlk_ops_invariant", default=False)
_entry_points_lock = threading.Lock()
_entry_points_loaded = False
_warned_reference: set[str] = set()


class Unsupported(RuntimeError):
    """No implementation can run this call, or the one that was asked for cannot; carries every reason.

    Attributes:
        op: the operator's name.
        reasons: implementation name to the clause that says why it refused.
    """

    def __init__(self, op: str, reasons: Mapping[str, str], asked: str | None = None) -> None:
        self.op, self.reasons = op, dict(reasons)
        head = f"{op}: implementation {asked!r} was asked for and refuses" if asked else f"{op}: no implementation runs"
        super().__init__(head + ": " + "; ".join(f"{name}: {why}" for name, why in self.reasons.items()))


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    Attributes:
        name: the technology (`triton`, `chunked`, `cuda_sm90`).
        function: same parameters as the reference, or fewer options; an option it lacks is refused when it is set.
        reason: called with the call's arguments; None, or a short clause that says why it cannot run.
        invariant: promises the same bits for the same row whatever surrounds it.
        differentiable: has a backward.
    """

    name: str
    function: Callable[..., Any]
    reason: Reason | None = None
    invariant: bool = False
    differentiable: bool = True
    options: frozenset[str] | None = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = frozenset(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        object.__setattr__(self, "options", None if takes_any else names)


class Op(Generic[R]):
    """An operator: its reference, its other implementations, and the choice between them.

    Attributes:
        name: the public name.
        reference: the plain PyTorch function.
        differentiable: names of the parameters that gradients flow to.
        rows: names of the parameters whose leading dimension is the batch, for the invariance relation.
        masked: names of the parameters whose masked slots may hold garbage, for the masking relation.
    """

    def __init__(
        self,
        reference: Callable[..., R],
        *,
        check: Check | None,
        differentiable: tuple[str, ...],
        rows: tuple[str, ...],
        masked: tuple[str, ...],
        invariant: bool,
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self.check = check
        self.differentiable, self.rows, self.masked = differentiable, rows, masked
        self.signature = inspect.signature(reference)
        self._cases: Callable[[], Any] | None = None
        self._errors: Callable[[], Any] | None = None
        self._impls: dict[str, Implementation] = {}
        self._reference = Implementation(REFERENCE, reference, invariant=invariant)

    def __call__(self, *args: Any, impl: str | None = None, **kwargs: Any) -> R:
        """Check the call, select an implementation (`impl` names one) and run it."""
        bound = self.bind(*args, **kwargs)
        chosen = self._select(bound, impl)
        if chosen.options is None or chosen.function is self.reference:
            return chosen.function(*bound.args, **bound.kwargs)
        given = {k: v for k, v in bound.arguments.items() if k in chosen.options}
        return chosen.function(**given)

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.implementations)}>"

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """The call's arguments by name, defaults filled in, checked; raises as the call would."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}{_did_you_mean(kwargs, self.signature.parameters)}") from None
        bound.apply_defaults()
        if self.check is not None:
            self.check(**bound.arguments)
        return bound

    @property
    def implementations(self) -> dict[str, Implementation]:
        """Name to implementation in the order in which they are tried; the reference is last."""
        _load_entry_points()
        return {**self._impls, REFERENCE: self._reference}

    def impl(
        self,
        name: str,
        *,
        reason: Reason | None = None,
        invariant: bool = False,
        differentiable: bool = True,
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Register an implementation; the newest is tried first. See :class:`Implementation` for the arguments."""

        def register(function: Callable[..., R]) -> Callable[..., R]:
            if name == REFERENCE or name in self._impls:
                raise ValueError(f"{self.name}: an implementation named {name!r} is registered already")
            new = Implementation(name, function, reason, invariant, differentiable)
            self._impls = {name: new, **self._impls}
            return function

        return register

    def unregister(self, name: str) -> None:
        """Forget an implementation that :meth:`impl` registered."""
        if name not in self._impls:
            raise KeyError(f"{self.name}: no implementation named {name!r}; there are {', '.join(self._impls)}")
        self._impls = {k: v for k, v in self._impls.items() if k != name}

    def cases(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Decorator: a generator of `rlk_ops.testing.case.Case`, the operator's gold-path cases."""
        self._cases = function
        return function

    def errors(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Decorator: a generator of `rlk_ops.testing.case.ErrorCase`, calls that must raise."""
        self._errors = function
        return function

    def list_cases(self) -> list[Any]:
        """The operator's cases."""
        return list(self._cases()) if self._cases else []

    def list_errors(self) -> list[Any]:
        """The operator's error cases."""
        return list(self._errors()) if self._errors else []

    def explain(self, *args: Any, **kwargs: Any) -> dict[str, str | None]:
        """Implementation name to None (could run) or the reason against it, in the order of preference."""
        bound = self.bind(*args, **kwargs)
        return {name: self._refusal(candidate, bound) for name, candidate in self.implementations.items()}

    def selected(self, *args: Any, impl: str | None = None, **kwargs: Any) -> str:
        """The name of the implementation that this call would run; raises :class:`Unsupported` as the call would."""
        return self._select(self.bind(*args, **kwargs), impl, warn=False).name

    def _select(self, bound: inspect.BoundArguments, impl: str | None, warn: bool = True) -> Implementation:
        asked = impl or _forced.get().get(self.name) or _from_environment().get(self.name)
        if asked is not None:
            return self._asked(asked, bound)
        reasons: dict[str, str] = {}
        for name, candidate in self.implementations.items():
            why = self._refusal(candidate, bound)
            if why is None:
                if warn and name == REFERENCE:
                    self._warn_reference(bound, reasons)
                return candidate
            reasons[name] = why
        raise Unsupported(self.name, reasons)

    def _asked(self, name: str, bound: inspect.BoundArguments) -> Implementation:
        candidate = self.implementations.get(name)
        if candidate is None:
            raise Unsupported(self.name, {name: f"no such implementation; there are {', '.join(self.implementations)}"})
        why = self._refusal(candidate, bound)
        if why is not None:
            raise Unsupported(self.name, {name: why}, asked=name)
        return candidate

    def _refusal(self, candidate: Implementation, bound: inspect.BoundArguments) -> str | None:
        if _invariant.get() and not candidate.invariant:
            return "does not promise batch invariance, which is asked for"
        if candidate.options is not None:
            for name, parameter in self.signature.parameters.items():
                if name not in candidate.options and not _is_default(bound.arguments[name], parameter.default):
                    return f"does not support option {name}"
        if not candidate.differentiable and self._needs_gradient(bound):
            return "has no backward, and an input requires a gradient"
        return candidate.reason(*bound.args, **bound.kwargs) if candidate.reason else None

    def _needs_gradient(self, bound: inspect.BoundArguments) -> bool:
        tensors = (bound.arguments.get(name) for name in self.differentiable)
        return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)

    def _warn_reference(self, bound: inspect.BoundArguments, reasons: Mapping[str, str]) -> None:
        tensors = [t for t in bound.arguments.values() if isinstance(t, torch.Tensor)]
        if self.name in _warned_reference or not reasons or all(t.device.type == "cpu" for t in tensors):
            return
        _warned_reference.add(self.name)
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        warnings.warn(f"{self.name} runs its slow reference on {tensors[0].device}: {why}", stacklevel=4)


@overload
def op(reference: Callable[..., R], /) -> Op[R]: ...
@overload
def op(
    *,
    check: Check | None = None,
    differentiable: tuple[str, ...] = (),
    rows: tuple[str, ...] = (),
    masked: tuple[str, ...] = (),
    invariant: bool = False,
) -> Callable[[Callable[..., R]], Op[R]]: ...
def op(reference: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a plain PyTorch function an operator; see :class:`Op` for the options.

    `check` is called with every argument by name before any implementation runs and raises ValueError or TypeError.
    `invariant` says that the reference itself gives a row the same bits whatever surrounds it.
    """
    if reference is not None:
        return op()(reference)
    defaults = {"check": None, "differentiable": (), "rows": (), "masked": (), "invariant": False}

    def register(function: Callable[..., Any]) -> Op[Any]:
        new = Op(function, **{**defaults, **options})
        there = _REGISTRY.get(new.name)
        if there is not None and there.reference.__module__ != function.__module__:
            place = there.reference.__module__
            raise ValueError(f"an operator named {new.name!r} is registered already, by {place}; choose another name")
        _REGISTRY[new.name] = new
        return new

    return register


def ops() -> dict[str, Op[Any]]:
    """Every operator by name."""
    import_module("rlk_ops")  # whose import registers them
    return dict(sorted(_REGISTRY.items()))


def find_op(name: str) -> Op[Any]:
    """The operator of that name; ValueError names the nearest one."""
    known = ops()
    if name not in known:
        raise ValueError(f"no operator named {name!r}{_did_you_mean([name], known)}; there are {', '.join(known)}")
    return known[name]


def dispatch(operator: Op[Any] | str, *args: Any, **kwargs: Any) -> tuple[str, dict[str, str | None]]:
    """The implementation that would run for this call, and every implementation's reason against itself."""
    which = find_op(operator) if isinstance(operator, str) else operator
    return which.selected(*args, **kwargs), which.explain(*args, **kwargs)


@contextmanager
def use(**choices: str) -> Iterator[None]:
    """Within the block, `use(linear_logp="triton")` runs that implementation or raises :class:`Unsupported`."""
    for name in choices:
        find_op(name)
    token = _forced.set({**_forced.get(), **choices})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def require_invariance(wanted: bool = True) -> Iterator[None]:
    """Within the block only implementations that promise batch invariance are eligible."""
    token = _invariant.set(wanted)
    try:
        yield
    finally:
        _invariant.reset(token)


def _from_environment() -> Mapping[str, str]:
    return _parse_environment(os.environ.get(ENVIRONMENT_VARIABLE, ""))


@functools.lru_cache(maxsize=8)
def _parse_environment(text: str) -> Mapping[str, str]:
    choices = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, implementation = item.partition("=")
        if not separator or not implementation:
            raise ValueError(f"{ENVIRONMENT_VARIABLE}: {item!r} is not of the form op=implementation")
        find_op(name.strip())
        choices[name.strip()] = implementation.strip()
    return choices


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    with _entry_points_lock:
        if _entry_points_loaded:
            return
        _entry_points_loaded = True
        for point in entry_points(group=ENTRY_POINT_GROUP):
            point.load()


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return not isinstance(value, torch.Tensor) and type(value) is type(default) and bool(value == default)


def _did_you_mean(given: Any, known: Any) -> str:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            return f" (did you mean {near[0]!r}?)" if near else ""
    return ""
