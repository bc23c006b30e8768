"""From a scored rollout to the sequences of an update, and from those to micro-batches of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.nn.utils.rnn import pad_sequence

from rlk_rollout.records import Completion, Rollout
from rlk_rollout.tokens import TokenBatch, plan_micro_batches
from rlk_train.advantages import rollout_advantages
from rlk_train.contract import TrainConfig

# Rounding sets the two log-probs of an untruncated token apart by less than this.
_NEGLIGIBLE_BIAS = 1e-5


@dataclass(frozen=True)
class Sample:
    """One completion that takes part in an update.

    Attributes:
        completion: what the engine drew.
        advantage: of the whole sequence.
        rollout_logps: the engine's log-probs under the distribution that the trainer also uses.
    """

    completion: Completion
    advantage: float
    rollout_logps: tuple[float, ...]

    @property
    def length(self) -> int:
        """Tokens of the prompt and the completion together."""
        return len(self.completion.prompt_ids) + len(self.completion.token_ids)


@dataclass(frozen=True)
class Selection:
    """The sequences of an update.

    Attributes:
        samples: in rollout order; failed completions, and truncated ones where those are masked, are gone.
        temperature: at which they were drawn.
        use_support: whether log-probs are under the recorded support.
        has_reference: whether every sample carries the reference's log-probs.
        metrics: of the advantages, the groups and the truncation bias.
    """

    samples: tuple[Sample, ...]
    temperature: float
    use_support: bool
    has_reference: bool
    metrics: Mapping[str, float]

    @cached_property
    def completion_lengths(self) -> tuple[int, ...]:
        """Completion tokens of each sample."""
        return tuple(len(sample.completion.token_ids) for sample in self.samples)


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward. B sequences, T completion columns; slots outside the completion mask hold 0.

    Attributes:
        tokens: token ids, masks and support.
        advantages: (B,) one a sequence.
        rollout_logps: (B, T) as the engine reported them.
        ref_logps: (B, T) of the frozen reference, or None.
        old_logps: (B, T) of the policy at the start of the update, or None where that is the policy itself.
    """

    tokens: TokenBatch
    advantages: torch.Tensor
    rollout_logps: torch.Tensor
    ref_logps: torch.Tensor | None
    old_logps: torch.Tensor | None


def select_samples(rollout: Rollout, config: TrainConfig) -> Selection:
    """The rollout's sequences with their advantages, checked.

    Args:
        rollout: scored; see `rlk_score.attach`.
        config: advantages, truncation and masking options.

    Raises:
        ValueError: no scores, log-probs that are absent, short or not finite, a temperature that is not positive,
            truncated sampling without what `truncated_policy` needs, or a KL penalty without the reference's log-probs.
    """
    temperature = float(rollout.sampling.temperature)
    if not temperature > 0:
        raise ValueError(
            f"the rollout was drawn at temperature {temperature}: greedy completions have no sampling distribution to "
            "train under; draw the training rollout at a temperature above 0"
        )
    truncates = rollout.sampling.truncates
    temperature_only = truncates and config.truncated_policy == "temperature_only"
    advantages = rollout_advantages(
        rollout, scale=config.advantage_scale, ddof=config.advantage_ddof, eps=config.advantage_eps
    )
    samples = []
    for place, (completion, advantage) in enumerate(zip(rollout.completions, advantages.values)):
        if advantage is None or not completion.token_ids or (config.mask_truncated and _cut_short(completion)):
            continue
        _check_completion(place, completion, truncates, config)
        logps = completion.temperature_logps if temperature_only else completion.logps
        samples.append(Sample(completion, advantage, tuple(logps)))
    has_reference = _has_reference(samples, config.objective.kl_coef > 0)
    metrics = {**advantages.metrics, **(_truncation_bias(samples) if temperature_only else {})}
    return Selection(tuple(samples), temperature, not temperature_only, has_reference, metrics)


def pack_micro_batches(
    selection: Selection,
    chosen: Sequence[int],
    token_budget: int,
) -> list[list[int]]:
    """The chosen samples' indices, cut into micro-batches of at most `token_budget` padded tokens."""
    plan = plan_micro_batches([selection.samples[i].length for i in chosen], token_budget)
    return [[chosen[i] for i in rows] for rows in plan]


