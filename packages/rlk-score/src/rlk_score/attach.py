"""Attach scores to a completed rollout: rewards of every completion, and reference log-probs where asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlk_rollout.records import Rollout, Scores
from rlk_score.batch import over_micro_batches
from rlk_score.executor import StatelessExecutor
from rlk_score.models import SequenceRewardModel
from rlk_score.rewards import Outcome, Reward, resolve_reward, reward_name, run_reward

NOT_APPLICABLE = "no reward applies to this sample"


class RewardFailures(RuntimeError):
    """More samples failed to be rewarded than the caller allows.

    Attributes:
        failed: how many samples failed.
        total: of how many.
        errors: the distinct messages, the most frequent first.
        rollout: the rollout with the scores that could be had, so that nothing finished is lost.
    """

    def __init__(self, rollout: Rollout, limit: float) -> None:
        errors = [c.scores.error for c in rollout.completions if c.scores and c.scores.error]
        self.rollout, self.failed, self.total = rollout, len(errors), len(list(rollout.completions))
        self.errors = sorted(set(errors), key=lambda message: (-errors.count(message), message))
        super().__init__(
            f"{self.failed} of {self.total} samples failed to be rewarded (allowed: {limit:.0%}); "
            f"most often: {self.errors[0]}"
        )


@dataclass(frozen=True)
class _Judgement:
    """One reward's outcomes over all completions."""

    name: str
    weight: float
    outcomes: Sequence[Outcome]


def attach(
    rollout: Rollout,
    *,
    reference: StatelessExecutor | None = None,
    rewards: Mapping[str | Reward | SequenceRewardModel, float],
    timeout: float = 10.0,
    concurrency: int = 32,
    max_failed_fraction: float = 0.5,
    micro_batch_tokens: int = 16384,
) -> Rollout:
    """The same rollout with `Scores` on every completion.

    A completion's reward is the sum of weight * value over the rewards that apply to it. A sample on which a reward
    fails has reward None and the reason in `Scores.error`; so has one to which no reward applies.

    Args:
        rollout: a completed rollout.
        reference: scores the reference log-probs; None leaves them out.
        rewards: reward (built-in name, `module:function`, callable, or a :class:`SequenceRewardModel`) to weight.
        timeout: seconds for one sample of one reward function.
        concurrency: samples of an asynchronous reward under way at once.
        max_failed_fraction: with more failed samples than this fraction, :class:`RewardFailures` is raised.
        micro_batch_tokens: padded tokens of one forward of a reward model.

    Raises:
        RewardFailures: see `max_failed_fraction`; carries the scored rollout.
        ValueError: an unknown reward, no reward at all, or an option outside its range.
    """
    if not rewards:
        raise ValueError("rewards: expected at least one reward with its weight")
    if not 0.0 <= max_failed_fraction <= 1.0:
        raise ValueError(f"max_failed_fraction: expected 0 to 1, got {max_failed_fraction}")
    completions = list(rollout.completions)
    judged = [
        _judge(reward, weight, rollout, timeout, concurrency, micro_batch_tokens) for reward, weight in rewards.items()
    ]
    _refuse_twins(judged)
    scored = reference.score(rollout) if reference is not None else None
    ref_logps = [tuple(row.tolist()) for row in scored.logps] if scored else [None] * len(completions)
    scores = [_combine(judged, index, ref_logps[index]) for index in range(len(completions))]
    metrics = _metrics(judged, scores)
    if scored:
        metrics |= {f"reference/{name}": value for name, value in scored.metrics.items()}
    done = rollout.replace_scores(scores)
    done = replace(done, metrics={**done.metrics, **metrics})
    failed = sum(score.error is not None for score in scores)
    if failed > max_failed_fraction * len(scores):
        raise RewardFailures(done, max_failed_fraction)
    return done


def _judge(
    reward: Any, weight: float, rollout: Rollout, timeout: float, concurrency: int, token_budget: int
) -> _Judgement:
    if isinstance(reward, SequenceRewardModel):
        rows, _ = over_micro_batches(reward, list(rollout.completions), token_budget, reward)
        name = type(reward.module).__name__
        return _Judgement(name, weight, [Outcome(float(row)) for row in rows])
    function = resolve_reward(reward)
    items = [(completion.text, group.example) for group in rollout.groups for completion in group.completions]
    outcomes = run_reward(function, items, timeout=timeout, concurrency=concurrency)
    return _Judgement(reward_name(reward), weight, outcomes)


def _refuse_twins(judged: Sequence[_Judgement]) -> None:
    names = [judgement.name for judgement in judged]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rewards: two rewards are both named {name!r}; give one function another __name__")


def _combine(judged: Sequence[_Judgement], index: int, ref_logps: tuple[float, ...] | None) -> Scores:
    outcomes = {judgement.name: judgement.outcomes[index] for judgement in judged}
    values = {name: outcome.value for name, outcome in outcomes.items()}
    errors = [f"{name} {outcome.error}" for name, outcome in outcomes.items() if outcome.error]
    if not errors and all(value is None for value in values.values()):
        errors = [NOT_APPLICABLE]
    reward = None
    if not errors:
        weighted = ((judgement.weight, values[judgement.name]) for judgement in judged)
        reward = sum(weight * value for weight, value in weighted if value is not None)
    return Scores(reward=reward, rewards=values, ref_logps=ref_logps, error="; ".join(errors) or None)


def _metrics(judged: Sequence[_Judgement], scores: Sequence[Scores]) -> dict[str, float]:
    failed = sum(score.error is not None for score in scores)
    metrics = {"reward/failed": float(failed)}
    for judgement in judged:
        values = [outcome.value for outcome in judgement.outcomes if outcome.value is not None]
        if values:
            metrics[f"reward/{judgement.name}"] = sum(values) / len(values)
    return metrics
