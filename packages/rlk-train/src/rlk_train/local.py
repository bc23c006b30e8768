"""A training worker in one process: micro-batches, one-owner reduction, AdamW, checkpoints, publication."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlk_ops.ops.policy_loss import merge_metrics
from rlk_rollout.records import Rollout
from rlk_train.checkpoint import (
    Checkpoint,
    check_same,
    read_checkpoint,
    restore_rng,
    rng_state,
    write_checkpoint,
)
from rlk_train.contract import Policy, TooManySkippedSteps, TrainConfig, TrainResult
from rlk_train.drift import drift, rollout_gap
from rlk_train.objective import loss_share, window_reduction
from rlk_train.optimizer import MasterAdamW
from rlk_train.samples import MicroBatch, Selection, build_micro_batch, pack_micro_batches, select_samples
from rlk_train.schedule import learning_rate
from rlk_weightsync import Publisher, Update


@dataclass(frozen=True)
class _Update:
    selection: Selection
    old_logps: list[torch.Tensor] | None
    gaps: list[torch.Tensor]
    losses: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Those of all micro-batches together, fetched from the device at once; empty where there was none."""
        merged = {**merge_metrics(self.losses), **drift(self.gaps)}
        return dict(zip(merged, torch.stack([value.double() for value in merged.values()]).tolist())) if merged else {}


@dataclass(frozen=True)
class _Window:
    loss: float
    grad_norm: float
    lr: float
    taken: bool


