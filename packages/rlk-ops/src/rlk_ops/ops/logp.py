"""`logp`: the log-prob of the chosen token from logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_device, check_floating
from rlk_ops.ops.logits import (
    ActiveRows,
    Transform,
    check_positive_temperatures,
    check_token_ids,
    check_transform,
    log_prob_and_entropy,
)
from rlk_ops.ops.precision import wide
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase

ROWS_AT_ONCE = 64  # of the in-place backward: 64 rows of a 150k vocabulary are 39 MB in fp32


def check_logp_call(
    *, logits: Any, token_ids: Any, mask: Any, ignore_index: int, validate: bool, **options: Any
) -> None:
    """Raise unless the arguments, each by name, make a call of :func:`logp`."""
    check_floating("logits", logits, "(*, V)", min_ndim=1)
    names = ("temperature", "logit_scale", "softcap", "vocab_size", "support")
    lead, vocabulary = logits.shape[:-1], logits.shape[-1]
    check_transform(lead, vocabulary, logits, **{name: options[name] for name in names})
    limit = options["vocab_size"] or vocabulary
    check_token_ids(token_ids, lead, limit, mask=mask, ignore_index=ignore_index, validate=validate)
    check_device("token_ids", token_ids, "logits", logits)
    if validate:
        check_positive_temperatures(options["temperature"], token_ids, mask, ignore_index)


@op(
    check=check_logp_call,
    differentiable=("logits",),
    rows=("logits", "token_ids", "mask", "temperature", "support"),
    masked=("logits", "token_ids", "temperature"),
)
def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    support: Tensor | None = None,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    validate: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each chosen token, `log_softmax(transform(logits))[token_ids]`; entropy on request.

    Args:
        logits: (*, V) raw logits, any float dtype and strides; -inf is legal.
        token_ids: (*) ids; position t of the logits predicts `token_ids[t]` (the caller shifts).
        mask: (*) bool or 0/1, True = counts. A masked slot may hold anything and gives 0 with gradient 0.
        temperature: above 0; one number, or (*) one per row.
        logit_scale: factor above 0 on the raw logits.
        softcap: cap of `cap * tanh(x / cap)`.
        ignore_index: rows with this id count as masked.
        vocab_size: columns at or past it count as -inf (a padded head).
        support: bool (*, V), or kept ids (*, K) padded with -1; columns outside count as -inf.
        return_entropy: return `(logps, entropy)`, the entropy in nats of the same distribution.
        inplace_backward: the backward overwrites `logits` with their gradient; the caller must not read them again.
        validate: check ids and temperatures at the cost of a synchronisation on an accelerator.

    Returns:
        (*) fp32 (float64 for float64 logits), or a pair of such.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or range; names the argument.

    Numerics:
        fp32 throughout (float64 for float64). A row that is -inf everywhere, or holds NaN or +inf, is NaN alone. A
        target at -inf has log-prob -inf.

    Gradients:
        To `logits` from log-probs and entropy; 0 where a logit is -inf, outside the support and in masked rows.
    """
    rows = ActiveRows.of(
        token_ids, mask, ignore_index, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        vocab_size=vocab_size, support=support,
    )  # fmt: skip
    if inplace_backward and logits.requires_grad and torch.is_grad_enabled():
        logps, entropies = _InPlace.apply(logits, rows, return_entropy)
    else:
        x = rows.transform.apply(wide(rows.gather(logits)))
        logps, entropies = log_prob_and_entropy(x, rows.token_ids, return_entropy)
    if entropies is None:
        return rows.scatter(logps)
    return rows.scatter(logps), rows.scatter(entropies)


