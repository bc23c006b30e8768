"""The stateless executor: one full-sequence forward per micro-batch, no KV cache, nothing kept between calls."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlk_rollout.records import Rollout
from rlk_rollout.tokens import TokenBatch
from rlk_score.batch import over_micro_batches
from rlk_score.models import ScoringModel


@dataclass(frozen=True)
class ScoreConfig:
    """How to score.

    Attributes:
        micro_batch_tokens: padded tokens (prompts and completions) of one forward; a longer sequence goes alone.
        temperature: of the scored distribution; None takes the rollout's own, as the policy's log-probs do.
        entropy: return the entropies too.
    """

    micro_batch_tokens: int = 16384
    temperature: float | None = None
    entropy: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens: expected >= 1, got {self.micro_batch_tokens}")
        if self.temperature is not None and not self.temperature > 0:
            raise ValueError(f"temperature: expected > 0 or None, got {self.temperature}")


@dataclass(frozen=True)
class ScoreResult:
    """Scores of every completion of a rollout, in the order of `Rollout.completions`.

    Attributes:
        logps: one (T_i,) fp32 (float64 for a float64 model) CPU tensor per completion.
        entropy: the same shapes, or None where not asked for.
        metrics: seconds, tokens, tokens_per_s, micro_batches.
    """

    logps: tuple[Tensor, ...]
    entropy: tuple[Tensor, ...] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class StatelessExecutor:
    """Scores rollouts with a model in forward passes that hold no KV cache and leave nothing behind.

    Args:
        model: a :class:`ReferenceModel`, a trainer's policy, or anything of that form.
        config: see :class:`ScoreConfig`; or give its fields as keywords.
    """

    def __init__(self, model: ScoringModel, config: ScoreConfig | None = None, **options: Any) -> None:
        if not isinstance(model, ScoringModel):
            raise TypeError(f"model: expected a ReferenceModel or a policy with `module`, got {type(model).__name__}")
        if config is not None and options:
            raise TypeError(f"give a ScoreConfig or its fields, not both (got {', '.join(options)})")
        self.model = model
        self.config = config or ScoreConfig(**options)

    def score(self, rollout: Rollout) -> ScoreResult:
        """Log-probs of every completion's tokens under the model.

        Raises:
            ValueError: the rollout was sampled greedily (temperature 0) and the config states no temperature.
        """
        temperature = self._temperature(rollout)
        want_entropy = self.config.entropy

        def forward(batch: TokenBatch) -> tuple[Tensor, Tensor]:
            output = self.model(batch, temperature=temperature, entropy=want_entropy)
            return output.logps, output.entropy if want_entropy else output.logps

        completions = list(rollout.completions)
        started = time.perf_counter()
        pairs, micro_batches = over_micro_batches(self.model, completions, self.config.micro_batch_tokens, forward)
        lengths = [len(completion.token_ids) for completion in completions]
        logps = tuple(pair[0][:length] for pair, length in zip(pairs, lengths, strict=True))
        entropy = tuple(pair[1][:length] for pair, length in zip(pairs, lengths, strict=True))
        seconds = time.perf_counter() - started
        tokens = float(sum(len(c.prompt_ids) + len(c.token_ids) for c in completions))
        metrics = {
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds if seconds > 0 else 0.0,
            "micro_batches": float(micro_batches),
        }
        return ScoreResult(logps, entropy if want_entropy else None, metrics)

    def _temperature(self, rollout: Rollout) -> float:
        temperature = self.config.temperature
        if temperature is None:
            temperature = rollout.sampling.temperature
        if not temperature > 0:
            raise ValueError(
                "the rollout was sampled at temperature 0, which has no log-probs; state ScoreConfig(temperature=...)"
            )
        return temperature
