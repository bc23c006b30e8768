"""What a training worker consumes and produces: the policy, the configuration, the result, the worker's verbs.

A worker takes a scored rollout and gives back a result; how it computes (one process, DeepSpeed, FSDP) is its own
affair, and one :class:`TrainConfig` means the same mathematics to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from rlk_ops import Objective, Reduction
from rlk_rollout.records import Rollout
from rlk_rollout.tokens import TokenBatch
from rlk_weightsync import Publisher, Update

SCHEDULES = ("constant", "linear", "cosine")
OLD_LOGPS = ("auto", "rollout", "recompute")
TRUNCATED_POLICIES = ("replay", "refuse", "temperature_only")
ADVANTAGE_SCALES = ("group", "batch", "none")


class TooManySkippedSteps(RuntimeError):
    """The loss or the gradient was not finite for more optimizer steps in a row than `TrainConfig.skip_limit`."""


@dataclass(frozen=True)
class PolicyOutput:
    """What a policy says about a batch's completions.

    Attributes:
        logps: (B, T) log-prob of each completion token, fp32 or float64, differentiable; padding holds anything.
        entropy: (B, T) entropy in nats of each token's distribution, or None where it was not asked for.
    """

    logps: torch.Tensor
    entropy: torch.Tensor | None = None


@runtime_checkable
class Policy(Protocol):
    """A model that scores completions with gradients: batch to log-probs and entropy."""

    @property
    def module(self) -> torch.nn.Module:
        """The module whose weights are trained, published and saved."""

    def __call__(self, batch: TokenBatch, *, temperature: float, entropy: bool) -> PolicyOutput:
        """Log-probs of the batch's completion tokens under its support, where it has one."""

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """The module's parameters, each once."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The module's weights by name; tied weights appear under each of their names."""


