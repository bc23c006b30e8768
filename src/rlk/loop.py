"""The loop: prompts, rollout, score, train, publish, install, rollout; every step leaves its numbers on disk."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rlk.config import RunConfig, load_config
from rlk.data import Example, Prompts
from rlk.errors import InputError, Interrupted, RunFailed
from rlk.files import disk_errors_named
from rlk.parts import Parts, build_parts
from rlk.progress import Progress
from rlk.run_folder import RunFolder
from rlk_ops import Unsupported
from rlk_rollout import Rollout, derive_seed
from rlk_score import RewardFailures, attach
from rlk_train import CheckpointError, TooManySkippedSteps, TrainResult
from rlk_weightsync import WeightSyncError

EVALUATION_STREAM, TRAINING_STREAM = 1, 0


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        folder: the run folder.
        steps: steps done in all.
        eval_before: mean held-out reward before the first step, None without held-out prompts.
        eval_after: after the last.
        seconds: wall time of this process's part of the run.
    """

    folder: Path
    steps: int
    eval_before: float | None
    eval_after: float | None
    seconds: float


class Loop:
    """One run, from its configuration to its last checkpoint.

    Args:
        config: see :class:`rlk.config.RunConfig`.
        folder: the run folder; made by :meth:`run`.
        resume: go on from the folder's newest checkpoint.
        changed: dotted names of the settings that a resumed run changes on purpose.
        progress: shows what happens; None is silent.
        command: how the run was started, for its record.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        resume: bool = False,
        changed: Sequence[str] = (),
        progress: Progress | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.config, self.resume, self.changed = config, resume, tuple(changed)
        self.progress = progress or Progress.silent()
        self._folder = RunFolder(folder)
        self._command = tuple(command)
        self._stop = False
        self._step = 0

    @classmethod
    def from_config(cls, path: str | Path, *, out: str | Path | None = None, **overrides: Any) -> Loop:
        """A run from a TOML file.

        Args:
            path: of the file.
            out: the run folder; None makes a fresh one under `runs/`.
            overrides: by dotted name, as `**{"loop.steps": 10}`.
        """
        from rlk.run_folder import fresh_folder

        return cls(load_config(path, overrides), Path(out) if out else fresh_folder(Path("runs")))

    def stop(self) -> None:
        """End after the step under way, with a checkpoint; safe to call from a signal handler."""
        self._stop = True

    def run(self) -> RunResult:
        """Run to the last step.

        Raises:
            InputError: something given cannot be used; nothing was written.
            Interrupted: :meth:`stop` was called; the run can be resumed.
            RunFailed: the run cannot go on; what it had is on disk.
        """
        started = time.perf_counter()
        parts = build_parts(self.config)
        with parts.publisher, disk_errors_named(lambda: f"free some space; {self._what_stands}"):
            self._open(parts)
            with self.progress.running(self.config.loop.steps, self._step):
                self._steps(parts)
            before, after = self._folder.evaluations()
        return RunResult(self._folder.path, self._step, before, after, time.perf_counter() - started)

    def _open(self, parts: Parts) -> None:
        """Begin the folder, or go back to its newest checkpoint."""
        if not self.resume:
            self._folder.create(self.config, self._command, parts)
            self._evaluate(parts)
            return
        changed = [name.removeprefix("train.") for name in self.changed if name.startswith("train.")]
        try:
            extra = parts.worker.load(self._folder.newest_checkpoint(), may_differ=("total_steps", *changed))
        except CheckpointError as error:
            raise InputError(str(error)) from error
        self._step = int(extra["loop_step"])
        if self._step > self.config.loop.steps:
            done = f"{self._folder.path} has done {self._step} steps already"
            raise InputError(f"loop.steps={self.config.loop.steps}: {done}; ask for more")
        self._folder.cut_back(self._step)
        self._folder.update_config(self.config)
        self._sync(parts)

    def _steps(self, parts: Parts) -> None:
        loop = self.config.loop
        while self._step < loop.steps:
            if self._stop:
                self._save(parts)
                raise Interrupted(f"stopped after step {self._step}; go on with: {self._how_to_resume}")
            with self._failures_named():
                metrics = self._one_step(parts)
            last = self._step == loop.steps
            if last or (loop.eval_every and self._step % loop.eval_every == 0):
                metrics["eval/reward"] = self._evaluate(parts)
            self._folder.append_metrics(metrics)
            self.progress.advance(metrics)
            if last or self._step % loop.checkpoint_every == 0:
                self._save(parts)

    def _one_step(self, parts: Parts) -> dict[str, Any]:
        seconds: dict[str, float] = {}
        with _timed(seconds, "rollout"):
            examples = self._examples(parts.train)
            seed = derive_seed(self.config.loop.seed, TRAINING_STREAM, self._step)
            rollout = parts.engine.generate(examples, replace(self.config.sampling, seed=seed))
        with _timed(seconds, "score"):
            scored = self._score(parts, rollout)
        with _timed(seconds, "train"):
            result = parts.worker.train(scored)
        self._step += 1
        with _timed(seconds, "sync"):
            self._sync(parts)
        self._folder.append_samples(self._step, scored)
        return _step_metrics(self._step, scored, result, seconds)

    def _examples(self, prompts: Prompts) -> list[Example]:
        """This step's prompts: passes over the data in an order that the seed and the pass decide."""
        count, size = len(prompts), self.config.loop.prompts_per_step
        places = range(self._step * size, (self._step + 1) * size)
        return [prompts.examples[_shuffled(count, self.config.loop.seed, at // count)[at % count]] for at in places]

    def _score(self, parts: Parts, rollout: Rollout) -> Rollout:
        reward = self.config.reward
        try:
            return attach(
                rollout,
                reference=parts.reference,
                rewards=parts.rewards,
                timeout=reward.timeout,
                max_failed_fraction=reward.max_failed_fraction,
            )
        except RewardFailures as error:
            self._folder.append_samples(self._step + 1, error.rollout)
            self._save(parts)
            raise RunFailed(f"step {self._step + 1}: {error}; mend the reward, then: {self._how_to_resume}") from error

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        """Turn what a step can die of into one line that says how to go on."""
        step = self._step + 1
        try:
            yield
        except torch.OutOfMemoryError as error:
            remedy = "lower train.micro_batch_tokens or loop.max_batch_sequences"
            raise RunFailed(f"step {step}: out of memory; {remedy}; {self._what_stands}") from error
        except (TooManySkippedSteps, ValueError, Unsupported, WeightSyncError) as error:
            raise RunFailed(f"step {step}: {error}; {self._what_stands}") from error

    @property
    def _what_stands(self) -> str:
        if self._folder.has_checkpoint:
            return f"the last checkpoint stands: {self._how_to_resume}"
        return "there is no checkpoint yet: start anew with another --out"

    @property
    def _how_to_resume(self) -> str:
        return f"rlk train --resume {self._folder.path}"

    def _sync(self, parts: Parts) -> None:
        update = parts.worker.publish(parts.publisher)
        parts.engine.install(update.ticket(0), caches="reset")
        update.wait(timeout=60)

    def _evaluate(self, parts: Parts) -> float | None:
        """Mean reward of one greedy completion for every held-out prompt."""
        if not len(parts.held_out):
            return None
        seed = derive_seed(self.config.loop.seed, EVALUATION_STREAM, self._step)
        sampling = replace(self.config.sampling, n=1, temperature=0.0, top_k=None, top_p=None, min_p=None, seed=seed)
        rollout = parts.engine.generate(parts.held_out.examples, sampling)
        scored = attach(rollout, rewards=parts.rewards, timeout=self.config.reward.timeout, max_failed_fraction=1.0)
        mean = _mean([c.scores.reward for c in scored.completions if c.scores and c.scores.reward is not None])
        self._folder.write_evaluation(self._step, scored, mean)
        self.progress.evaluated(self._step, mean)
        return mean

    def _save(self, parts: Parts) -> None:
        keep = self.config.loop.keep_checkpoints
        with self._folder.new_checkpoint(self._step, keep=keep) as path:
            parts.worker.save(path, extra={"loop_step": self._step})


def _step_metrics(step: int, scored: Rollout, result: TrainResult, seconds: Mapping[str, float]) -> dict[str, Any]:
    rewards = [c.scores.reward for c in scored.completions if c.scores and c.scores.reward is not None]
    mean = _mean(rewards)
    spread = None if mean is None else (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    rollout = {f"rollout/{name}": value for name, value in scored.metrics.items() if not name.startswith("reward/")}
    rewarded = {name: value for name, value in scored.metrics.items() if name.startswith("reward/")}
    total = sum(seconds.values())
    trained = {name: value for name, value in result.metrics.items() if name not in ("seconds", "tokens_per_s")}
    return {
        "step": step,
        "reward/mean": mean,
        "reward/std": spread,
        **rewarded,
        **trained,
        "tokens_per_s": result.metrics.get("tokens", 0.0) / total,
        "weight_version": result.weight_version,
        **rollout,
        **{f"seconds/{phase}": value for phase, value in seconds.items()},
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@lru_cache(maxsize=2)
def _shuffled(count: int, seed: int, pass_number: int) -> list[int]:
    order = list(range(count))
    random.Random(derive_seed(seed, count, pass_number)).shuffle(order)
    return order


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