def build_micro_batch(
    selection: Selection,
    chosen: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    old_logps: Sequence[torch.Tensor] | None = None,
) -> MicroBatch:
    """The tensors of the chosen samples.

    Args:
        selection: what :func:`select_samples` gave.
        chosen: indices into its samples.
        dtype: of the float columns: float64 for a float64 policy, else fp32.
        device: where the policy is.
        old_logps: per sample of the selection, (T_i,) log-probs at the start of the update.
    """
    samples = [selection.samples[i] for i in chosen]
    tokens = TokenBatch.from_completions([s.completion for s in samples])
    if not selection.use_support:
        tokens = replace(tokens, support=None)
    references = (
        [s.completion.scores.ref_logps for s in samples if s.completion.scores] if selection.has_reference else []
    )
    return MicroBatch(
        tokens=tokens.to(device),
        advantages=torch.tensor([s.advantage for s in samples], dtype=dtype, device=device),
        rollout_logps=_columns([s.rollout_logps for s in samples], dtype, device),
        ref_logps=_columns(references, dtype, device) if selection.has_reference else None,
        old_logps=None if old_logps is None else pad_sequence([old_logps[i] for i in chosen], batch_first=True),
    )


def _columns(rows: Sequence[Sequence[float] | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    filled = [row or () for row in rows]
    width = max(map(len, filled))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in filled], dtype=dtype, device=device)


def _cut_short(completion: Completion) -> bool:
    return completion.finish_reason == "length"


def _check_completion(place: int, completion: Completion, truncates: bool, config: TrainConfig) -> None:
    wanted = len(completion.token_ids)
    references = completion.scores.ref_logps if completion.scores is not None else None
    if references is not None and len(references) != wanted:
        raise ValueError(f"completion {place}: {wanted} tokens but {len(references)} scores.ref_logps; give one each")
    columns = {"logps": completion.logps, "scores.ref_logps": references or ()}
    for name, values in columns.items():
        if not math.isfinite(sum(values)):
            raise ValueError(f"completion {place}: {name} holds a value that is not finite")
    if truncates:
        _check_support(place, completion, config.truncated_policy)


def _check_support(place: int, completion: Completion, policy: str) -> None:
    if policy == "refuse":
        raise ValueError(
            "the rollout was drawn with top-k, top-p or min-p and truncated_policy='refuse'; sample untruncated, "
            "or choose 'replay' (log-probs under the recorded support) or 'temperature_only' (biased, and reported)"
        )
    if policy == "replay" and completion.support is None and _largest_bias([completion]) > _NEGLIGIBLE_BIAS:
        raise ValueError(
            f"completion {place} was drawn with top-k, top-p or min-p but records no support to replay; let the engine "
            "record it, sample without truncation, or choose truncated_policy='temperature_only' (biased, and reported)"
        )


def _has_reference(samples: Sequence[Sample], needed: bool) -> bool:
    have = [s.completion.scores is not None and s.completion.scores.ref_logps is not None for s in samples]
    if needed and not all(have):
        raise ValueError(
            f"objective.kl_coef > 0 needs the reference's log-probs, and {have.count(False)} of {len(have)} "
            "completions have none; score the rollout with a reference (rlk_score.attach(..., reference=...)) or set "
            "kl_coef=0"
        )
    return bool(have) and all(have)


def _biases(completions: Iterable[Completion]) -> list[float]:
    """Per token, the processed minus the temperature-only log-prob: -log of the probability that truncation kept."""
    return [p - t for c in completions for p, t in zip(c.logps, c.temperature_logps)]


def _largest_bias(completions: Iterable[Completion]) -> float:
    return max(map(abs, _biases(completions)), default=0.0)


def _truncation_bias(samples: Sequence[Sample]) -> dict[str, float]:
    biases = _biases(sample.completion for sample in samples)
    mean = sum(biases) / len(biases) if biases else 0.0
    return {"truncation/bias_mean": mean, "truncation/bias_max": max(biases, default=0.0)}
