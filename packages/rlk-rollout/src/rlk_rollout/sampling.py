"""How completions are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; validated at construction.

    Attributes:
        n: completions of each prompt.
        temperature: 0 draws greedily.
        top_k: keep the k most probable tokens; None keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p; None keeps all.
        min_p: keep tokens at least this fraction as probable as the most probable one; None keeps all.
        max_tokens: the most tokens of a completion, the end token included.
        seed: each sample's own seed derives from this one, its prompt's index and its place in the group.
        stop: strings that end a completion; its text is cut before them, its tokens are kept.
        stop_token_ids: token ids that end a completion, beside the model's own.
        ignore_eos: go on past the model's end tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int = 256
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = {
            "n": (self.n >= 1, "at least 1"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "finite and at least 0"),
            "top_k": (self.top_k is None or self.top_k >= 1, "None or at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "None or in (0, 1]"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "None or in [0, 1]"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "seed": (0 <= self.seed < 2**63, "in [0, 2**63)"),
            "stop": (all(self.stop), "without an empty string"),
        }
        for name, (right, expected) in checks.items():
            if not right:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")

    @property
    def truncates(self) -> bool:
        """Whether a token can fall outside the support: top-k, a top-p below 1, or a min-p above 0 is set."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1) or bool(self.min_p)
