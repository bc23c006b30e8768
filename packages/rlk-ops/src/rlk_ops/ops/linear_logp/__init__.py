"""`linear_logp`: the log-prob of the chosen token from hidden states and the head, without logits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_count, check_device, check_floating, check_same, check_shape
from rlk_ops.ops.linear_logp.chunked import chunked_log_prob
from rlk_ops.ops.logits import (
    ActiveRows,
    check_positive_temperatures,
    check_token_ids,
    check_transform,
    log_prob_and_entropy,
)
from rlk_ops.ops.precision import ieee_matmul, wide
from rlk_ops.registry import Unsupported, op
from rlk_ops.testing.case import Case, ErrorCase

DEFAULT_BUDGET = 1 << 30


def _check(
    *, hidden: Any, weight: Any, token_ids: Any, bias: Any, mask: Any, ignore_index: int, **options: Any
) -> None:
    check_floating("hidden", hidden, "(*, H)", min_ndim=1)
    check_floating("weight", weight, "(V, H)", ndim=2)
    check_same("weight", weight, "hidden", hidden)
    check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]), "(V, H)")
    if bias is not None:
        check_floating("bias", bias, "(V,)", ndim=1)
        check_same("bias", bias, "hidden", hidden)
        check_shape("bias", bias, (weight.shape[0],), "(V,)")
    lead, vocabulary, validate = hidden.shape[:-1], weight.shape[0], options["validate"]
    names = ("temperature", "logit_scale", "softcap", "vocab_size", "support")
    check_transform(lead, vocabulary, hidden, **{name: options[name] for name in names})
    limit = options["vocab_size"] or vocabulary
    check_token_ids(token_ids, lead, limit, mask=mask, ignore_index=ignore_index, validate=validate)
    check_device("token_ids", token_ids, "hidden", hidden)
    if validate:
        check_positive_temperatures(options["temperature"], token_ids, mask, ignore_index)
    if options["memory_budget"] is not None:
        check_count("memory_budget", options["memory_budget"])
    if options["process_group"] is not None:
        why = "a vocabulary sharded over a process group is not in this version; gather the head's weight first"
        raise Unsupported("linear_logp", {"process_group": why})


@op(
    check=_check,
    differentiable=("hidden", "weight", "bias"),
    rows=("hidden", "token_ids", "mask", "temperature", "support"),
    masked=("hidden", "token_ids", "temperature"),
)
def linear_logp(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    support: Tensor | None = None,
    return_entropy: bool = False,
    validate: bool = True,
    process_group: Any = None,
    memory_budget: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-prob of each chosen token, `log_softmax(transform(hidden @ weight.T + bias))[token_ids]`.

    This reference makes the (N, V) logits; the implementation `chunked`, which CPUs and unsupported GPUs run, does not.

    Args:
        hidden: (*, H) hidden states, any float dtype and strides.
        weight: (V, H) of the head, of the same dtype.
        token_ids: (*) ids; position t of `hidden` predicts `token_ids[t]` (the caller shifts).
        bias: (V,) of the head.
        mask: (*) bool or 0/1, True = counts. A masked slot may hold anything and gives 0 with gradient 0.
        temperature: above 0; one number, or (*) one per row.
        logit_scale: factor above 0 on the raw logits.
        softcap: cap of `cap * tanh(x / cap)`.
        ignore_index: rows with this id count as masked.
        vocab_size: columns at or past it count as -inf (a padded head).
        support: bool (*, V), or kept ids (*, K) padded with -1; columns outside count as -inf.
        return_entropy: return `(logps, entropy)`, the entropy in nats of the same distribution.
        validate: check ids and temperatures at the cost of a synchronisation on an accelerator.
        process_group: refused in this version: gather a sharded head first.
        memory_budget: bytes of intermediate logits at once; None means 1 GiB. It bounds the implementations that tile;
            this naive form makes all logits whatever it says.

    Returns:
        (*) fp32 (float64 for float64 inputs), or a pair of such.

    Raises:
        TypeError, ValueError: an argument of the wrong dtype, shape, device or range; names the argument.
        Unsupported: `process_group` is given.

    Numerics:
        Products and reductions in fp32 (IEEE, never TF32), float64 for float64. A row whose logits are -inf everywhere,
        or hold NaN or +inf, is NaN alone.

    Gradients:
        To `hidden`, `weight` and `bias`, from log-probs and entropy, in their dtypes; masked rows give 0. Weight
        gradients accumulate in fp32 and are rounded once.
    """
    rows = ActiveRows.of(
        token_ids, mask, ignore_index, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        vocab_size=vocab_size, support=support,
    )  # fmt: skip
    raw = ieee_matmul(wide(rows.gather(hidden)), wide(weight).t())
    raw = raw if bias is None else raw + wide(bias)
    logps, entropies = log_prob_and_entropy(rows.transform.apply(raw), rows.token_ids, return_entropy)
    if entropies is None:
        return rows.scatter(logps)
    return rows.scatter(logps), rows.scatter(entropies)


