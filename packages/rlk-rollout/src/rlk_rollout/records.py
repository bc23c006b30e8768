"""The records that travel: one completion, its prompt's group, one rollout. Plain Python, no engine's own classes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from rlk_rollout.sampling import Sampling

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, stop) of a completion were drawn from the weights of this version."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True)
class Scores:
    """What scoring said of a completion.

    Attributes:
        reward: the weighted sum, or None where the sample failed or no reward applies.
        rewards: every reward by name; None where it does not apply or failed.
        ref_logps: log-probs of the tokens under the frozen reference, or None.
        error: why there is no reward.
    """

    reward: float | None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    ref_logps: tuple[float, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """One candidate.

    Attributes:
        prompt_ids: the prompt's token ids, P of them.
        token_ids: the drawn token ids, T of them, the end token included.
        text: the completion as text, special tokens and stop strings left out.
        logps: T log-probs under the processed distribution: temperature, then truncation, renormalised.
        temperature_logps: T log-probs under the temperature alone.
        support: per token the kept ids where sampling truncated, None where all were kept; None where none truncated.
        finish_reason: "stop", "length" or "abort".
        spans: which weights drew which tokens, ascending and without gaps.
        seed: of this sample's draws.
        scores: what scoring attached.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logps: tuple[float, ...]
    temperature_logps: tuple[float, ...]
    support: tuple[tuple[int, ...] | None, ...] | None
    finish_reason: str
    spans: tuple[VersionSpan, ...]
    seed: int
    scores: Scores | None = None

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish_reason={self.finish_reason!r}: expected one of {', '.join(FINISH_REASONS)}")
        for name in ("logps", "temperature_logps", "support"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.token_ids):
                raise ValueError(
                    f"{name} has {len(column)} entries for {len(self.token_ids)} tokens; expected one each"
                )
        edges = [span.start for span in self.spans] + [len(self.token_ids)]
        if not self.spans or edges[0] != 0 or [span.stop for span in self.spans] != edges[1:]:
            raise ValueError(f"spans={self.spans!r}: expected spans without gaps over {len(self.token_ids)} tokens")

    @property
    def weight_version(self) -> int:
        """The version of the weights that drew the last token."""
        return self.spans[-1].version


@dataclass(frozen=True)
class Group:
    """The completions of one prompt.

    Attributes:
        example: the prompt's record as the user gave it; {"prompt": ...} at the least.
        prompt_text: the prompt as text, chat template applied; empty where it was given as ids without a tokenizer.
        prompt_ids: its token ids.
        completions: its n samples.
    """

    example: Mapping[str, Any]
    prompt_text: str
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.completions)

    def __len__(self) -> int:
        return len(self.completions)


@dataclass(frozen=True)
class Rollout:
    """What one call of an engine gave.

    Attributes:
        groups: one per prompt, in the order of the prompts.
        sampling: how they were drawn.
        weight_version: of the engine when the call began.
        seconds: wall time by phase.
        metrics: counts and rates by name.
    """

    groups: tuple[Group, ...]
    sampling: Sampling
    weight_version: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Every completion, group by group."""
        return tuple(completion for group in self.groups for completion in group)

    def replace_scores(self, scores: Sequence[Scores | None]) -> Rollout:
        """The same rollout with these scores, one per completion in the order of :attr:`completions`."""
        if len(scores) != len(self.completions):
            raise ValueError(f"scores has {len(scores)} entries for {len(self.completions)} completions")
        rest = iter(scores)
        groups = (replace(g, completions=tuple(replace(c, scores=next(rest)) for c in g)) for g in self.groups)
        return replace(self, groups=tuple(groups))

    def to_json_lines(self) -> str:
        """One JSON object a line: the rollout's own fields first, then a line per group."""
        head = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("groups", "sampling")}
        lines: list[dict[str, Any]] = [{**head, "sampling": asdict(self.sampling)}]
        lines += [asdict(group) for group in self.groups]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    @classmethod
    def from_json_lines(cls, text: str | Iterable[str]) -> Rollout:
        """The inverse of :meth:`to_json_lines`.

        Raises:
            ValueError: a line is no JSON object of the expected form; names the line.
        """
        lines = text.splitlines() if isinstance(text, str) else list(text)
        parsed: list[Any] = []
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
                parsed.append(_group(value) if number > 1 else {**value, "sampling": Sampling(**value["sampling"])})
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"line {number}: no record of a rollout: {error}") from error
        if not parsed:
            raise ValueError("no line: expected the rollout's own fields on line 1")
        return cls(groups=tuple(parsed[1:]), **parsed[0])


def _group(value: Mapping[str, Any]) -> Group:
    completions = tuple(_completion(item) for item in value["completions"])
    return Group(value["example"], value["prompt_text"], tuple(value["prompt_ids"]), completions)


def _completion(value: Mapping[str, Any]) -> Completion:
    columns = {name: tuple(value[name]) for name in ("prompt_ids", "token_ids", "logps", "temperature_logps")}
    support, scores = value["support"], value["scores"]
    if scores is not None:
        ref_logps = scores["ref_logps"]
        scores = Scores(**{**scores, "ref_logps": None if ref_logps is None else tuple(ref_logps)})
    return Completion(
        **columns,
        text=value["text"],
        support=None if support is None else tuple(None if kept is None else tuple(kept) for kept in support),
        finish_reason=value["finish_reason"],
        spans=tuple(VersionSpan(**span) for span in value["spans"]),
        seed=value["seed"],
        scores=scores,
    )
