"""Gold-path cases of `policy_loss`, and the calls that must raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlk_ops.ops.objective import OBJECTIVES, Mismatch, Objective, Reduction
from rlk_ops.ops.policy_loss import policy_loss
from rlk_ops.testing.case import Case, ErrorCase

Build = Callable[[torch.Generator], dict[str, Any]]
MAX_LENGTH = 64


def reduction_for(name: str) -> Reduction:
    """The default reduction with the `max_length` that `dr_grpo` needs."""
    return Reduction(max_length=MAX_LENGTH) if name == "dr_grpo" else Reduction()


def ragged_mask(batch: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """(B, T) bool: right padding of random width, a hole here and there, the last of several rows empty."""
    lengths = torch.randint(0, width + 1, (batch, 1), generator=generator)
    if batch > 2:
        lengths[-1] = 0
    return (torch.arange(width) < lengths) & (torch.rand(batch, width, generator=generator) < 0.95)


def draw(batch: int, width: int, *, spread: float = 0.3, per_token: bool = False, **options: Any) -> Build:
    """A builder of a full call: all log-probs, masked slots with NaN."""

    def build(generator: torch.Generator) -> dict[str, Any]:
        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        mask = ragged_mask(batch, width, generator)
        logps = -noise(batch, width).abs() - 0.1
        others = {f"{name}_logps": logps + spread * noise(batch, width) for name in ("old", "ref", "rollout")}
        tokens = {"logps": logps, **others, "entropy": noise(batch, width).abs()}
        advantages = noise(batch, width) if per_token else noise(batch)
        filled = {name: values.masked_fill(~mask, torch.nan) for name, values in tokens.items()}
        return {**filled, "advantages": advantages, "mask": mask, **options}

    return build


def _packed(generator: torch.Generator) -> dict[str, Any]:
    call = draw(1, 23)(generator)
    advantages = torch.randn(4, generator=generator, dtype=torch.float64)
    return {**call, "advantages": advantages, "cu_seqlens": torch.tensor([0, 5, 5, 17, 23])}


def _strided(generator: torch.Generator) -> dict[str, Any]:
    """Transposed log-probs, an expanded old log-prob, an integer mask with steps."""
    call = draw(6, 9)(generator)
    plain = draw(9, 6)(generator)["logps"].nan_to_num()
    mask = torch.randint(0, 2, (6, 18), generator=generator)[:, ::2]
    return {
        "logps": plain.T,
        "advantages": torch.randn(12, generator=generator, dtype=torch.float64)[::2],
        "old_logps": torch.full((1, 1), -0.7, dtype=torch.float64).expand(6, 9),
        "ref_logps": call["ref_logps"].nan_to_num(),
        "mask": mask,
    }


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    """Log-ratios far past the clamp, both ways, and tokens that a distribution rules out."""
    call = draw(4, 12, spread=60.0, objective=Objective(kl_coef=0.1))(generator)
    call["ref_logps"][0, 0] = -1e30
    call["logps"][1, 0] = -1e4
    return call


def _options() -> Iterator[tuple[str, Objective, Reduction]]:
    for name in OBJECTIVES:
        yield name, Objective(name), reduction_for(name)
    yield "cispo_two_sided", Objective("cispo", cispo_bound="two_sided", clip_high=0.3), Reduction()
    yield "asymmetric_clip", Objective("grpo", clip_low=0.1, clip_high=0.4), Reduction()
    yield "dual_clip", Objective("dapo", dual_clip=1.5), Reduction()
    yield "delta", Objective("gspo", clip_low=0.1, clip_high=0.1, delta=1.2), Reduction()
    yield "gmpo_bounds", Objective("gmpo", dual_clip=1.3, delta=2.0), Reduction()
    yield "sapo_tau", Objective("sapo", sapo_tau=(0.5, 2.0)), Reduction()
    for kl in ("k1", "k2", "k3", "abs"):
        yield f"kl_{kl}", Objective("grpo", kl_coef=0.2, kl=kl), Reduction()
    yield "kl_bias_corrected", Objective("dapo", kl_coef=0.2, kl_bias_corrected=True), Reduction()
    yield "entropy_bonus", Objective("reinforce", entropy_coef=0.05), Reduction()
    yield "log_ratio_clamp", Objective("grpo", log_ratio_clamp=0.25, kl_coef=0.1), Reduction()
    for level in ("token", "sequence", "geometric"):
        for action in ("truncate", "mask"):
            correction = Mismatch(level, action, lower=0.8, upper=1.2)
            yield f"mismatch_{level}_{action}", Objective("grpo", mismatch=correction, kl_coef=0.1), Reduction()
    yield "token_sum", Objective("grpo"), Reduction("token_sum")
    yield "denominator", Objective("gspo"), Reduction("token_mean", denominator=37.5)
    yield "length_normalized", Objective("gmpo"), Reduction("length_normalized", max_length=MAX_LENGTH)


def _small(objective: Objective, reduction: Reduction) -> Build:
    """Three tokens a row, no masked slot: finite differences see no NaN."""

    def build(generator: torch.Generator) -> dict[str, Any]:
        call = draw(2, 3, objective=objective, reduction=reduction)(generator)
        return {name: v.nan_to_num(nan=-0.5) if name.endswith("logps") else v for name, v in call.items()} | {
            "entropy": torch.rand(2, 3, generator=generator, dtype=torch.float64)
        }

    return build


@policy_loss.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", draw(16, 256, spread=0.05))
    yield Case("ragged", draw(7, 37))
    yield Case("per_token_advantages", draw(5, 19, per_token=True))
    yield Case("packed", _packed)
    yield Case("on_policy", lambda generator: {**draw(4, 11)(generator), "old_logps": None})
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("empty", draw(2, 0), frozenset({"empty"}))
    yield Case("no_sequence", draw(0, 5), frozenset({"empty"}))
    yield Case(
        "all_masked", lambda g: {**draw(3, 5)(g), "mask": torch.zeros(3, 5, dtype=torch.bool)}, frozenset({"empty"})
    )
    for name, objective, reduction in _options():
        yield Case(name, draw(6, 21, objective=objective, reduction=reduction))
        if objective.name != "cispo":  # its weight is behind a stop-gradient, which finite differences do not see
            yield Case(f"small_{name}", _small(objective, reduction), frozenset({"gradcheck"}))
    yield Case("rollout_1024x8192", draw(1024, 8192, spread=0.05), frozenset({"bench"}))


def _wrong(**changes: Any) -> Build:
    return lambda generator: {**draw(2, 5)(generator), **changes}


@policy_loss.errors
def _errors() -> Iterator[ErrorCase]:
    wide = torch.zeros(2, 5, dtype=torch.float64)
    yield ErrorCase("logps_rank", _wrong(logps=wide[0]), ValueError, r"^logps:")
    yield ErrorCase("integer_logps", _wrong(logps=wide.long()), TypeError, r"^logps:")
    yield ErrorCase("advantages_shape", _wrong(advantages=wide[0]), ValueError, r"^advantages:")
    yield ErrorCase("gspo_per_token", _wrong(advantages=wide, objective=Objective("gspo")), ValueError, r"^advantages:")
    yield ErrorCase("old_shape", _wrong(old_logps=wide[:, :4]), ValueError, r"^old_logps:")
    yield ErrorCase("mask_shape", _wrong(mask=wide[:1]), ValueError, r"^mask:")
    yield ErrorCase("mask_dtype", _wrong(mask=wide.to(torch.complex64)), TypeError, r"^mask:")
    yield ErrorCase("mixed_devices", _wrong(ref_logps=wide.to("meta")), ValueError, r"^ref_logps:")
    yield ErrorCase(
        "no_reference", _wrong(ref_logps=None, objective=Objective(kl_coef=0.1)), ValueError, r"^ref_logps:"
    )
    no_rollout = _wrong(rollout_logps=None, objective=Objective(mismatch=Mismatch()))
    yield ErrorCase("no_rollout", no_rollout, ValueError, r"^rollout_logps:")
    yield ErrorCase("no_entropy", _wrong(entropy=None, objective=Objective(entropy_coef=0.1)), ValueError, r"^entropy:")
    yield ErrorCase("objective_by_name", _wrong(objective="dapo"), TypeError, r"^objective:")
    yield ErrorCase("reduction_by_name", _wrong(reduction="token_mean"), TypeError, r"^reduction:")
    yield ErrorCase("no_max_length", _wrong(objective=Objective("dr_grpo")), ValueError, r"^max_length:")
    yield ErrorCase("packed_batch", _wrong(cu_seqlens=torch.tensor([0, 5])), ValueError, r"^cu_seqlens:")

    def short(generator: torch.Generator) -> dict[str, Any]:
        return {**draw(1, 5)(generator), "cu_seqlens": torch.tensor([0, 3])}

    yield ErrorCase("packed_short", short, ValueError, r"^cu_seqlens:")
