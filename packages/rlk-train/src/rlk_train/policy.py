"""The policy of causal language models: completion log-probs straight from hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rlk_rollout.causal_lm import completion_logps
from rlk_rollout.tokens import TokenBatch
from rlk_train.contract import PolicyOutput


class CausalLMPolicy:
    """A :class:`rlk_train.contract.Policy` over a causal language model with a decoder and an output embedding.

    The logits are never materialised. Dropout would make the ratio differ from 1 before the first step, so the model is
    put in evaluation mode; one with gradient checkpointing, which needs training mode, is refused while dropout is on.

    Args:
        model: a Transformers causal LM, or a module of the same shape (`get_decoder`, `get_output_embeddings`).

    Raises:
        ValueError: the model has dropout together with gradient checkpointing, or asks for an auxiliary router loss,
            which no objective here contains.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise ValueError(
                "the model's config has output_router_logits=True: its auxiliary router loss is not part of the "
                "objective and would be dropped; set config.output_router_logits = False"
            )
        checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
        if checkpointing:
            _refuse_dropout(model)
        self._model = model.train(checkpointing)

    @property
    def module(self) -> torch.nn.Module:
        """The model."""
        return self._model

    def __call__(self, batch: TokenBatch, *, temperature: float, entropy: bool) -> PolicyOutput:
        """Log-probs (B, T) of the batch's completion tokens, and their entropy (B, T) where asked for."""
        return PolicyOutput(*completion_logps(self._model, batch, temperature=temperature, entropy=entropy))

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        """The model's parameters, each once."""
        return self._model.parameters()

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """The model's weights by name."""
        return self._model.state_dict()


def _refuse_dropout(model: torch.nn.Module) -> None:
    for name, part in model.named_modules():
        rate = part.p if isinstance(part, torch.nn.Dropout) else getattr(part, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{name or 'the model'} has dropout {rate} and gradient checkpointing is on; set dropout to 0"
            )
