"""`ratio_kl`: the policy ratio and the KL penalty of the chosen tokens, from logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_device, check_floating, check_positive, check_shape
from rlk_ops.ops.logp import check_logp_call, logp
from rlk_ops.ops.objective import KL_ESTIMATORS
from rlk_ops.ops.precision import wide_dtype
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase


def _check(*, old_logps: Any, ref_logps: Any, kl: Any, log_ratio_clamp: Any, **options: Any) -> None:
    check_logp_call(**options)
    lead = tuple(options["token_ids"].shape)
    for name, value in (("old_logps", old_logps), ("ref_logps", ref_logps)):
        check_floating(name, value, "(*)")
        check_shape(name, value, lead, "(*), the shape of token_ids")
        check_device(name, value, "logits", options["logits"])
    if kl not in KL_ESTIMATORS:
        raise ValueError(f"kl: expected one of {', '.join(KL_ESTIMATORS)}, got {kl!r}")
    check_positive("log_ratio_clamp", log_ratio_clamp)


@op(
    check=_check,
    differentiable=("logits",),
    rows=("logits", "token_ids", "old_logps", "ref_logps", "mask", "temperature", "support"),
    masked=("logits", "token_ids", "old_logps", "ref_logps", "temperature"),
)
def ratio_kl(
    logits: Tensor,
    token_ids: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    kl: str = "k3",
    log_ratio_clamp: float = 20.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    support: Tensor | None = None,
    validate: bool = True,
) -> tuple[Tensor, Tensor]:
    """Policy ratio `exp(lp - old)` and KL estimate of `lp` against `ref` per token.

    With `k = lp - ref` clamped to +-`log_ratio_clamp` as c: k1 = k, k2 = c^2 / 2, k3 = exp(-c) - 1 + c, abs = |k|
    (J. Schulman, "Approximating KL Divergence", 2020).

    Args:
        logits: (*, V) raw logits; see `logp` for them and the options not named here.
        token_ids: (*) chosen ids.
        old_logps: (*) log-probs under the policy at the start of the update.
        ref_logps: (*) log-probs under the frozen reference.
        mask: (*) bool or 0/1, True = counts; masked slots may hold anything and give 0.
        temperature: above 0; one number, or (*) one per row.
        kl: `k1`, `k2`, `k3` or `abs`.
        log_ratio_clamp: bound of both log-ratios before their exponential.
        logit_scale: factor above 0 on the raw logits.
        softcap: cap of `cap * tanh(x / cap)`.
        ignore_index: rows with this id count as masked.
        vocab_size: columns at or past it count as -inf.
        support: bool (*, V), or kept ids (*, K) padded with -1.
        validate: check ids and temperatures at the cost of a synchronisation on an accelerator.

    Returns:
        ratio (*) and kl (*), fp32, or float64 for float64 logits.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or range; names the argument.

    Numerics:
        fp32 (float64 for float64); log-ratios are clamped before the exponential, so nothing overflows.

    Gradients:
        To `logits` from ratio and kl; 0 where the clamp bites and in masked rows.
    """
    dtype = wide_dtype(logits.dtype)
    counts = token_ids != ignore_index if mask is None else mask.bool() & (token_ids != ignore_index)
    logps: Any = logp(
        logits, token_ids, mask=counts, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        ignore_index=ignore_index, vocab_size=vocab_size, support=support, validate=False,
    )  # fmt: skip
    old = torch.where(counts, old_logps.to(dtype), 0.0)
    ref = torch.where(counts, ref_logps.to(dtype), 0.0)
    ratio = torch.exp((logps - old).clamp(-log_ratio_clamp, log_ratio_clamp))
    estimate = _estimate(logps - ref, kl, log_ratio_clamp)
    return torch.where(counts, ratio, 0.0), torch.where(counts, estimate, 0.0)


def _estimate(k: Tensor, kl: str, bound: float) -> Tensor:
    if kl == "k1":
        return k
    if kl == "abs":
        return k.abs()
    c = k.clamp(-bound, bound)
    return 0.5 * c * c if kl == "k2" else torch.expm1(-c) + c


def _build(shape: tuple[int, ...], vocabulary: int, *, near: float = 0.5, **options: Any) -> Any:
    def build(generator: torch.Generator) -> Mapping[str, Any]:
        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        logits, ids = random(*shape, vocabulary) * 2, torch.randint(0, vocabulary, shape, generator=generator)
        logps = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
        mask = torch.rand(*shape, generator=generator) < 0.7 if options.get("mask") else None
        return {
            "logits": logits,
            "token_ids": ids,
            "old_logps": logps + near * random(*shape),
            "ref_logps": logps + near * random(*shape),
            **options,
            "mask": mask,
        }

    return build


@ratio_kl.cases
def cases() -> Iterator[Case]:
    """Cases of the gold path."""
    smooth = frozenset({"gradcheck"})
    yield Case("realistic", _build((4, 16), 512))
    yield Case("ragged", _build((3, 7), 257, mask=True))
    yield Case("clamped", _build((8,), 33, near=40.0))
    yield Case("empty", _build((0,), 7), frozenset({"empty"}))
    for kl in KL_ESTIMATORS:
        yield Case(kl, _build((2, 3), 7, kl=kl, mask=True), smooth)
    yield Case("options", _build((2, 3), 7, temperature=0.7, softcap=3.0, logit_scale=1.3, vocab_size=7), smooth)
    rising = torch.linspace(0.5, 1.5, 6, dtype=torch.float64).reshape(2, 3)
    yield Case("masked_temperature_per_row", _build((2, 3), 7, temperature=rising, mask=True))
    yield Case("strided", lambda g: {**_build((6,), 40)(g), "logits": _build((40,), 6)(g)["logits"].t()})
    yield Case("qwen3_8b", _build((8192,), 151936), frozenset({"bench"}))


@ratio_kl.errors
def errors() -> Iterator[ErrorCase]:
    """Calls that must raise."""
    plain = _build((3,), 5)

    def wrong(name: str, value: Any, error: type[Exception], match: str, number: int = 0) -> ErrorCase:
        return ErrorCase(f"{name}_{number}", lambda g: {**plain(g), name: value}, error, match)

    yield wrong("old_logps", torch.zeros(2), ValueError, "old_logps")
    yield wrong("ref_logps", torch.zeros(3, dtype=torch.int64), TypeError, "ref_logps")
    yield wrong("kl", "k4", ValueError, "kl: expected one of k1")
    yield wrong("log_ratio_clamp", 0.0, ValueError, "log_ratio_clamp")
    yield wrong("token_ids", torch.tensor([0, 5, 1]), ValueError, "token_ids")
    yield wrong("temperature", 0.0, ValueError, "temperature")
