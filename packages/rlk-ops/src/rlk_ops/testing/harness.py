"""validate: every relation on every case of one candidate."""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rlk_ops.device import Device, current_device
from rlk_ops.registry import REFERENCE, Implementation, Op, Unsupported, find_op
from rlk_ops.testing import accuracy, bitwise, contract
from rlk_ops.testing.case import Case, ErrorCase
from rlk_ops.testing.report import Report, Result, Status
from rlk_ops.testing.tensors import named_tensors
from rlk_ops.testing.tolerance import dtype_name
from rlk_ops.testing.trial import Skip, Trial

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ERRORS = "errors"


@dataclass(frozen=True)
class Relation:
    """A relation and the dtypes in which it is held.

    Attributes:
        check: yields a sentence per difference; raises :class:`Skip` where it does not apply.
        dtypes: "every" one under test; "first" of them; "two", the first and the first low-precision one; "float64".
    """

    check: Callable[[Trial], Iterator[str]]
    dtypes: Literal["every", "first", "two", "float64"]

    def choose(self, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
        """The dtypes among those under test."""
        if self.dtypes == "every":
            return list(dtypes)
        if self.dtypes == "float64":
            return [torch.float64] if torch.float64 in dtypes else []
        low = [t for t in dtypes if t.itemsize == 2 and t != dtypes[0]]
        return [dtypes[0], *low[: self.dtypes == "two"]]


RELATIONS: dict[str, Relation] = {
    "accuracy": Relation(accuracy.accuracy, "every"),
    "gradients": Relation(accuracy.gradients, "every"),
    "gradcheck": Relation(accuracy.gradcheck, "float64"),
    "requires_grad": Relation(accuracy.requires_grad, "first"),
    "upstream": Relation(accuracy.upstream, "first"),
    "invariance": Relation(bitwise.invariance, "two"),
    "determinism": Relation(bitwise.determinism, "two"),
    "masking": Relation(bitwise.masking, "two"),
    "poisoned": Relation(accuracy.poisoned, "first"),
    "strides": Relation(accuracy.strides, "first"),
    "unmodified": Relation(bitwise.unmodified, "first"),
    "opcheck": Relation(contract.opcheck, "first"),
}


def validate(
    op: Op[Any] | str,
    impl: str | Callable[..., Any] = REFERENCE,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    relations: Collection[str] | None = None,
    cases: Collection[str] | None = None,
    device: Device | torch.device | str | None = None,
) -> Report:
    """Hold one implementation of an operator against the gold path.

    Args:
        op: the operator, or its name.
        impl: the name of a registered implementation, or a function, which is registered for the time of the call
            (without a promise of batch invariance).
        dtypes: of the floating arguments; default float32, bfloat16, float16, float64. One that the implementation
            refuses is skipped, with its reason in the report.
        relations: names from :data:`RELATIONS`, or "errors"; default all.
        cases: names of the operator's cases; default all but those tagged "bench".
        device: default the current one.

    Returns:
        The report; `report.passed`, `print(report)`, `report.to_json()`.

    Raises:
        ValueError: an unknown operator, implementation, relation or case; the message names the nearest one.
        DeviceUnavailable: the device is absent.
    """
    operator = find_op(op) if isinstance(op, str) else op
    wanted = _named("relation", relations, (*RELATIONS, ERRORS))
    chosen = _cases(operator, cases)
    place = Device.parse(device if device is not None else current_device(), seed=0)
    with _registered(operator, impl) as implementation, place:
        trials = _Trials(operator, implementation, place, tuple(dtypes or DTYPES))
        results = [result for case in chosen for result in trials.results(case, wanted)]
        if ERRORS in wanted and cases is None:
            results += [_error_result(operator, implementation, case, place) for case in operator.list_errors()]
    return Report(operator.name, implementation.name, str(place), tuple(results))


@dataclass(frozen=True)
class _Trials:
    op: Op[Any]
    implementation: Implementation
    device: Device
    dtypes: tuple[torch.dtype, ...]

    def results(self, case: Case, relations: Collection[str]) -> Iterator[Result]:
        trials = {dtype: Trial(self.op, self.implementation, case, dtype, self.device) for dtype in self.dtypes}
        for name in RELATIONS:
            if name in relations:
                for dtype in RELATIONS[name].choose(self.dtypes):
                    yield _result(case.name, name, dtype_name(dtype), _held(RELATIONS[name], trials[dtype]))


def _held(relation: Relation, trial: Trial) -> Iterator[str]:
    _skip_overflow(trial)
    yield from relation.check(trial)


def _result(case: str, relation: str, dtype: str, differences: Iterator[str]) -> Result:
    found: list[str] = []
    status: Status = "passed"
    try:
        found.extend(differences)
    except Skip as skip:
        status, reason = "skipped", str(skip)
    except Unsupported as refusal:
        status, reason = "skipped", f"refuses: {'; '.join(refusal.reasons.values())}"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found.append(f"{type(error).__name__}: {error} (line {place.lineno} of {place.filename.rpartition('/')[2]})")
    if found:
        return Result(case, relation, dtype, "failed", tuple(found))
    return Result(case, relation, dtype, status, (reason,) if status == "skipped" else ())


def _error_result(op: Op[Any], implementation: Implementation, case: ErrorCase, device: Device) -> Result:
    return _result(case.name, ERRORS, "", contract.errors(op, implementation, case, device.torch_device))


def _skip_overflow(trial: Trial) -> None:
    if trial.dtype == torch.float64:
        return
    for name, tensor in named_tensors({k: v for k, v in trial.source.items() if isinstance(v, torch.Tensor)}):
        if tensor.is_floating_point() and bool((tensor.isfinite() & tensor.to(trial.dtype).isinf()).any()):
            raise Skip(f"{name} holds values beyond the range of {dtype_name(trial.dtype)}")


def _cases(op: Op[Any], names: Collection[str] | None) -> list[Case]:
    cases: dict[str, Case] = {case.name: case for case in op.list_cases()}
    if names is None:
        return [case for case in cases.values() if "bench" not in case.tags]
    return [cases[name] for name in _named(f"case of {op.name}", names, cases)]


def _named(what: str, names: Collection[str] | None, known: Iterable[str]) -> list[str]:
    everything = list(known)
    for name in names or ():
        if name not in everything:
            near = difflib.get_close_matches(name, everything, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"no {what} named {name!r}{hint}; there are {', '.join(everything)}")
    return everything if names is None else [name for name in everything if name in names]


@contextlib.contextmanager
def _registered(op: Op[Any], impl: str | Callable[..., Any]) -> Iterator[Implementation]:
    if isinstance(impl, str):
        yield op.implementations[_named(f"implementation of {op.name}", [impl], op.implementations)[0]]
        return
    name = getattr(impl, "__name__", type(impl).__name__)
    op.impl(name)(impl)
    try:
        yield op.implementations[name]
    finally:
        op.unregister(name)
