"""Which tokens sampling may draw: temperature, then top-k, then top-p, then min-p, each as a threshold on a logit."""

from __future__ import annotations

import torch
from torch import Tensor

from rlk_ops.ops.arguments import check_device, check_floating
from rlk_ops.ops.precision import wide
from rlk_ops.ops.trees import row_sum, running_sum

_FIRST_CANDIDATES = 1024  # a nucleus is rarely larger; sorting all of a 50k-token row costs ten times as much


def check_logits(logits: Tensor) -> None:
    """Raise unless `logits` is a floating-point (B, V) with V >= 1."""
    check_floating("logits", logits, "(B, V)", ndim=2)
    if logits.shape[1] == 0:
        raise ValueError(f"logits: expected shape (B, V) with V >= 1, got {tuple(logits.shape)}")


def check_row_option(
    name: str, value: object, logits: Tensor, low: float, high: float, *, low_open: bool = False, integer: bool = False
) -> None:
    """Raise unless `value` is a number, or a (B,) tensor of numbers, between `low` and `high`."""
    kind = "an integer" if integer else "a number"
    if isinstance(value, Tensor):
        if value.is_complex() or value.dtype == torch.bool or (integer and value.is_floating_point()):
            raise TypeError(f"{name}: expected {kind} or a (B,) tensor of them, got dtype {value.dtype}")
        if value.shape != logits.shape[:1]:
            raise ValueError(f"{name}: expected {kind} or shape ({logits.shape[0]},), got {tuple(value.shape)}")
        check_device(name, value, "logits", logits)
        inside = (value > low if low_open else value >= low) & (value <= high)
        ok = bool(inside.all())
    else:
        if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
            raise TypeError(f"{name}: expected {kind} or a (B,) tensor of them, got {value!r}")
        ok = (value > low if low_open else value >= low) and value <= high
    if not ok:
        interval = f"{'(' if low_open else '['}{low:g}, {'inf)' if high == float('inf') else f'{high:g}]'}"
        raise ValueError(f"{name}: expected {kind} in {interval}, got {value}")


def check_options(logits: Tensor, temperature: object, top_k: object, top_p: object, min_p: object) -> None:
    """Raise where a sampling option is out of its range; the message names the option."""
    infinity = float("inf")
    check_row_option("temperature", temperature, logits, 0.0, torch.finfo(torch.float32).max)
    if top_k is not None:
        check_row_option("top_k", top_k, logits, 1, infinity, integer=True)
    if top_p is not None:
        check_row_option("top_p", top_p, logits, 0.0, 1.0, low_open=True)
    if min_p is not None:
        check_row_option("min_p", min_p, logits, 0.0, 1.0)


def column(value: float | Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A scalar or (B,) option as a (B, 1) tensor, so that both spellings go through the same arithmetic."""
    if isinstance(value, Tensor):
        return value.to(dtype)[:, None]
    return torch.full((len(rows), 1), value, dtype=dtype, device=rows.device)


def scale(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Temperature-scaled logits (B, V) in float32 or float64, and which rows are greedy (B, 1).

    A greedy row, temperature 0, is scaled by 1.
    """
    values = wide(logits)
    by = column(temperature, values, values.dtype)
    greedy = by == 0
    return values / torch.where(greedy, 1, by), greedy


def usable_rows(scaled: Tensor) -> Tensor:
    """(B, 1) bool: the row has a largest logit that is finite. Neither a row of -inf nor one with NaN or +inf has."""
    return scaled.amax(-1, keepdim=True).isfinite()


def kept(
    scaled: Tensor,
    greedy: Tensor,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
) -> Tensor:
    """The support (B, V) bool of scaled logits; see :func:`sampling_support` for its meaning."""
    top = scaled.amax(-1, keepdim=True)
    threshold = torch.full_like(top, -torch.inf)
    if top_k is not None:
        threshold = _top_k_threshold(scaled, top_k)
    if top_p is not None:
        threshold = torch.maximum(threshold, _top_p_threshold(scaled, top, threshold, column(top_p, top, top.dtype)))
    if min_p is not None:
        threshold = torch.maximum(threshold, top + column(min_p, top, top.dtype).log())
    threshold = torch.where(greedy, -torch.inf, threshold)
    return (scaled >= threshold) & (scaled > -torch.inf) & top.isfinite()


def _top_k_threshold(scaled: Tensor, top_k: int | Tensor) -> Tensor:
    vocabulary = scaled.shape[1]
    if not isinstance(top_k, Tensor):
        return scaled.topk(min(top_k, vocabulary)).values[:, -1:]
    rank = top_k.long().clamp(max=vocabulary)[:, None]
    largest = int(rank.max()) if len(rank) else 1
    return scaled.topk(largest).values.gather(1, rank - 1)


def _top_p_threshold(scaled: Tensor, top: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """The logit of the last token of the nucleus among those at or above `floor`; -inf where `top_p` is 1."""
    wanted = top_p.double() * row_sum(_mass(scaled, top, floor))
    likely = scaled.topk(min(_FIRST_CANDIDATES, scaled.shape[1])).values
    threshold, reached = _nucleus_edge(likely, top, floor, wanted)
    larger = ~(reached | (top_p == 1) | ~top.isfinite()).squeeze(1)
    if likely.shape[1] < scaled.shape[1] and bool(larger.any()):
        everything = scaled[larger].sort(descending=True).values
        threshold[larger] = _nucleus_edge(everything, top[larger], floor[larger], wanted[larger])[0]
    return torch.where(top_p == 1, -torch.inf, threshold)


def _nucleus_edge(descending: Tensor, top: Tensor, floor: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    reached = running_sum(_mass(descending, top, floor))
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    last = (before < wanted).sum(-1, keepdim=True).clamp(min=1) - 1
    return descending.gather(1, last), reached[:, -1:] >= wanted


def _mass(scaled: Tensor, top: Tensor, floor: Tensor) -> Tensor:
    return torch.where(scaled >= floor, (scaled.double() - top.double()).exp(), 0)


@torch.no_grad()
def sampling_support(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
) -> Tensor:
    """The tokens that `sample` may draw, as a mask; `sample` itself uses it.

    Every rule is a threshold on the scaled logit `z = logits / temperature`, so tokens with equal logits are kept or
    dropped together, whatever their ids, and more than k tokens remain where the k-th is tied. In this order:

    1. top-k keeps z where it is at least the k-th largest z.
    2. top-p keeps z where the tokens of *strictly* larger z hold less than `top_p` of the mass of the tokens that top-k
       kept: the smallest set of most probable tokens whose mass reaches `top_p`, and the ties of its last one.
    3. min-p keeps z where `exp(z - max z) >= min_p`.

    A -inf logit is never kept. The most probable token always is. A greedy row, temperature 0, is not truncated: its
    log-prob is that of the whole distribution at temperature 1, and so is its support.

    Args:
        logits: (B, V), floating point; -inf is legal.
        temperature: a number or (B,), >= 0.
        top_k: an integer or (B,), >= 1; V or more keeps all.
        top_p: a number or (B,), in (0, 1]; 1 keeps all.
        min_p: a number or (B,), in [0, 1]; 0 keeps all.

    Returns:
        (B, V) bool, True = may be drawn. A row that is -inf everywhere, or that holds NaN or +inf, is False everywhere.

    Raises:
        ValueError: an option is out of its range or of another shape; TypeError: of another type.
    """
    check_logits(logits)
    check_options(logits, temperature, top_k, top_p, min_p)
    scaled, greedy = scale(logits, temperature)
    return kept(scaled, greedy, top_k, top_p, min_p)
