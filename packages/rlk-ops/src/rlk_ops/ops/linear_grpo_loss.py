"""Policy loss straight from hidden states: `linear_logp`, then `policy_loss`; no (N, V) logits in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_floating
from rlk_ops.ops.grpo_loss import LOGP_OPTIONS, POLICY_OPTIONS, check_policy, loss_of_logps, policy_arguments
from rlk_ops.ops.linear_logp import linear_logp
from rlk_ops.ops.objective import OBJECTIVES, Mismatch, Objective, Reduction
from rlk_ops.ops.policy_loss import DEFAULT_REDUCTION, GRPO, PolicyLoss, policy_loss
from rlk_ops.ops.policy_loss.cases import reduction_for
from rlk_ops.registry import op
from rlk_ops.testing.case import Case, ErrorCase

LINEAR_OPTIONS = (*LOGP_OPTIONS, "bias", "process_group", "memory_budget")


def _check(
    *, hidden: Any, weight: Any, token_ids: Any, advantages: Any, mask: Any, validate: bool, **options: Any
) -> None:
    check_floating("hidden", hidden, "(B, T, H)", ndim=3)
    assert linear_logp.check is not None
    linear_logp.check(
        hidden=hidden,
        weight=weight,
        token_ids=token_ids,
        mask=mask,
        validate=validate,
        return_entropy=False,
        **{name: options[name] for name in LINEAR_OPTIONS},
    )
    check_policy("hidden", hidden, mask, advantages, **{name: options[name] for name in POLICY_OPTIONS})


@op(
    check=_check,
    differentiable=("hidden", "weight", "bias"),
    masked=("hidden", "token_ids", "old_logps", "ref_logps", "rollout_logps"),
)
def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
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
    validate: bool = True,
    process_group: Any = None,
    memory_budget: int | None = None,
) -> PolicyLoss:
    """The loss of `policy_loss` from hidden states and the head's weight, for every objective of the family.

    The reference makes all logits. The implementation `composed` takes the `linear_logp` that the dispatcher chooses,
    by default one with bounded memory.

    Args:
        hidden: (B, T, H) floating point; position t predicts `token_ids[t]`: the caller shifts.
        weight: (V, H) of the head.
        token_ids: (B, T) integers.
        advantages: as in `policy_loss`.
        bias: (V,) of the head.
        old_logps: as in `policy_loss`, and so are ref_logps, rollout_logps, cu_seqlens, objective and reduction.
        ref_logps: (B, T).
        rollout_logps: (B, T).
        mask: (B, T) boolean or 0/1, True = counts. A token that is `ignore_index` counts as masked, everywhere.
        cu_seqlens: (S + 1,), requires B = 1.
        objective: which loss; an entropy bonus is computed on the way.
        reduction: and its denominator.
        temperature: as in `linear_logp`, and so are the options from here to memory_budget but for report_entropy.
        logit_scale: above 0.
        softcap: or None.
        ignore_index: the token id of slots that do not count.
        vocab_size: columns at or past it count as -inf.
        support: columns outside count as -inf.
        report_entropy: the metric `entropy` also where the objective has no entropy bonus.
        validate: check token ids.
        process_group: over which the vocabulary is sharded.
        memory_budget: bytes for logits at a time; None: 1 GiB. The reference does not keep to it.

    Returns:
        PolicyLoss(loss, metrics) as `policy_loss`.

    Raises:
        ValueError, TypeError: as `linear_logp` and `policy_loss`; the message names the argument.

    Numerics:
        Log-probs as `linear_logp`, loss as `policy_loss`: float32, or float64 for float64 inputs.

    Gradients:
        hidden, weight and bias, in any combination, of their dtypes; weight gradients accumulate in float32. Masked
        slots of hidden get 0.
    """
    return _compose(linear_logp.reference, policy_loss.reference, dict(locals()))


@linear_grpo_loss.impl("composed", invariant=True)
def _composed(hidden: Tensor, weight: Tensor, token_ids: Tensor, advantages: Tensor, **options: Any) -> PolicyLoss:
    """The implementations that the dispatcher chooses for `linear_logp` and `policy_loss`."""
    tensors = {"hidden": hidden, "weight": weight, "token_ids": token_ids, "advantages": advantages}
    return _compose(linear_logp, policy_loss, {**tensors, **options})


def _compose(logp_of: Callable[..., Any], loss_of: Callable[..., PolicyLoss], given: Mapping[str, Any]) -> PolicyLoss:
    options = {name: given[name] for name in LINEAR_OPTIONS}
    tensors = (given["hidden"], given["weight"], given["token_ids"])
    return loss_of_logps(partial(logp_of, *tensors, **options), loss_of, given)


def _draw(
    batch: int, width: int, size: int, vocabulary: int, *, bias: bool = False, **options: Any
) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        shared = policy_arguments(batch, width, vocabulary, generator)
        hidden = torch.randn(batch, width, size, generator=generator, dtype=torch.float64)
        weight = 0.3 * size**-0.5 * torch.randn(vocabulary, size, generator=generator, dtype=torch.float64)
        head = {"bias": 0.1 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)} if bias else {}
        hidden = hidden.masked_fill(~shared["mask"][..., None], torch.nan)
        return {"hidden": hidden, "weight": weight, **head, **shared, **options}

    return build


def _strided(generator: torch.Generator) -> dict[str, Any]:
    call = _draw(4, 6, 10, 23)(generator)
    hidden = torch.randn(6, 4, 20, generator=generator, dtype=torch.float64)[..., ::2].transpose(0, 1)
    weight = 0.1 * torch.randn(10, 23, generator=generator, dtype=torch.float64).T
    return {**call, "hidden": hidden, "weight": weight}


def _extreme(generator: torch.Generator) -> dict[str, Any]:
    """Hidden states of large norm: log-probs far from the recorded ones, ratios past every clip."""
    call = _draw(3, 7, 8, 19, objective=Objective(kl_coef=0.05))(generator)
    call["hidden"][0] *= 300
    call["hidden"][1] *= 1e-6
    return call


def _small(**options: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    def build(generator: torch.Generator) -> dict[str, Any]:
        call = _draw(2, 3, 2, 4, bias=True)(generator)
        kept = {name: value.nan_to_num(nan=-1.3) for name, value in call.items() if name.endswith("logps")}
        hidden = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
        return {**call, **kept, "hidden": hidden, "token_ids": call["token_ids"].clamp_min(0), **options}

    return build


@linear_grpo_loss.cases
def _cases() -> Iterator[Case]:
    yield Case("realistic", _draw(4, 32, 64, 512))
    yield Case("ragged", _draw(5, 13, 11, 37, bias=True))
    yield Case("extreme", _extreme)
    yield Case("strided", _strided)
    yield Case("empty", _draw(2, 0, 5, 7), frozenset({"empty"}))
    yield Case("no_old_logps", lambda generator: {**_draw(3, 5, 4, 9)(generator), "old_logps": None})
    transforms = {"temperature": 0.7, "logit_scale": 1.5, "softcap": 4.0}
    yield Case("transforms", _draw(3, 9, 8, 33, bias=True, **transforms))
    yield Case("entropy", _draw(3, 9, 8, 33, objective=Objective("dapo", entropy_coef=0.01), report_entropy=True))
    yield Case("memory_budget", _draw(3, 9, 8, 33, memory_budget=4096))
    correction = Objective("grpo", kl_coef=0.1, mismatch=Mismatch("sequence", "mask", lower=0.5))
    yield Case("mismatch", _draw(3, 9, 8, 33, objective=correction))
    for name in OBJECTIVES:
        options: dict[str, Any] = {"objective": Objective(name), "reduction": reduction_for(name)}
        yield Case(name, _draw(3, 9, 8, 33, **options))
        if name != "cispo":  # its weight is behind a stop-gradient, which finite differences do not see
            yield Case(f"small_{name}", _small(**options), frozenset({"gradcheck"}))
    yield Case("qwen3_8b", _draw(4, 2048, 4096, 151936), frozenset({"bench"}))


def _wrong(**changes: Any) -> Callable[[torch.Generator], dict[str, Any]]:
    return lambda generator: {**_small()(generator), **changes}


@linear_grpo_loss.errors
def _errors() -> Iterator[ErrorCase]:
    wide = torch.zeros(2, 3, dtype=torch.float64)
    yield ErrorCase("hidden_rank", _wrong(hidden=wide), ValueError, r"^hidden:")
    yield ErrorCase("weight_width", _wrong(weight=torch.zeros(4, 3, dtype=torch.float64)), ValueError, r"^weight:")
    yield ErrorCase("id_out_of_range", _wrong(token_ids=torch.full((2, 3), 4), mask=None), ValueError, r"^token_ids:")
    yield ErrorCase("advantages_shape", _wrong(advantages=wide[0]), ValueError, r"^advantages:")
    yield ErrorCase("rollout_shape", _wrong(rollout_logps=wide[:, :2]), ValueError, r"^rollout_logps:")
    yield ErrorCase("memory_budget", _wrong(memory_budget=0), ValueError, r"^memory_budget:")
    yield ErrorCase("objective_by_name", _wrong(objective="gspo"), TypeError, r"^objective:")
