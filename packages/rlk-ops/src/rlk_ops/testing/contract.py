"""The relations about the call itself: wrong calls raise, and custom operators are registered as PyTorch expects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlk_ops.registry import Implementation, Op
from rlk_ops.testing.case import ErrorCase
from rlk_ops.testing.tensors import map_tensors
from rlk_ops.testing.trial import Skip, Trial

_PYTORCH_NAMESPACES = ("aten", "prim", "prims", "higher_order", "quantized", "debugprims")


def errors(op: Op[Any], implementation: Implementation, case: ErrorCase, device: torch.device) -> Iterator[str]:
    """A wrong call raises the right exception, whose message names the argument."""
    arguments = dict(case.build(torch.Generator().manual_seed(0)))
    placed = map_tensors(arguments, lambda t: t if t.is_meta else t.to(device))
    try:
        op(**placed, impl=implementation.name)
    except case.raises as error:
        if not re.search(case.match, str(error)):
            yield f"the message {str(error)!r} does not match {case.match!r}"
    except Exception as error:
        yield f"expected {case.raises.__name__}, got {type(error).__name__}: {error}"
    else:
        yield f"expected {case.raises.__name__} ({case.match!r}), nothing was raised"


def opcheck(trial: Trial) -> Iterator[str]:
    """`torch.library.opcheck` on every custom operator that the call goes through: schema, fake, autograd, tracing."""
    with _CustomCalls() as seen:
        trial.run(trial.fresh(), trial.differentiable)
    if not seen.calls:
        raise Skip("the implementation calls no custom operator")
    for name, (function, args, kwargs) in seen.calls.items():
        outcome = torch.library.opcheck(function, args, kwargs, raise_exception=False)
        yield from (f"{name}: {test}: {result}" for test, result in outcome.items() if result != "SUCCESS")


class _CustomCalls(TorchFunctionMode):
    """Records the first call of every operator that is not PyTorch's own, with copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload) and func.namespace not in _PYTORCH_NAMESPACES:
            copies = map_tensors((args, given), lambda t: t.detach().clone().requires_grad_(t.requires_grad))
            self.calls.setdefault(str(func), (func, *copies))
        return func(*args, **given)
