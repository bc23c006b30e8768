"""From logits to a distribution: the one order of transforms, the checks, and the rows that count.

Every operator that turns logits into log-probs comes here, so that temperature, softcap and support cannot differ
between rollout and trainer. Legend: N rows, V vocabulary, K kept ids; `*` any leading dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_device, check_floating, check_integers, check_positive, check_shape, describe
from rlk_ops.ops.precision import wide

NEVER = -math.inf


@dataclass(frozen=True)
class Transform:
    """How raw logits become the logits of the softmax: `* logit_scale`, softcap, `/ temperature`, columns, support.

    Attributes:
        logit_scale: factor above 0.
        softcap: cap of `cap * tanh(x / cap)`, or None.
        temperature: a number, or a (N,) tensor.
        vocab_size: columns at or past it count as -inf; None keeps all.
        support: (N, V) bool, or (N, K) kept ids padded with -1; columns outside count as -inf; None keeps all.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0
    vocab_size: int | None = None
    support: Tensor | None = None

    def rows(self, index: Tensor | slice) -> Transform:
        """The transform of these rows alone."""
        temperature, support = self.temperature, self.support
        return Transform(
            self.logit_scale,
            self.softcap,
            temperature[index] if isinstance(temperature, Tensor) else temperature,
            self.vocab_size,
            None if support is None else support[index],
        )

    def kept(self, raw: Tensor, first_column: int = 0) -> Tensor | None:
        """(N, C) bool: which of these columns stay in the distribution; None where all do.

        Args:
            raw: (N, C) raw logits.
            first_column: the vocabulary id of column 0.
        """
        kept = raw != NEVER
        columns = torch.arange(first_column, first_column + raw.shape[1], device=raw.device)
        if self.vocab_size is not None:
            kept = kept & (columns < self.vocab_size)
        if self.support is not None:
            kept = kept & self._supported(columns)
        return None if bool(kept.all()) and not raw.is_cuda else kept

    def _supported(self, columns: Tensor) -> Tensor:
        support = self.support
        assert support is not None
        if support.dtype == torch.bool:
            return support[:, columns[0] : columns[-1] + 1] if len(columns) else support[:, :0]
        local = support - columns[0] if len(columns) else support
        inside = (local >= 0) & (local < len(columns)) & (support >= 0)
        # Ids outside the slice go to one column more, which is cut off.
        table = torch.zeros(support.shape[0], len(columns) + 1, dtype=torch.bool, device=support.device)
        table.scatter_(1, torch.where(inside, local, len(columns)), True)
        return table[:, : len(columns)]

    def divisor(self) -> float | Tensor:
        """The temperature in a shape that broadcasts over (N, C)."""
        return self.temperature[:, None] if isinstance(self.temperature, Tensor) else self.temperature

    def apply(self, raw: Tensor, first_column: int = 0) -> Tensor:
        """(N, C) raw logits in fp32 or float64 as the softmax sees them; differentiable.

        A logit that is -inf stays -inf with gradient 0; +inf becomes NaN, so that its row is NaN whatever the softcap.
        """
        kept = self.kept(raw.detach(), first_column)
        x = raw if kept is None else torch.where(kept, raw, 0.0)
        x = torch.where(x == math.inf, math.nan, x)
        if self.logit_scale != 1.0:
            x = x * self.logit_scale
        if self.softcap is not None:
            x = self.softcap * torch.tanh(x / self.softcap)
        if isinstance(self.temperature, Tensor) or self.temperature != 1.0:
            x = x / self.divisor()
        return x if kept is None else torch.where(kept, x, NEVER)

    def derivative(self, x: Tensor) -> Tensor | float:
        """d(transformed)/d(raw) at (N, C) transformed logits `x`, where they are finite."""
        divisor = self.divisor()
        if self.softcap is None:
            return self.logit_scale / divisor
        tanh = torch.where(x == NEVER, 0.0, x) * divisor / self.softcap
        return (1.0 - tanh * tanh) * (self.logit_scale / divisor)


def transform_logits(
    logits: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    support: Tensor | None = None,
) -> Tensor:
    """Raw logits (N, V) as the softmax sees them, fp32 or float64; see :class:`Transform`."""
    options = Transform(logit_scale, softcap, temperature, vocab_size, support)
    return options.apply(wide(logits))


