"""The synthetic RL-shaped batch, for tests and benches: ragged lengths and every log-prob that a loss can take."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.advantages import group_advantages
from rlk_ops.ops.arguments import check_count
from rlk_ops.ops.linear_logp import linear_logp
from rlk_ops.ops.logp import logp
from rlk_ops.ops.precision import wide_dtype

PER_TOKEN = ("token_ids", "logps", "old_logps", "ref_logps", "rollout_logps", "entropy", "hidden", "logits")


@dataclass(frozen=True)
class SyntheticBatch:
    """One optimizer step's worth of made-up data. P prompts, G samples each, B = P G sequences, T columns.

    Sequences are in prompt order, padded on the right. Masked slots hold NaN, and -1 for token ids, so that whatever
    reads them shows. The log-probs belong to the hidden states or logits, where those are there.

    Attributes:
        token_ids: (B, T) int64.
        mask: (B, T) bool, True = counts.
        logps: (B, T) of the policy, fp32 or float64.
        old_logps: (B, T) at the start of the update: near `logps`.
        ref_logps: (B, T) of the reference: further off.
        rollout_logps: (B, T) as an engine in lower precision reports `old_logps`.
        entropy: (B, T) in nats.
        rewards: (P, G).
        advantages: (B,) group-relative.
        hidden: (B, T, H) in the batch's dtype, or None.
        weight: (V, H) of the head, or None.
        logits: (B, T, V), or None.
        cu_seqlens: (B + 1,) of a packed batch (then the leading dimension of per-token tensors is 1), else None.
    """

    token_ids: Tensor
    mask: Tensor
    logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    rollout_logps: Tensor
    entropy: Tensor
    rewards: Tensor
    advantages: Tensor
    hidden: Tensor | None = None
    weight: Tensor | None = None
    logits: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @classmethod
    def draw(
        cls,
        prompts: int = 2,
        samples: int = 4,
        *,
        max_length: int = 16,
        min_length: int = 1,
        vocabulary: int = 64,
        hidden_size: int | None = None,
        with_logits: bool = False,
        drift: float = 0.1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> SyntheticBatch:
        """A batch that depends on nothing but these arguments: drawn in float64 on the CPU, then cast and moved.

        Args:
            prompts: P, at least 1.
            samples: G, at least 1.
            max_length: T; the first sequence has it.
            min_length: the shortest a sequence may be; 0 allows empty ones.
            vocabulary: V, at least 2.
            hidden_size: H; makes `hidden` and `weight`.
            with_logits: makes `logits`, from `hidden` where it is there.
            drift: standard deviation of `old_logps` around `logps`, in nats; the reference's is three times that, the
                engine's around `old_logps` a tenth.
            seed: of the generator.
            dtype: of hidden, weight and logits; log-probs and rewards are fp32, or float64 for float64.
            device: of every tensor.

        Raises:
            ValueError, TypeError: a size is out of range; the message names the argument.
        """
        sizes = {"prompts": prompts, "samples": samples, "max_length": max_length}
        for name, size in sizes.items():
            check_count(name, size)
        check_count("vocabulary", vocabulary, low=2)
        check_count("min_length", min_length, low=0)
        if min_length > max_length:
            raise ValueError(f"min_length: expected at most max_length = {max_length}, got {min_length}")
        generator = torch.Generator().manual_seed(seed)
        mask = _mask(prompts * samples, max_length, min_length, generator)
        ids = torch.randint(0, vocabulary, mask.shape, generator=generator)
        source = _source(mask.shape, vocabulary, hidden_size, with_logits, generator)
        logps, entropy = _log_probs(source, ids, vocabulary, generator)
        per_token = {**_recorded(logps, drift, generator), "entropy": entropy}
        rewards = (torch.rand(prompts, samples, generator=generator, dtype=torch.float64) < 0.5).double()
        batch = cls(
            token_ids=ids,
            mask=mask,
            rewards=rewards,
            advantages=group_advantages(rewards).flatten(),
            **per_token,
            **source,
        )
        return batch._poisoned()._cast(dtype, torch.device(device))

    def packed(self) -> SyntheticBatch:
        """The same sequences end to end in one row, with `cu_seqlens` and no padding; ValueError if already packed."""
        if self.cu_seqlens is not None:
            raise ValueError("this batch is packed already; pack the padded one")
        tokens = {name: v[self.mask].unsqueeze(0) for name, v in self._tensors().items() if name in PER_TOKEN}
        bounds = torch.nn.functional.pad(self.mask.sum(1).cumsum(0), (1, 0))
        return replace(self, **tokens, mask=self.mask[self.mask].unsqueeze(0), cu_seqlens=bounds)

    def policy_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `policy_loss` but for `logps`, shared by the losses from logits and hidden states."""
        names = ("advantages", "old_logps", "ref_logps", "rollout_logps", "mask", "cu_seqlens")
        return {name: getattr(self, name) for name in names}

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def _poisoned(self) -> SyntheticBatch:
        def poison(value: Tensor) -> Tensor:
            masked = ~self.mask if value.ndim == 2 else ~self.mask.unsqueeze(-1)
            return value.masked_fill(masked, math.nan if value.is_floating_point() else -1)

        return replace(self, **{name: poison(v) for name, v in self._tensors().items() if name in PER_TOKEN})

    def _cast(self, dtype: torch.dtype, device: torch.device) -> SyntheticBatch:
        def cast(name: str, value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value.to(device)
            return value.to(device, dtype if name in ("hidden", "weight", "logits") else wide_dtype(dtype))

        return replace(self, **{name: cast(name, value) for name, value in self._tensors().items()})


def _mask(batch: int, width: int, shortest: int, generator: torch.Generator) -> Tensor:
    lengths = torch.randint(shortest, width + 1, (batch, 1), generator=generator)
    lengths[0] = width
    return torch.arange(width) < lengths


def _source(
    shape: torch.Size, vocabulary: int, size: int | None, with_logits: bool, generator: torch.Generator
) -> dict[str, Tensor]:
    """Hidden states and a head scaled so that logits have unit variance, and the logits."""
    source = {}
    if size is not None:
        check_count("hidden_size", size)
        source["hidden"] = torch.randn(*shape, size, generator=generator, dtype=torch.float64)
        source["weight"] = torch.randn(vocabulary, size, generator=generator, dtype=torch.float64) * size**-0.5
    if with_logits:
        drawn = source["hidden"] @ source["weight"].T if size is not None else None
        source["logits"] = (
            torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64) if drawn is None else drawn
        )
    return source


def _log_probs(
    source: dict[str, Tensor], ids: Tensor, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the source, or where there is none of about the size that unit logits give."""
    if "hidden" in source:
        logps, entropy = linear_logp(source["hidden"], source["weight"], ids, return_entropy=True)
        return logps, entropy
    if "logits" in source:
        logps, entropy = logp(source["logits"], ids, return_entropy=True)
        return logps, entropy
    noise = torch.randn(2, *ids.shape, generator=generator, dtype=torch.float64)
    uniform = math.log(vocabulary)
    return -(noise[0] + uniform).abs(), uniform * torch.sigmoid(2 + noise[1])


def _recorded(logps: Tensor, drift: float, generator: torch.Generator) -> dict[str, Tensor]:
    """The policy's log-probs and those recorded before; none is above 0."""
    noise = drift * torch.randn(3, *logps.shape, generator=generator, dtype=torch.float64)
    old = (logps + noise[0]).clamp_max(0.0)
    reference, rollout = (logps + 3 * noise[1]).clamp_max(0.0), (old + noise[2] / 10).clamp_max(0.0)
    return {"logps": logps, "old_logps": old, "ref_logps": reference, "rollout_logps": rollout}