class LocalWorker:
    """A :class:`rlk_train.contract.Worker` that trains in this process, on the device on which the policy already is.

    Args:
        policy: what to train; its module's parameters are fp32, float64 or bf16.
        config: see :class:`TrainConfig`.

    Attributes:
        policy: as given.
        config: as given.
        step: optimizer steps applied so far; the learning rate depends on nothing else.
    """

    def __init__(self, policy: Policy, config: TrainConfig | None = None) -> None:
        self.policy = policy
        self.config = config or TrainConfig()
        self.step = 0
        self._optimizer = MasterAdamW(policy.module, self.config)
        first = next(iter(self._optimizer.parameters.values()))
        self._device = first.device
        self._dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self._weight_version = 0
        self._skipped_in_a_row = 0

    @property
    def weight_version(self) -> int:
        """The version of the weights that the worker holds: the number of updates behind them."""
        return self._weight_version

    def train(self, rollout: Rollout) -> TrainResult:
        """Update the policy on one scored rollout.

        A window whose loss or gradient norm is not finite takes no step: weights, moments and schedule keep their bits.

        Args:
            rollout: scored; failed completions are dropped from their groups.

        Returns:
            The result; where no completion is left it has 0 steps and only the metrics that need no token.

        Raises:
            ValueError: the rollout lacks what the configuration needs; nothing was changed.
            TooManySkippedSteps: `config.skip_limit` windows in a row were not finite.
        """
        started = time.perf_counter()
        selection = select_samples(rollout, self.config)
        gaps: list[torch.Tensor] = []
        update = _Update(selection, self._starting_logps(selection, gaps), gaps)
        windows = [
            self._window(update, chosen, number) for number, chosen in enumerate(self._deal(len(selection.samples)))
        ]
        self._weight_version += 1
        skipped = sum(not window.taken for window in windows)
        tokens = sum(selection.completion_lengths)
        seconds = time.perf_counter() - started
        metrics = {
            **_summary(windows),
            **update.metrics(),
            **selection.metrics,
            "lr": windows[-1].lr if windows else learning_rate(self.config, self.step),
            "sequences": float(len(selection.samples)),
            "tokens": float(tokens),
            "tokens_per_s": tokens * self.config.epochs / seconds,
            "seconds": seconds,
            "skipped": float(skipped),
        }
        return TrainResult(metrics["loss"], metrics, len(windows) - skipped, skipped, self._weight_version)

    def publish(self, publisher: Publisher) -> Update:
        """Publish the weights, bit for bit, under :attr:`weight_version`."""
        return publisher.publish(dict(self.policy.state_dict()), version=self._weight_version)

    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint file, whole or not at all: weights, optimizer, random generators, step, weight version.

        Args:
            path: of the file; its folder exists. A checkpoint already there is replaced only by a whole new one.
            extra: the caller's own JSON-able state (data position); :meth:`load` returns it.

        Raises:
            OSError: the disk refused; what stood at `path` still does.
        """
        generators = rng_state(self._device)
        weights = {f"weights/{name}": tensor for name, tensor in self.policy.state_dict().items()}
        optimizer = {f"optimizer/{name}": tensor for name, tensor in self._optimizer.state().items()}
        state = {
            "config": _flat(asdict(self.config)),
            "trained": list(self._optimizer.parameters),
            "step": self.step,
            "weight_version": self._weight_version,
            "skipped_in_a_row": self._skipped_in_a_row,
            "extra": dict(extra or {}),
            **generators.state,
        }
        write_checkpoint(path, Checkpoint({**weights, **optimizer, **generators.tensors}, state))

    def load(self, path: str | Path, *, may_differ: Iterable[str] = ()) -> dict[str, Any]:
        """Restore what :meth:`save` wrote, so that training continues to the same bits.

        Args:
            path: of the file.
            may_differ: configuration fields changed on purpose: `lr`, `objective.kl_coef`, or all of `objective`.

        Returns:
            The `extra` that was given to :meth:`save`.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: not a checkpoint, or of another model or configuration; nothing was changed.
        """
        checkpoint = read_checkpoint(path, self._device)
        weights, optimizer = _section(checkpoint, "weights/"), _section(checkpoint, "optimizer/")
        self._check(checkpoint, weights, may_differ)
        with torch.no_grad():
            for name, tensor in self.policy.state_dict().items():
                tensor.copy_(weights[name])
        self._optimizer.restore(optimizer)
        restore_rng(checkpoint, self._device)
        self.step = checkpoint.state["step"]
        self._weight_version = checkpoint.state["weight_version"]
        self._skipped_in_a_row = checkpoint.state["skipped_in_a_row"]
        return dict(checkpoint.state["extra"])

    def _deal(self, count: int) -> Iterator[list[int]]:
        """The samples of each optimizer window, in the order of the windows; windows without a sample are left out."""
        parts = self.config.minibatches
        generator = torch.Generator().manual_seed(self.config.seed + (self._weight_version << 32))
        for _ in range(self.config.epochs):
            order = torch.randperm(count, generator=generator).tolist() if parts > 1 else list(range(count))
            windows = (order[count * part // parts : count * (part + 1) // parts] for part in range(parts))
            yield from filter(None, windows)

    def _starting_logps(self, selection: Selection, gaps: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Per sample, its (T_i,) log-probs under the policy that the update starts from; None where none are needed."""
        if self.config.old_logps == "rollout":
            return [torch.tensor(s.rollout_logps, dtype=self._dtype, device=self._device) for s in selection.samples]
        if not self.config.recomputes_old_logps:
            return None
        recorded: dict[int, torch.Tensor] = {}
        every = range(len(selection.samples))
        for rows in pack_micro_batches(selection, every, self.config.micro_batch_tokens):
            batch = self._batch(selection, rows)
            with torch.no_grad():
                logps = self.policy(batch.tokens, temperature=selection.temperature, entropy=False).logps
            gaps.append(rollout_gap(logps, batch.rollout_logps, batch.tokens.completion_mask))
            recorded.update((i, row[: selection.completion_lengths[i]]) for i, row in zip(rows, logps))
        return [recorded[i] for i in every]

    def _window(self, update: _Update, chosen: Sequence[int], number: int) -> _Window:
        """Optimizer window `number`: gradients of all its micro-batches, then one step or none."""
        config, selection = self.config, update.selection
        lengths = [selection.completion_lengths[i] for i in chosen]
        reduction = window_reduction(config.objective, config.reduction, lengths)
        entropy = config.report_entropy or config.objective.entropy_coef != 0
        at_start = number == 0 and not config.recomputes_old_logps
        self._optimizer.clear()
        losses = []
        for rows in pack_micro_batches(selection, chosen, config.micro_batch_tokens):
            batch = self._batch(selection, rows, update.old_logps)
            output = self.policy(batch.tokens, temperature=selection.temperature, entropy=entropy)
            share = loss_share(output, batch, objective=config.objective, reduction=reduction)
            share.loss.backward()
            self._optimizer.collect()
            losses.append(share.loss.detach())
            update.losses.append(share.metrics)
            if at_start:
                update.gaps.append(rollout_gap(output.logps, batch.rollout_logps, batch.tokens.completion_mask))
        return self._take_step(torch.stack(losses).sum())

    def _take_step(self, loss: torch.Tensor) -> _Window:
        norm = self._optimizer.norm()
        loss_value, norm_value = torch.stack([loss.double(), norm.double().to(loss.device)]).tolist()
        lr = learning_rate(self.config, self.step)
        finite = math.isfinite(loss_value) and math.isfinite(norm_value)
        if finite:
            self._optimizer.step(lr, norm_value)
            self.step += 1
            self._skipped_in_a_row = 0
        else:
            self._optimizer.clear()
            self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.config.skip_limit:
            raise TooManySkippedSteps(
                f"{self._skipped_in_a_row} optimizer steps in a row had a loss or gradient that is not finite "
                f"(the last: loss {loss_value}, gradient norm {norm_value}); the weights are those before the first of "
                "them. Lower lr or max_grad_norm, check the rewards and the rollout's log-probs, or raise skip_limit"
            )
        return _Window(loss_value, norm_value, lr, finite)

    def _batch(
        self, selection: Selection, rows: Sequence[int], old_logps: Sequence[torch.Tensor] | None = None
    ) -> MicroBatch:
        return build_micro_batch(selection, rows, dtype=self._dtype, device=self._device, old_logps=old_logps)

    def _check(self, checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor], may_differ: Iterable[str]) -> None:
        saved, current = checkpoint.state["config"], _flat(asdict(self.config))
        names = list(may_differ)
        unknown = [name for name in names if not any(_named(field_name, [name]) for field_name in current)]
        if unknown:
            raise ValueError(f"may_differ: TrainConfig has no field {', '.join(unknown)}")
        check_same(
            "model",
            {name: _description(tensor) for name, tensor in weights.items()},
            {name: _description(tensor) for name, tensor in self.policy.state_dict().items()},
            "Load it into a worker of the model that it was saved from",
        )
        check_same(
            "set of trained parameters",
            dict.fromkeys(checkpoint.state["trained"], "trained"),
            dict.fromkeys(self._optimizer.parameters, "trained"),
            "Set requires_grad as it was when the checkpoint was saved",
        )
        check_same(
            "configuration",
            {name: value for name, value in saved.items() if not _named(name, names)},
            {name: value for name, value in current.items() if not _named(name, names)},
            "Use the saved values, or name the fields that were changed on purpose in load(path, may_differ=...)",
        )


def _named(field_name: str, names: Sequence[str]) -> bool:
    """Whether one of the names is the configuration field, or one that contains it."""
    return any(f"{field_name}.".startswith(f"{name}.") for name in names)


def _summary(windows: Sequence[_Window]) -> dict[str, float]:
    """Loss over the windows, and the gradient norm before clipping over those that took a step (else over all)."""
    if not windows:
        return {"loss": 0.0, "grad_norm": 0.0}
    taken = [window for window in windows if window.taken] or windows
    return {
        "loss": sum(window.loss for window in taken) / len(taken),
        "grad_norm": sum(window.grad_norm for window in taken) / len(taken),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration as dotted names to what JSON makes of the values."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = json.loads(json.dumps(value))
    return flat


def _section(checkpoint: Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in checkpoint.tensors.items() if n.startswith(prefix)}


def _description(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