@linear_logp.impl("chunked")
def linear_logp_chunked(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    support: Tensor | None = None,
    return_entropy: bool = False,
    validate: bool = True,
    memory_budget: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Eager PyTorch in tiles of the logits: bounded memory, any device; see :func:`linear_logp`."""
    rows = ActiveRows.of(
        token_ids, mask, ignore_index, temperature=temperature, logit_scale=logit_scale, softcap=softcap,
        vocab_size=vocab_size, support=support,
    )  # fmt: skip
    logps, entropies = chunked_log_prob(
        rows.gather(hidden), weight, bias, rows, entropy=return_entropy, budget=memory_budget or DEFAULT_BUDGET
    )
    if entropies is None:
        return rows.scatter(logps)
    return rows.scatter(logps), rows.scatter(entropies)


def _build(shape: tuple[int, ...], vocabulary: int, width: int, *, with_bias: bool = False, **options: Any) -> Any:
    def build(generator: torch.Generator) -> Mapping[str, Any]:
        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        built: dict[str, Any] = {
            "hidden": random(*shape, width),
            "weight": random(vocabulary, width) * width**-0.5,
            "token_ids": torch.randint(0, vocabulary, shape, generator=generator),
        }
        if with_bias:
            built["bias"] = random(vocabulary)
        return {
            **built,
            **{name: value(built, generator) if callable(value) else value for name, value in options.items()},
        }

    return build


def _support(built: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    ids = built["token_ids"]
    kept = torch.rand(*ids.shape, built["weight"].shape[0], generator=generator) < 0.4
    return kept.scatter(-1, ids[..., None], True)


def _support_ids(built: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    ids = built["token_ids"]
    order = torch.rand(*ids.shape, built["weight"].shape[0], generator=generator).argsort(-1)[..., :5]
    order[..., 2] = ids
    order[..., 4] = -1
    return order


def _mask(built: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    return torch.rand(*built["token_ids"].shape, generator=generator) < 0.6


def _temperatures(built: Mapping[str, Any], generator: torch.Generator) -> Tensor:
    return 0.5 + torch.rand(*built["token_ids"].shape, generator=generator, dtype=torch.float64)


def _extreme(generator: torch.Generator) -> Mapping[str, Any]:
    built = dict(_build((5,), 300, 8, with_bias=True)(generator))
    built["bias"][:256] = -torch.inf  # whole tiles, the first one among them
    built["token_ids"][:3] = torch.tensor([299, 260, 3])  # the last of these has a banned target
    built["hidden"][3, 0] = torch.nan
    return built


def _strided(generator: torch.Generator) -> Mapping[str, Any]:
    built = dict(_build((6,), 40, 16)(generator))
    built["weight"] = built["weight"].t().contiguous().t()
    built["hidden"] = built["hidden"].repeat_interleave(2, 0)[::2]
    return built


@linear_logp.cases
def cases() -> Iterator[Case]:
    """Cases of the gold path."""
    smooth = frozenset({"gradcheck"})
    yield Case("realistic", _build((2, 16), 1024, 64))
    yield Case("ragged", _build((3, 7), 257, 33, mask=_mask))
    yield Case("small_budget", _build((19,), 301, 12, memory_budget=5000, return_entropy=True))
    yield Case("extreme", _extreme, frozenset({"extreme"}))
    yield Case("strided", _strided)
    yield Case("empty", _build((0,), 11, 4), frozenset({"empty"}))
    yield Case("tiny", _build((3,), 5, 4), smooth)
    yield Case("bias_entropy", _build((3,), 7, 4, with_bias=True, return_entropy=True), smooth)
    yield Case("scale_softcap", _build((3,), 7, 4, logit_scale=1.7, softcap=2.0, return_entropy=True), smooth)
    yield Case("temperature", _build((2, 2), 7, 4, temperature=0.6), smooth)
    yield Case("temperature_per_row", _build((2, 3), 7, 4, temperature=_temperatures, return_entropy=True), smooth)
    yield Case("support", _build((2, 3), 9, 4, support=_support, return_entropy=True), smooth)
    yield Case("support_ids", _build((2, 3), 9, 4, support=_support_ids), smooth)
    yield Case("masked", _build((2, 3), 9, 4, mask=_mask, return_entropy=True), smooth)
    yield Case("masked_temperature_per_row", _build((2, 3), 9, 4, mask=_mask, temperature=_temperatures))
    yield Case("tiled", _build((4,), 9, 4, with_bias=True, return_entropy=True, memory_budget=100), smooth)
    for name, shape in {
        "qwen3_8b": ((8192,), 151936, 4096),
        "qwen3_30b_a3b": ((16384,), 151936, 2048),
        "llama3_8b": ((8192,), 128256, 4096),
    }.items():
        yield Case(name, _build(*shape), frozenset({"bench"}))


@linear_logp.errors
def errors() -> Iterator[ErrorCase]:
    """Calls that must raise."""
    plain = _build((3,), 5, 4)

    def wrong(name: str, value: Any, error: type[Exception], match: str, number: int = 0) -> ErrorCase:
        return ErrorCase(f"{name}_{number}", lambda g: {**plain(g), name: value}, error, match)

    yield wrong("hidden", torch.zeros(3, 4, dtype=torch.int64), TypeError, "hidden")
    yield wrong("weight", torch.zeros(5, 3, dtype=torch.float64), ValueError, "weight.*shape")
    yield wrong("weight", torch.zeros(5, 4, dtype=torch.float16), TypeError, "weight", 1)
    yield wrong("bias", torch.zeros(4, dtype=torch.float64), ValueError, "bias")
    yield wrong("token_ids", torch.tensor([0, 5, 1]), ValueError, r"token_ids.*\[0, 5\)")
    yield wrong("token_ids", torch.zeros(2, dtype=torch.int64), ValueError, "token_ids", 1)
    yield wrong("mask", torch.ones(2), ValueError, "mask")
    yield wrong("temperature", -1.0, ValueError, "temperature")
    yield wrong("softcap", -1.0, ValueError, "softcap")
    yield wrong("logit_scale", 0.0, ValueError, "logit_scale")
    yield wrong("vocab_size", 0, ValueError, "vocab_size")
    yield wrong("memory_budget", 0, ValueError, "memory_budget")
    yield wrong("process_group", object(), Unsupported, "gather the head")