class _InPlace(torch.autograd.Function):
    """The same result; the backward recomputes a few rows at a time and leaves their gradient where the logits were."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: ActiveRows, entropy: bool) -> tuple[Tensor, Tensor | None]:
        ctx.rows, ctx.entropy = rows, entropy
        ctx.save_for_backward(logits)
        x = rows.transform.apply(wide(rows.gather(logits)))
        return log_prob_and_entropy(x, rows.token_ids, entropy)

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        if not logits.is_contiguous():
            raise ValueError("inplace_backward: expected contiguous logits; pass logits.contiguous() or leave it off")
        rows: ActiveRows = ctx.rows
        flat = logits.detach().view(-1, logits.shape[-1])
        index = rows.index if rows.index is not None else torch.arange(len(flat), device=flat.device)
        for start in range(0, len(index), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            given = [None if grad is None else grad[part] for grad in upstream]
            flat[index[part]] = _row_gradient(flat[index[part]], rows, part, ctx.entropy, given).to(flat.dtype)
        if rows.index is not None:
            idle = torch.ones(len(flat), dtype=torch.bool, device=flat.device)
            idle[index] = False
            flat[idle] = 0
        return logits.detach(), None, None


def _row_gradient(raw: Tensor, rows: ActiveRows, part: slice, entropy: bool, upstream: list[Tensor | None]) -> Tensor:
    transform: Transform = rows.transform.rows(part)
    with torch.enable_grad():
        leaf = raw.detach().requires_grad_()
        outputs = log_prob_and_entropy(transform.apply(wide(leaf)), rows.token_ids[part], entropy)
        pairs = [(out, grad) for out, grad in zip(outputs, upstream) if out is not None and grad is not None]
        (gradient,) = torch.autograd.grad([out for out, _ in pairs], [leaf], [grad for _, grad in pairs])
    return gradient


def _random(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def _ids(generator: torch.Generator, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=generator)


def _plain(shape: tuple[int, ...], vocabulary: int, scale: float = 3.0, **options: Any) -> Any:
    def build(generator: torch.Generator) -> Mapping[str, Any]:
        logits = _random(generator, *shape, vocabulary, scale=scale)
        return {"logits": logits, "token_ids": _ids(generator, vocabulary, *shape), **options}

    return build


def _masked(generator: torch.Generator) -> Mapping[str, Any]:
    built = dict(_plain((3, 7), 65)(generator))
    built["mask"] = torch.rand(3, 7, generator=generator) < 0.6
    built["token_ids"][0, 0] = -100
    return built


def _banned(generator: torch.Generator) -> Mapping[str, Any]:
    built = dict(_plain((6,), 300)(generator))
    logits = built["logits"]
    logits[0, :256] = -torch.inf
    logits[1, ::2] = -torch.inf
    logits[2, built["token_ids"][2]] = -torch.inf
    logits[3] = -torch.inf
    logits[4, 5] = torch.nan
    built["token_ids"][0] = 299
    return built


def _supported(generator: torch.Generator) -> Mapping[str, Any]:
    built = dict(_plain((2, 5), 40)(generator))
    kept = torch.rand(2, 5, 40, generator=generator) < 0.3
    built["support"] = kept.scatter(-1, built["token_ids"][..., None], True)
    return built


def _supported_ids(generator: torch.Generator) -> Mapping[str, Any]:
    built = dict(_plain((2, 5), 40)(generator))
    ids = torch.rand(2, 5, 40, generator=generator).argsort(-1)[..., :6]
    ids[..., 0] = built["token_ids"]
    ids[..., 4:] = -1
    return {**built, "support": ids}


def _tempered(generator: torch.Generator) -> Mapping[str, Any]:
    built = dict(_plain((2, 5), 33)(generator))
    return {**built, "temperature": 0.5 + torch.rand(2, 5, generator=generator, dtype=torch.float64)}


def _masked_temperature(generator: torch.Generator) -> Mapping[str, Any]:
    return {**_tempered(generator), "mask": torch.rand(2, 5, generator=generator) < 0.6}


def _strided(generator: torch.Generator) -> Mapping[str, Any]:
    logits = _random(generator, 50, 2 * 6, scale=3.0).t()[::2]
    return {"logits": logits, "token_ids": _ids(generator, 50, 6, 2)[:, 0]}


@logp.cases
def cases() -> Iterator[Case]:
    """Cases of the gold path."""
    smooth = frozenset({"gradcheck"})
    yield Case("realistic", _plain((2, 16), 1024))
    yield Case("ragged", _plain((3, 7), 257))
    yield Case("one_column", _plain((4,), 1))
    yield Case("extreme", _banned, frozenset({"extreme"}))
    yield Case("huge", _plain((4,), 129, scale=1e4))
    yield Case("strided", _strided)
    yield Case("empty", _plain((0,), 17), frozenset({"empty"}))
    yield Case("masked", _masked)
    yield Case("tiny", _plain((3,), 5), smooth)
    yield Case("entropy", _plain((3,), 7, return_entropy=True), smooth)
    yield Case("scale_softcap", _plain((3,), 7, logit_scale=1.7, softcap=2.0, return_entropy=True), smooth)
    yield Case("temperature", _plain((3,), 7, temperature=0.6, return_entropy=True), smooth)
    yield Case("temperature_per_row", _tempered, smooth)
    yield Case("masked_temperature_per_row", _masked_temperature)
    yield Case("padded_head", _plain((3,), 1, vocab_size=1))
    yield Case("support", _supported, smooth)
    yield Case("support_ids", _supported_ids, smooth)
    yield Case("qwen3_8b", _plain((8192,), 151936), frozenset({"bench"}))
    yield Case("llama3_8b", _plain((8192,), 128256), frozenset({"bench"}))


@logp.errors
def errors() -> Iterator[ErrorCase]:
    """Calls that must raise."""
    plain = _plain((3,), 5)

    def wrong(name: str, value: Any, error: type[Exception], match: str) -> ErrorCase:
        return ErrorCase(f"{name}_{value}"[:40], lambda g: {**plain(g), name: value}, error, match)

    yield wrong("logits", torch.zeros(3, 5, dtype=torch.int64), TypeError, "logits")
    yield wrong("token_ids", torch.tensor([0, 5, 1]), ValueError, r"token_ids.*\[0, 5\).*5 at")
    yield wrong("token_ids", torch.tensor([0, -1, 1]), ValueError, "token_ids")
    yield wrong("token_ids", torch.zeros(2, dtype=torch.int64), ValueError, "token_ids.*shape")
    yield wrong("token_ids", torch.zeros(3), TypeError, "token_ids")
    yield wrong("mask", torch.ones(2), ValueError, "mask")
    yield wrong("temperature", 0.0, ValueError, "temperature")
    yield wrong("temperature", torch.tensor([1.0, 0.0, 1.0]), ValueError, "temperature")
    yield wrong("logit_scale", -1.0, ValueError, "logit_scale")
    yield wrong("softcap", 0.0, ValueError, "softcap")
    yield wrong("vocab_size", 6, ValueError, "vocab_size")
    yield wrong("support", torch.ones(3, 4, dtype=torch.bool), ValueError, "support")
    yield wrong("support", torch.ones(3, 4), TypeError, "support")
