"""Log-probs of completions under a causal language model: one forward, hidden states of the completions only.

The trainer's policy and the scorer's reference both come here, so that what one calls a log-prob the other does too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlk_ops import linear_logp
from rlk_rollout.tokens import TokenBatch


class Head(NamedTuple):
    """A causal LM's last projection.

    Attributes:
        weight: (V, H).
        bias: (V,) or None.
        logit_scale: factor on the logits.
        softcap: cap of `cap * tanh(logits / cap)`, or None.
    """

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None


def split(model: nn.Module) -> tuple[nn.Module, Head]:
    """A causal LM of Transformers as its body (ids to hidden states) and its head (hidden states to logits).

    Raises:
        TypeError: the model is not of that form, or its head is no plain linear layer.
    """
    lm: Any = model
    projection = lm.get_output_embeddings() if hasattr(lm, "get_output_embeddings") else None
    body = getattr(lm, getattr(lm, "base_model_prefix", "") or "model", None)
    if projection is None or not isinstance(body, nn.Module) or body is model:
        raise TypeError(f"{type(model).__name__}: expected a causal LM of Transformers with a body and an output head")
    if not isinstance(projection, nn.Linear):
        raise TypeError(f"{type(model).__name__}: its head is a {type(projection).__name__}, expected a linear layer")
    config = lm.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    return body, Head(projection.weight, projection.bias, _logit_scale(config), softcap)


def _logit_scale(config: Any) -> float:
    """The factor that the model's own forward puts on its logits, under the names that Transformers' configs use."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
    return scale * float(getattr(config, "lm_head_multiplier", None) or 1.0) / divisor  # Falcon-H1


def completion_logps(
    model: nn.Module,
    batch: TokenBatch,
    *,
    temperature: float,
    entropy: bool = False,
    use_support: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of a batch's completion tokens, differentiable, without logits in memory.

    Args:
        model: a causal LM of Transformers.
        batch: on the model's device.
        temperature: above 0.
        entropy: return the entropies too.
        use_support: take the recorded support of truncated tokens into the distribution.

    Returns:
        (B, T) log-probs and (B, T) entropies (nats) or None; fp32, or float64 for a float64 model; 0 outside the mask.
    """
    body, head = split(model)
    states = body(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    )[0]
    mask = batch.completion_mask
    rows = torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)[mask]
    hidden, token_ids = states[rows, batch.predict_at[mask]], batch.completion_ids[mask]
    support = batch.support[mask] if use_support and batch.support is not None else None
    logps, entropies = _head_logps(head, hidden, token_ids, support, temperature, entropy)
    return _scatter(logps, mask), _scatter(entropies, mask) if entropies is not None else None


def _head_logps(
    head: Head, hidden: Tensor, token_ids: Tensor, support: Tensor | None, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """(N,) log-probs and entropies of N tokens; tokens without a support row use the whole vocabulary."""

    def call(at: Tensor | slice, kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        result: Any = linear_logp(
            hidden[at],
            head.weight,
            token_ids[at],
            bias=head.bias,
            temperature=temperature,
            logit_scale=head.logit_scale,
            softcap=head.softcap,
            support=kept,
            return_entropy=entropy,
        )
        return result if entropy else (result, None)

    if support is None:
        return call(slice(None), None)
    truncated = (support >= 0).any(dim=1)
    if bool(truncated.all()):
        return call(slice(None), support)
    inside, outside = call(truncated, support[truncated]), call(~truncated, None)
    merged = [
        None if a is None or b is None else _scatter(a, truncated) + _scatter(b, ~truncated)
        for a, b in zip(inside, outside, strict=True)
    ]
    assert merged[0] is not None
    return merged[0], merged[1]


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Values into the True slots of a mask, 0 elsewhere, with gradients."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Within the block: no gradients and every submodule in eval mode (no dropout); restores each one's mode."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child in training:
            child.training = True