@dataclass(frozen=True)
class TrainConfig:
    """How a worker turns a scored rollout into optimizer steps. Validated at construction.

    Attributes:
        lr: AdamW's peak learning rate.
        betas: AdamW's decay rates of the first and second moment.
        eps: AdamW's term in the denominator.
        weight_decay: decoupled, applied to parameters of two dimensions or more (norms and biases are left alone).
        warmup_steps: optimizer steps over which the learning rate rises linearly to `lr`.
        schedule: what follows the warm-up: `constant`, or `linear` or `cosine` down to 0 at `total_steps`.
        total_steps: optimizer steps of the whole run; `linear` and `cosine` need it.
        max_grad_norm: the gradient's global 2-norm is clipped to this; None leaves it.
        micro_batch_tokens: padded tokens (sequences x the longest of them) of one forward; changes memory and speed,
            never the gradient.
        minibatches: optimizer windows, each one step, that an epoch over the rollout is cut into.
        epochs: passes over the rollout.
        objective: the policy loss.
        reduction: how token losses become one number; its denominator is the worker's to compute and must be None.
        advantage_scale: `group`, `batch` or `none`: what the centred rewards are divided by.
        advantage_ddof: delta degrees of freedom of that standard deviation.
        advantage_eps: added to that standard deviation.
        old_logps: where the log-probs of the policy at the start of the update come from. `recompute`: one pass before
            the first step; `rollout`: those that the engine reported; `auto`: none where the rollout is one window
            passed once (the ratio is 1 with a live gradient), else `recompute`.
        truncated_policy: what to do with completions drawn with top-k, top-p or min-p. `replay`: log-probs under the
            support that the rollout recorded; `refuse`: raise; `temperature_only`: log-probs of the temperature-only
            distribution on both sides, with the bias reported as `truncation/bias_mean` and `truncation/bias_max`.
        mask_truncated: drop completions that ran into the token limit after they counted in their group's baseline.
        report_entropy: report the entropy also where the objective has no entropy bonus.
        seed: of the order in which sequences are dealt to windows.
        skip_limit: raise :class:`TooManySkippedSteps` when this many steps in a row were not finite.

    Raises:
        ValueError: a value is out of range, or two options contradict each other.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    total_steps: int | None = None
    max_grad_norm: float | None = 1.0
    micro_batch_tokens: int = 16384
    minibatches: int = 1
    epochs: int = 1
    objective: Objective = field(default_factory=Objective)
    reduction: Reduction = field(default_factory=Reduction)
    advantage_scale: str = "group"
    advantage_ddof: int = 1
    advantage_eps: float = 1e-6
    old_logps: str = "auto"
    truncated_policy: str = "replay"
    mask_truncated: bool = False
    report_entropy: bool = False
    seed: int = 0
    skip_limit: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("old_logps", self.old_logps, OLD_LOGPS)
        _check_choice("truncated_policy", self.truncated_policy, TRUNCATED_POLICIES)
        _check_choice("advantage_scale", self.advantage_scale, ADVANTAGE_SCALES)
        for name in ("micro_batch_tokens", "minibatches", "epochs", "skip_limit"):
            _check_integer(name, getattr(self, name), 1)
        for name in ("warmup_steps", "advantage_ddof", "seed"):
            _check_integer(name, getattr(self, name), 0)
        for name in ("lr", "eps", "weight_decay", "advantage_eps"):
            _check_number(name, getattr(self, name))
        self._check_optimizer()
        self._check_objective()

    def _check_optimizer(self) -> None:
        if len(self.betas) != 2 or not all(isinstance(b, float | int) and 0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas={self.betas!r}: expected two numbers in [0, 1)")
        if self.max_grad_norm is not None:
            _check_number("max_grad_norm", self.max_grad_norm)
            if self.max_grad_norm == 0:
                raise ValueError("max_grad_norm=0 would stop all training; None turns clipping off")
        if self.schedule == "constant":
            if self.total_steps is not None:
                raise ValueError(f"total_steps={self.total_steps} has no effect on schedule='constant'; leave it None")
            return
        if self.total_steps is None:
            raise ValueError(f"schedule={self.schedule!r} needs total_steps, the optimizer steps of the whole run")
        _check_integer("total_steps", self.total_steps, 1)
        if self.warmup_steps >= self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be smaller than total_steps={self.total_steps}")

    def _check_objective(self) -> None:
        if not isinstance(self.objective, Objective) or not isinstance(self.reduction, Reduction):
            raise TypeError("objective and reduction must be rlk_ops.Objective and rlk_ops.Reduction")
        self.reduction.resolve(self.objective)
        if self.reduction.denominator is not None:
            raise ValueError(
                f"reduction.denominator={self.reduction.denominator} was given; the worker computes it over each "
                "optimizer window, so pass Reduction(mode) without one"
            )
        if self.old_logps == "rollout" and self.objective.mismatch is not None:
            raise ValueError(
                "old_logps='rollout' makes the mismatch ratio 1 everywhere, so objective.mismatch would do nothing; "
                "use old_logps='auto' or 'recompute', or drop the mismatch correction"
            )

    @property
    def recomputes_old_logps(self) -> bool:
        """Whether an update begins with a pass that records the log-probs of its starting policy."""
        several = self.minibatches * self.epochs > 1
        return self.old_logps == "recompute" or (self.old_logps == "auto" and several)


@dataclass(frozen=True)
class TrainResult:
    """What one update did.

    Attributes:
        loss: the mean over optimizer windows of the objective's loss.
        metrics: every reported number by name (see the package's README).
        steps: optimizer steps applied in this update.
        skipped: optimizer steps left out in this update because loss or gradient was not finite.
        weight_version: the version of the weights that the worker now holds; it grows by one with every update.
    """

    loss: float
    metrics: Mapping[str, float]
    steps: int
    skipped: int
    weight_version: int


@runtime_checkable
class Worker(Protocol):
    """The verbs of a trainer, the same for one process and for many."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the worker holds."""

    def train(self, rollout: Rollout) -> TrainResult:
        """Update the policy on one scored rollout."""

    def publish(self, publisher: Publisher) -> Update:
        """Publish the weights under `weight_version`."""

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, whole or not at all; `extra` is the caller's own JSON-able state (data position)."""

    def load(self, path: str | Path) -> dict[str, Any]:
        """Restore a checkpoint of the same model and configuration; returns its `extra`."""


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, float | int) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: expected a finite number of at least 0")