def log_prob_and_entropy(x: Tensor, token_ids: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the chosen tokens and the entropies of (N, V) transformed logits; differentiable.

    `p log p` is 0 with a finite gradient where p is 0.
    """
    table = torch.log_softmax(x, -1)
    logps = table.gather(-1, token_ids[:, None])[:, 0]
    if not entropy:
        return logps, None
    finite = torch.where(table == NEVER, 0.0, table)
    return logps, -(table.exp() * finite).sum(-1)


@dataclass(frozen=True)
class ActiveRows:
    """The rows that count, gathered out, so that nothing in the others reaches an exponential or a reduction.

    Attributes:
        shape: the leading dimensions `*`.
        index: flat indices of the rows that count; None where all do.
        token_ids: (N,) int64 of those rows.
        transform: of those rows.
    """

    shape: torch.Size
    index: Tensor | None
    token_ids: Tensor
    transform: Transform

    @classmethod
    def of(cls, token_ids: Tensor, mask: Tensor | None, ignore_index: int, **options: Any) -> ActiveRows:
        """The rows of a call that the mask and `ignore_index` leave."""
        shape, ids = token_ids.shape, token_ids.reshape(-1).long()
        keep = ids != ignore_index
        if mask is not None:
            keep &= mask.reshape(-1).bool()
        for name, columns in (("temperature", False), ("support", True)):
            value = options[name]
            if isinstance(value, Tensor) and (columns or value.ndim):
                options[name] = value.reshape(len(ids), -1) if columns else value.reshape(-1)
            elif isinstance(value, Tensor):
                options[name] = float(value)
        transform = Transform(**options)
        if bool(keep.all()):
            return cls(shape, None, ids, transform)
        index = keep.nonzero()[:, 0]
        return cls(shape, index, ids[index], transform.rows(index))

    def gather(self, rows: Tensor) -> Tensor:
        """(*, C) as (N, C) of the rows that count."""
        flat = rows.reshape(-1, rows.shape[-1]) if rows.shape[-1] else rows.reshape(math.prod(self.shape), 0)
        return flat if self.index is None else flat[self.index]

    def scatter(self, values: Tensor) -> Tensor:
        """(N,) values as `*`, 0 in the other rows."""
        if self.index is None:
            return values.reshape(self.shape)
        out = torch.zeros(math.prod(self.shape), dtype=values.dtype, device=values.device)
        return out.index_put((self.index,), values).reshape(self.shape)


def check_token_ids(
    token_ids: object, lead: torch.Size, vocabulary: int, *, mask: object, ignore_index: int, validate: bool
) -> None:
    """Raise unless the token ids fit the rows and, if `validate`, lie in [0, vocabulary) in every row that counts."""
    check_integers("token_ids", token_ids, "(*)")
    assert isinstance(token_ids, Tensor)
    check_shape("token_ids", token_ids, tuple(lead), "(*), the leading dimensions")
    if mask is not None:
        check_mask(mask, token_ids)
    if not validate or token_ids.numel() == 0:
        return
    counted = token_ids != ignore_index
    if isinstance(mask, Tensor):
        counted &= mask.bool()
    wrong = counted & ((token_ids < 0) | (token_ids >= vocabulary))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"token_ids: expected ids in [0, {vocabulary}) or ignore_index={ignore_index}, got "
            f"{int(token_ids[at])} at {at}; mask the slot or correct the id"
        )


def check_mask(mask: object, token_ids: Tensor) -> None:
    """Raise unless the mask is a tensor of the token ids' shape on their device."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a bool or 0/1 tensor of the shape of token_ids, got {describe(mask)}")
    check_shape("mask", mask, tuple(token_ids.shape), "the shape of token_ids")
    check_device("mask", mask, "token_ids", token_ids)


def check_temperature(temperature: object, lead: torch.Size, *, validate: bool = True) -> None:
    """Raise unless the temperature is a number above 0, or a float tensor of one per row, all above 0."""
    if not isinstance(temperature, Tensor):
        check_positive("temperature", temperature)
        return
    check_floating("temperature", temperature, "() or (*)")
    if temperature.ndim and temperature.shape != lead:
        raise ValueError(f"temperature: expected a number or shape {tuple(lead)}, got {tuple(temperature.shape)}")


def check_positive_temperatures(temperature: object, token_ids: Tensor, mask: object, ignore_index: int) -> None:
    """Raise unless every row that counts has a temperature above 0; costs one synchronisation for a tensor."""
    if not isinstance(temperature, Tensor):
        return
    counted = token_ids != ignore_index
    if isinstance(mask, Tensor):
        counted = counted & mask.bool()
    if bool((counted & ~(temperature > 0)).any()):
        raise ValueError("temperature: expected every counted row's to be above 0; temperature 0 has no log-probs")


def check_transform(
    lead: torch.Size,
    vocabulary: int,
    reference: Tensor,
    *,
    temperature: object,
    logit_scale: object,
    softcap: object,
    vocab_size: object,
    support: object,
) -> None:
    """Raise unless the options of the transform fit (*, vocabulary) logits; `reference` is a tensor on their device."""
    check_temperature(temperature, lead)
    check_positive("logit_scale", logit_scale)
    if softcap is not None:
        check_positive("softcap", softcap)
    if vocab_size is not None and not (isinstance(vocab_size, int) and 1 <= vocab_size <= vocabulary):
        raise ValueError(f"vocab_size: expected an integer from 1 to {vocabulary} or None, got {vocab_size!r}")
    if support is None:
        return
    if not isinstance(support, Tensor) or support.dtype not in (torch.bool, torch.int64, torch.int32):
        raise TypeError(f"support: expected bool (*, V) or int ids (*, K) padded with -1, got {describe(support)}")
    if support.shape[:-1] != lead or (support.dtype == torch.bool and support.shape[-1] != vocabulary):
        raise ValueError(
            f"support: expected {(*lead, vocabulary)} bool or ({', '.join(map(str, lead))}, K) ids, "
            f"got {describe(support)}"
        )
    check_device("support", support, "the logits", reference)
