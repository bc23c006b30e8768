"""What a policy loss optimises: the objective, the mismatch correction, and the reduction that owns the denominator."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
CISPO_BOUNDS = ("upper", "two_sided")
MISMATCH_LEVELS = ("token", "sequence", "geometric")
MISMATCH_ACTIONS = ("truncate", "mask")
REDUCTIONS = ("default", "sequence_mean", "token_mean", "token_sum", "length_normalized")
MAX_LOG_RATIO = 80.0  # exp(80) is finite in float32, and so is its product with advantages below 1e3


@dataclass(frozen=True)
class _Member:
    """What one member of the family defaults to and uses."""

    reduction: str
    clip: tuple[float, float] | None = None
    uses: frozenset[str] = frozenset()
    per_sequence: bool = False


_CLIPPED = frozenset({"clip_low", "clip_high", "dual_clip", "delta"})
_MEMBERS = {
    "grpo": _Member("sequence_mean", (0.2, 0.2), _CLIPPED),
    "bnpo": _Member("token_mean", (0.2, 0.2), _CLIPPED),
    "dr_grpo": _Member("length_normalized", (0.2, 0.2), _CLIPPED),
    "dapo": _Member("token_mean", (0.2, 0.28), _CLIPPED),
    "gspo": _Member("sequence_mean", (3e-4, 4e-4), _CLIPPED, per_sequence=True),
    "cispo": _Member("token_mean", (0.2, 0.2), frozenset({"clip_low", "clip_high", "cispo_bound", "cispo_upper"})),
    "sapo": _Member("sequence_mean", None, frozenset({"sapo_tau"})),
    "gmpo": _Member("sequence_mean", (0.4, 0.4), _CLIPPED, per_sequence=True),
    "reinforce": _Member("token_mean"),
}
OBJECTIVES = tuple(_MEMBERS)
_SPECIFIC = ("clip_low", "clip_high", "dual_clip", "delta", "cispo_bound", "cispo_upper", "sapo_tau")


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if isinstance(value, str) and value in known:
        return
    near = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}{hint}")


def _check_number(name: str, value: object, *, above: float | None = None, least: float | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    if above is not None and not value > above:
        raise ValueError(f"{name}: expected a number above {above:g}, got {value}")
    if least is not None and not value >= least:
        raise ValueError(f"{name}: expected a number of at least {least:g}, got {value}")


@dataclass(frozen=True)
class Mismatch:
    """Correction for a rollout engine whose log-probs differ from the trainer's: `rho = exp(old - rollout)`.

    The policy term of each token is multiplied by a constant weight; the KL and entropy terms are not.

    Attributes:
        level: `token` (rho of the token), `sequence` (the product over the sequence) or `geometric` (its T-th root).
        action: `truncate` clamps rho to [lower, upper]; `mask` keeps rho inside the bounds and gives 0 outside. A
            masked token stays in the denominator.
        lower: smallest rho, or None for no bound.
        upper: largest rho, or None for no bound.
    """

    level: str = "token"
    action: str = "truncate"
    lower: float | None = None
    upper: float | None = 2.0

    def __post_init__(self) -> None:
        _check_choice("level", self.level, MISMATCH_LEVELS)
        _check_choice("action", self.action, MISMATCH_ACTIONS)
        if self.lower is None and self.upper is None:
            raise ValueError("lower and upper: both are None, so nothing would be corrected; give one, or no Mismatch")
        if self.lower is not None:
            _check_number("lower", self.lower, least=0.0)
        if self.upper is not None:
            _check_number("upper", self.upper, above=0.0 if self.lower is None else self.lower)


@dataclass(frozen=True)
class Objective:
    """A member of the policy-loss family with its options. Notation: r = exp(lp - lp_old), A the advantage.

    Attributes:
        name: `grpo` (Shao et al., 2024), `bnpo`, `dr_grpo` (Liu et al., 2025), `dapo` (Yu et al., 2025), `gspo` (Zheng
            et al., 2025), `cispo` (MiniMax-M1, 2025), `sapo` (Gao et al., 2025), `gmpo` (Zhao et al., 2025) or
            `reinforce`. It decides the per-token loss and the default reduction.
        clip_low: the ratio is clipped at 1 - clip_low (`gmpo`: the log-ratio at -clip_low). None: the objective's own
            default; :attr:`clip_range` is what holds.
        clip_high: the ratio is clipped at 1 + clip_high (`gmpo`: the log-ratio at clip_high).
        dual_clip: c > 1; for A < 0 the loss is at most -c A (Ye et al., 2020).
        delta: upper bound of the unclipped ratio, past the clip (INTELLECT-2, 2025).
        kl_coef: weight of the KL penalty towards the reference.
        kl: estimator with k = lp - lp_ref: `k1` = k, `k2` = k^2 / 2, `k3` = exp(-k) - 1 + k, `abs` = |k|.
        kl_bias_corrected: r k3 in place of k3; its gradient is r k.
        entropy_coef: weight of the entropy bonus, subtracted from the loss.
        cispo_bound: `upper` (min(r, cispo_upper)) or `two_sided` (clip(r, 1 - clip_low, 1 + clip_high)).
        cispo_upper: the bound of `upper`.
        sapo_tau: temperatures for A > 0 and for the rest.
        mismatch: correction for the rollout engine's log-probs.
        log_ratio_clamp: log-ratios are clamped to +- this before any exponential.

    Raises:
        ValueError, TypeError: an unknown name (the nearest is named), a number out of range, or an option that is set
            and that this objective does not use.
    """

    name: str = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    delta: float | None = None
    kl_coef: float = 0.0
    kl: str = "k3"
    kl_bias_corrected: bool = False
    entropy_coef: float = 0.0
    cispo_bound: str = "upper"
    cispo_upper: float = 5.0
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    mismatch: Mismatch | None = None
    log_ratio_clamp: float = 20.0

    def __post_init__(self) -> None:
        _check_choice("name", self.name, OBJECTIVES)
        self._check_penalties()
        _check_choice("cispo_bound", self.cispo_bound, CISPO_BOUNDS)
        _check_number("cispo_upper", self.cispo_upper, above=0.0)
        self._check_tau()
        self._check_use()
        self._check_bounds()

    @property
    def per_sequence(self) -> bool:
        """Whether the objective takes one advantage a sequence and weighs the sequence as a whole."""
        return _MEMBERS[self.name].per_sequence

    @property
    def clip_range(self) -> tuple[float, float]:
        """The (low, high) distances of the clip, defaults filled in; infinite where the objective does not clip."""
        low, high = _MEMBERS[self.name].clip or (math.inf, math.inf)
        if "clip_low" not in self._used():
            return math.inf, math.inf
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    def _used(self) -> frozenset[str]:
        used = _MEMBERS[self.name].uses
        if self.name != "cispo":
            return used
        return used - ({"clip_low", "clip_high"} if self.cispo_bound == "upper" else {"cispo_upper"})

    def _check_use(self) -> None:
        defaults: dict[str, Any] = {f.name: f.default for f in fields(self)}
        used = self._used()
        for option in _SPECIFIC:
            if option not in used and getattr(self, option) != defaults[option]:
                what = f"cispo with cispo_bound={self.cispo_bound!r}" if self.name == "cispo" else self.name
                raise ValueError(
                    f"{option}: {what} does not use it, got {getattr(self, option)!r}; leave it out"
                    f" ({what} uses {', '.join(o for o in _SPECIFIC if o in used) or 'none of its kind'})"
                )
        if self.kl_bias_corrected and (self.kl != "k3" or self.kl_coef == 0):
            raise ValueError(
                f"kl_bias_corrected: needs kl='k3' and kl_coef above 0, got kl={self.kl!r} and kl_coef={self.kl_coef}"
            )

    def _check_penalties(self) -> None:
        _check_number("kl_coef", self.kl_coef, least=0.0)
        _check_choice("kl", self.kl, KL_ESTIMATORS)
        if not isinstance(self.kl_bias_corrected, bool):
            raise TypeError(f"kl_bias_corrected: expected a bool, got {self.kl_bias_corrected!r}")
        _check_number("entropy_coef", self.entropy_coef)
        if self.mismatch is not None and not isinstance(self.mismatch, Mismatch):
            raise TypeError(f"mismatch: expected a Mismatch or None, got {self.mismatch!r}")
        _check_number("log_ratio_clamp", self.log_ratio_clamp, above=0.0)
        if self.log_ratio_clamp > MAX_LOG_RATIO:
            raise ValueError(f"log_ratio_clamp: expected at most {MAX_LOG_RATIO:g}, got {self.log_ratio_clamp}")

    def _check_tau(self) -> None:
        if not isinstance(self.sapo_tau, Sequence) or len(self.sapo_tau) != 2:
            raise TypeError(f"sapo_tau: expected two numbers (A > 0, the rest), got {self.sapo_tau!r}")
        for value in self.sapo_tau:
            _check_number("sapo_tau", value, above=0.0)
        object.__setattr__(self, "sapo_tau", tuple(self.sapo_tau))

    def _check_bounds(self) -> None:
        for option in ("clip_low", "clip_high"):
            if getattr(self, option) is not None:
                _check_number(option, getattr(self, option), least=0.0)
        if self.dual_clip is not None:
            _check_number("dual_clip", self.dual_clip, above=1.0)
        if self.delta is not None:
            high = self.clip_range[1]
            _check_number("delta", self.delta, above=math.exp(high) if self.name == "gmpo" else 1.0 + high)


@dataclass(frozen=True)
class Reduction:
    """From per-token losses to one number; the one owner of the denominator.

    Attributes:
        mode: `sequence_mean` (mean over the non-empty sequences of their token means), `token_mean` (over all tokens),
            `token_sum`, `length_normalized` (token sum over non-empty sequences times `max_length`), or `default`: the
            objective's own.
        denominator: what the sum is divided by, in place of this batch's own count. The trainer computes it once for
            the optimizer window (:meth:`window_denominator`); a micro-batch then returns its *share* of the window's
            loss, and shares add up however the window was cut.
        max_length: completion tokens that a sequence may have; needed by `length_normalized`.

    Raises:
        ValueError, TypeError: an unknown mode, a number out of range, or `max_length` with a mode that ignores it.
    """

    mode: str = "default"
    denominator: float | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, REDUCTIONS)
        if self.denominator is not None:
            _check_number("denominator", self.denominator, above=0.0)
        if self.max_length is not None:
            if isinstance(self.max_length, bool) or not isinstance(self.max_length, int):
                raise TypeError(f"max_length: expected an integer, got {self.max_length!r}")
            _check_number("max_length", self.max_length, least=1)
        if self.mode != "default":
            self._check_max_length(self.mode)

    def resolve(self, objective: Objective) -> str:
        """The mode, with `default` replaced by the objective's own; ValueError where `max_length` does not fit it."""
        mode = _MEMBERS[objective.name].reduction if self.mode == "default" else self.mode
        self._check_max_length(mode)
        return mode

    def window_denominator(self, objective: Objective, lengths: Sequence[int] | Tensor) -> float:
        """The denominator of an optimizer window, or of a rank's part of it: parts add up, except for `token_sum`.

        Args:
            objective: decides what `default` means.
            lengths: counted tokens of every sequence of the window: integers, a (B,) integer tensor, or a (B, T) mask.

        Returns:
            Non-empty sequences for `sequence_mean`, tokens for `token_mean`, non-empty sequences times `max_length`
            for `length_normalized`, 1 for `token_sum`. 0 for a window without tokens (1 for `token_sum`).
        """
        counts = _token_counts(lengths)
        mode = self.resolve(objective)
        if mode == "token_sum":
            return 1.0
        if mode == "token_mean":
            return float(sum(counts))
        return float(sum(count > 0 for count in counts) * (self._length() if mode == "length_normalized" else 1))

    def divisor(self, objective: Objective, lengths: Tensor) -> Tensor | float:
        """What a batch's sum is divided by: the given denominator, or the batch's own count, at least 1.

        Args:
            objective: decides what `default` means.
            lengths: (B,) counted tokens of each sequence.
        """
        mode = self.resolve(objective)
        if self.denominator is not None:
            return self.denominator
        if mode == "token_sum":
            return 1.0
        if mode == "token_mean":
            return lengths.sum().clamp_min(1)
        sequences = (lengths > 0).sum().clamp_min(1)
        return sequences * self._length() if mode == "length_normalized" else sequences

    def _length(self) -> int:
        return self.max_length or 1

    def _check_max_length(self, mode: str) -> None:
        if mode == "length_normalized" and self.max_length is None:
            raise ValueError(
                "max_length: length_normalized (the default of dr_grpo) divides by sequences times max_length; give "
                "Reduction(max_length=...), the completion tokens that a sequence may have"
            )
        if mode != "length_normalized" and self.max_length is not None:
            raise ValueError(f"max_length: {mode} does not use it, got {self.max_length}; leave it out")


def _token_counts(lengths: Sequence[int] | Tensor) -> Sequence[int]:
    if not isinstance(lengths, Tensor):
        return lengths
    if lengths.ndim == 2:
        return (lengths != 0).sum(dim=1).tolist()
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"lengths: expected (B,) integers or a (B, T) mask, got {lengths.dtype} {tuple(lengths.shape)}"
        )
    return lengths.tolist()
