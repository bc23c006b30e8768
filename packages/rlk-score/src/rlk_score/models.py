"""What can be scored with: the trainable policy, a frozen reference, a reward model."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rlk_rollout.causal_lm import completion_logps
from rlk_rollout.tokens import TokenBatch


class ModelOutput(NamedTuple):
    """A model's answer in one shape, whatever class its forward returns.

    Attributes:
        logps: (B, T) log-probs of the completion tokens; 0 where the batch's completion mask is False.
        entropy: (B, T) entropies, or None where they were not asked for.
    """

    logps: Tensor
    entropy: Tensor | None


@runtime_checkable
class ScoringModel(Protocol):
    """Anything that gives the log-probs of a batch's completions; a trainer's policy is one.

    The returned object has the attributes of :class:`ModelOutput`.
    """

    @property
    def module(self) -> nn.Module:
        """The module whose train or eval state and device matter."""
        ...

    def __call__(self, batch: TokenBatch, *, temperature: float, entropy: bool) -> Any:
        """Log-probs (and entropies) of the completion tokens, each (B, T)."""
        ...


class ReferenceModel:
    """A frozen causal language model as a scorer.

    The module is used as it is: where the policy trains the same module, freeze a copy with :meth:`frozen_copy`.

    Args:
        module: a causal LM of Transformers, or one of the same form.
        use_support: score truncated samples under their recorded support, as the rollout engine did.
    """

    def __init__(self, module: nn.Module, *, use_support: bool = True) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        self._module = module
        self.use_support = use_support

    @classmethod
    def frozen_copy(cls, module: nn.Module, *, use_support: bool = True) -> ReferenceModel:
        """A reference that later training of `module` does not move; costs a second set of weights."""
        return cls(copy.deepcopy(module).requires_grad_(False).eval(), use_support=use_support)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._module

    def __call__(self, batch: TokenBatch, *, temperature: float, entropy: bool) -> ModelOutput:
        """One full-sequence forward without a KV cache; see :class:`ModelOutput` for the shapes."""
        outputs = completion_logps(
            self._module, batch, temperature=temperature, entropy=entropy, use_support=self.use_support
        )
        return ModelOutput(*outputs)


class SequenceRewardModel:
    """A sequence-classification model with one label as a reward: the head's value at a sequence's last token.

    The head is read at the last real token of prompt + completion, found by the batch's mask and not by a padding id,
    which a completion may hold itself.

    Args:
        module: a `*ForSequenceClassification` of Transformers with one label and a `score` head over hidden states.

    Raises:
        TypeError: the module has no such head.
        ValueError: the head has more than one label.
    """

    def __init__(self, module: nn.Module) -> None:
        head = getattr(module, "score", None)
        if not isinstance(head, nn.Module) or not hasattr(module, "base_model"):
            raise TypeError(
                f"{type(module).__name__} has no `score` head over a `base_model`; expected a causal model's "
                "ForSequenceClassification (an encoder's pooled head is not supported)"
            )
        labels = getattr(head, "out_features", None)
        if labels != 1:
            raise ValueError(f"the reward head has {labels} labels, expected 1")
        self._module = module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._module

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Rewards of a batch.

        Returns:
            (B,) fp32.
        """
        body: Any = self._module.base_model
        hidden = body(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        )[0]
        columns = torch.arange(hidden.shape[1], device=hidden.device)
        last = torch.where(batch.attention_mask, columns, -1).amax(dim=1)
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        score: Any = self._module.score
        return score(hidden[rows, last])[:, 0].float()
