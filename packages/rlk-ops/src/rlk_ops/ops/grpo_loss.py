"""Policy loss from logits: `logp`, then `policy_loss`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_floating
from rlk_ops.ops.logp import logp
from rlk_ops.ops.objective import OBJECTIVES, Mismatch, Objective, Reduction
from rlk_ops.ops.policy_loss import DEFAULT_REDUCTION, GRPO, PolicyLoss, policy_loss
from rlk_ops.ops.policy_loss.cases import draw, reduction_for
from rlk_ops.ops.policy_loss.checks import check_advantages, check_objective, check_tokens
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase

POLICY_OPTIONS = ("old_logps", "ref_logps", "rollout_logps", "cu_seqlens", "objective", "reduction")
LOGP_OPTIONS = ("temperature", "logit_scale", "softcap", "ignore_index", "vocab_size", "support")


def check_policy(like_name: str, like: Tensor, mask: Tensor | None, advantages: Tensor, **options: Any) -> None:
    """Raise unless the arguments that a loss from logits or hidden states shares with `policy_loss` are right."""
    objective = options["objective"]
    check_objective(objective, options["reduction"], options["ref_logps"], options["rollout_logps"])
    check_tokens(like_name, like, {name: options[name] for name in POLICY_OPTIONS[:3]}, mask)
    check_advantages(like, advantages, options["cu_seqlens"], objective)


def _check(*, logits: Any, token_ids: Any, advantages: Any, mask: Any, validate: bool, **options: Any) -> None:
    check_floating("logits", logits, "(B, T, V)", ndim=3)
    assert logp.check is not None
    logp_options = {name: options[name] for name in LOGP_OPTIONS}
    logp.check(logits=logits, token_ids=token_ids, mask=mask, validate=validate, **logp_options)
    check_policy("logits", logits, mask, advantages, **{name: options[name] for name in POLICY_OPTIONS})


def counted(token_ids: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    """(B, T) bool: the one mask of log-probs, loss and denominators; `ignore_index` counts as masked."""
    kept = token_ids != ignore_index
    return kept if mask is None else kept & (mask != 0)


@op(
    check=_check,
    differentiable=("logits",),
    masked=("logits", "token_ids", "old_logps", "ref_logps", "rollout_logps"),
)
def grpo_loss(
    logits: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    rollout_logps: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    objective: Objective = GRPO,
    reduction: Reduction = DEFAULT_REDUCTION,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    support: Tensor | None = None,
    report_entropy: bool = False,
    inplace_backward: bool = False,
    validate: bool = True,
) -> PolicyLoss:
    """The loss of `policy_loss` from logits, for every objective of the family.

    Args:
        logits: (B, T, V) floating point; position t predicts `token_ids[t]`: the caller shifts.
        token_ids: (B, T) integers.
        advantages: as in `policy_loss`.
        old_logps: as in `policy_loss`, and so are ref_logps, rollout_logps, cu_seqlens, objective and reduction.
        ref_logps: (B, T).
        rollout_logps: (B, T).
        mask: (B, T) boolean or 0/1, True = counts. A token that is `ignore_index` counts as masked, everywhere.
        cu_seqlens: (S + 1,), requires B = 1.
        objective: which loss; an entropy bonus is computed from the logits.
        reduction: and its denominator.
        temperature: as in `logp`, and so are logit_scale, softcap, ignore_index, vocab_size, support and validate.
        logit_scale: above 0.
        softcap: or None.
        ignore_index: the token id of slots that do not count.
        vocab_size: columns at or past it count as -inf.
        support: columns outside count as -inf.
        report_entropy: the metric `entropy` also where the objective has no entropy bonus; costs a pass over V.
        inplace_backward: as in `logp`: the backward overwrites the logits.
        validate: check token ids.

    Returns:
        PolicyLoss(loss, metrics) as `policy_loss`.

    Raises:
        ValueError, TypeError: as `logp` and `policy_loss`; the message names the argument.

    Numerics:
        Log-probs as `logp`, loss as `policy_loss`: float32, or float64 for float64 logits.

    Gradients:
        logits, of their dtype; 0 at masked slots.
    """
    return _compose(logp.reference, policy_loss.reference, dict(locals()))


@grpo_loss.impl("composed", invariant=True)
def _composed(logits: Tensor, token_ids: Tensor, advantages: Tensor, **options: Any) -> PolicyLoss:
    """The implementations that the dispatcher chooses for `logp` and `policy_loss`."""
    return _compose(logp, policy_loss, {"logits": logits, "token_ids": token_ids, "advantages": advantages, **options})


def _compose(logp_of: Callable[..., Any], loss_of: Callable[..., PolicyLoss], given: Mapping[str, Any]) -> PolicyLoss:
    options = {name: given[name] for name in (*LOGP_OPTIONS, "inplace_backward")}
    return loss_of_logps(partial(logp_of, given["logits"], given["token_ids"], **options), loss_of, given)


def loss_of_logps(
    logps_of: Callable[..., Any], loss_of: Callable[..., PolicyLoss], given: Mapping[str, Any]
) -> PolicyLoss:
    """`policy_loss` of what `logps_of(mask=, return_entropy=, validate=)` returns; `given` are the call's arguments.

    The ids were checked before, so they are not again.
    """
    kept = counted(given["token_ids"], given["mask"], given["ignore_index"])
    wanted = given["report_entropy"] or given["objective"].entropy_coef != 0
    result = logps_of(mask=kept, return_entropy=wanted, validate=False)
    logps, entropy = result if wanted else (result, None)
    options = {name: given[name] for name in POLICY_OPTIONS}
    return loss_of(logps, given["advantages"], mask=kept, entropy=entropy, **options)


def policy_arguments(batch: int, width: int, vocabulary: int, generator: torch.Generator) -> dict[str, Any]:
    """Arguments of a case beside logits or hidden states: ids (bad where masked), log-probs near uniform."""
    call = draw(batch, width)(generator)
    ids = torch.randint(0, vocabulary, (batch, width), generator=generator)
    shift = float(torch.tensor(float(vocabulary)).log())
    logps = {name: call[name] - call["logps"] - shift for name in ("old_logps", "ref_logps", "rollout_logps")}
    return {
        "token_ids": ids.masked_fill(~call["mask"], -1),
        "advantages": call["advantages"],
        "mask": call["mask"],
        **logps,
    }


def _draw(batch: int, width: int, vocabulary: int, **options: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        shared = policy_arguments(batch, width, vocabulary, generator)
        logits = 0.3 * torch.randn(batch, width, vocabulary, generator=generator, dtype=torch.float64)
        return {"logits": logits.masked_fill(~shared["mask"][..., None], torch.nan), **shared, **options}

    return build


def _banned(generator: torch.Generator) -> dict[str, Any]:
    """-inf logits beside the target, an ignored token, logits far apart."""
    call = _draw(3, 7, 11)(generator)
    call["logits"][0] *= 100
    banned = torch.rand(3, 7, 11, generator=generator) < 0.4
    banned.scatter_(2, call["token_ids"].clamp_min(0)[..., None], False)
    call["logits"] = call["logits"].masked_fill(banned, -torch.inf)
    call["token_ids"][1, 0] = -100
    return call


def _strided(generator: torch.Generator) -> dict[str, Any]:
    call = _draw(4, 6, 12)(generator)
    logits = torch.randn(6, 24, 4, generator=generator, dtype=torch.float64)[:, ::2].permute(2, 0, 1)
    return {**call, "logits": logits}


def _small(**options: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        call = _draw(2, 3, 4)(generator)
        kept = {name: value.nan_to_num(nan=-1.3) for name, value in call.items() if name.endswith("logps")}
        logits = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
        return {**call, **kept, "logits": logits, "token_ids": call["token_ids"].clamp_min(0), **options}

    return build


@grpo_loss.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _draw(4, 48, 512))
    yield Case("ragged", _draw(5, 13, 37))
    yield Case("extreme", _banned)
    yield Case("strided", _strided)
    yield Case("empty", _draw(2, 0, 7), frozenset({"empty"}))
    yield Case("no_old_logps", lambda generator: {**_draw(3, 5, 9)(generator), "old_logps": None})
    transforms = {"temperature": 0.7, "logit_scale": 1.5, "softcap": 4.0, "vocab_size": 31}
    yield Case("transforms", lambda g: {**_draw(3, 9, 33)(g), **_inside(31, g, 3, 9), **transforms})
    yield Case("entropy", _draw(3, 9, 33, objective=Objective("dapo", entropy_coef=0.01), report_entropy=True))
    correction = Objective("grpo", kl_coef=0.1, mismatch=Mismatch("sequence", "mask", lower=0.5))
    yield Case("mismatch", _draw(3, 9, 33, objective=correction))
    for name in OBJECTIVES:
        options: dict[str, Any] = {"objective": Objective(name), "reduction": reduction_for(name)}
        yield Case(name, _draw(3, 9, 33, **options))
        if name != "cispo":  # its weight is behind a stop-gradient, which finite differences do not see
            yield Case(f"small_{name}", _small(**options), frozenset({"gradcheck"}))
    yield Case("qwen3", _draw(4, 2048, 151936), frozenset({"bench"}))


def _inside(vocab_size: int, generator: torch.Generator, *shape: int) -> dict[str, Any]:
    return {"token_ids": torch.randint(0, vocab_size, shape, generator=generator)}


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_small()(generator), **changes}


@grpo_loss.errors
def _errors() -> Iterator[ErrorCase]:
    wide = torch.zeros(2, 3, dtype=torch.float64)
    yield ErrorCase("logits_rank", _wrong(logits=wide), ValueError, r"^logits:")
    yield ErrorCase("id_out_of_range", _wrong(token_ids=torch.full((2, 3), 4), mask=None), ValueError, r"^token_ids:")
    yield ErrorCase("advantages_shape", _wrong(advantages=wide[0]), ValueError, r"^advantages:")
    yield ErrorCase("old_shape", _wrong(old_logps=wide[:, :2]), ValueError, r"^old_logps:")
    yield ErrorCase("temperature", _wrong(temperature=0.0), ValueError, r"^temperature:")
    yield ErrorCase(
        "no_reference", _wrong(ref_logps=None, objective=Objective(kl_coef=0.1)), ValueError, r"^ref_logps:"
    )
    yield ErrorCase("objective_by_name", _wrong(objective="gspo"), TypeError, r"^objective:")
