"""AdamW with fp32 master weights and gradients, global-norm clipping, and steps that are whole or not taken."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlk_train.contract import TrainConfig

_LOW_PRECISION = torch.bfloat16
_SUPPORTED = (torch.float32, torch.float64, torch.bfloat16)
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterAdamW:
    """AdamW over a module's parameters, accumulating in fp32 whatever the parameters' dtype.

    A bf16 parameter gets an fp32 master copy: gradients of micro-batches add up in the master's gradient, the step is
    taken there, and the result is rounded once into the parameter. fp32 and float64 parameters are their own masters.

    Args:
        module: its parameters with `requires_grad` are trained; the others are left alone.
        config: learning rate apart, which each step gets as an argument.

    Raises:
        ValueError: nothing to train, or a parameter's dtype is not fp32, float64 or bf16.
    """

    def __init__(self, module: torch.nn.Module, config: TrainConfig) -> None:
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check_parameters(self.parameters)
        self.masters = {name: _master(p) for name, p in self.parameters.items()}
        self._low = [(p, self.masters[name]) for name, p in self.parameters.items() if p.dtype == _LOW_PRECISION]
        self._max_norm = config.max_grad_norm
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        plain = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def collect(self) -> None:
        """Add the low-precision gradients of the backward that just ran to the fp32 buffers and clear them."""
        for parameter, master in self._low:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """The accumulated gradients by parameter name; a parameter that took no part has none."""
        return {name: m.grad for name, m in self.masters.items() if m.grad is not None}

    def norm(self) -> torch.Tensor:
        """() global 2-norm of the accumulated gradients, before clipping; 0 where there are none."""
        norms = torch._foreach_norm(list(self.gradients().values())) if self.gradients() else []
        if not norms:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))

    def step(self, lr: float, norm: float) -> None:
        """Clip by `norm`, the number that :meth:`norm` gave, step at rate `lr`, and clear the gradients."""
        if self._max_norm is not None and norm > self._max_norm:
            torch._foreach_mul_(list(self.gradients().values()), self._max_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in self._low:
                parameter.copy_(master)
        self.clear()

    def clear(self) -> None:
        """Drop the accumulated gradients."""
        for parameter, master in zip(self.parameters.values(), self.masters.values()):
            parameter.grad = master.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Moments, step counts and the fp32 masters of low-precision parameters, by flat name."""
        state = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                state[f"master/{name}"] = master.detach()
            for key, value in self._adamw.state.get(master, {}).items():
                state[f"{key}/{name}"] = value
        return state

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what :meth:`state` gave, for the same parameters (the caller has checked the model)."""
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.parameters[name]:
                    master.copy_(state[f"master/{name}"])
                self._adamw.state.pop(master, None)
                if f"step/{name}" in state:
                    moments = {key: state[f"{key}/{name}"].to(master.device, copy=True) for key in _MOMENTS}
                    self._adamw.state[master] = moments
        self.clear()


def _master(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    if parameter.dtype != _LOW_PRECISION:
        return parameter
    return torch.nn.Parameter(parameter.detach().float())


def _check_parameters(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    if not parameters:
        raise ValueError("the policy's module has no parameter with requires_grad=True, so there is nothing to train")
    for name, parameter in parameters.items():
        if parameter.dtype not in _SUPPORTED:
            raise ValueError(
                f"parameter {name!r} has dtype {parameter.dtype}; expected float32, float64 or bfloat16 "
                "(float16 gradients underflow without loss scaling: convert the model to bfloat16 or float32)"
            )
