"""The timer: device events on an accelerator, the clock on a CPU; warm-up first, the median to quote."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlk_ops.device import Device, current_device

FLUSH_BYTES = 256 << 20  # four times the 63 MB second-level cache of an H200


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated calls, in the order in which they were made."""

    milliseconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, ms."""
        return statistics.median(self.milliseconds)

    def percentile(self, percent: float) -> float:
        """The value that `percent` of the calls do not pass, ms (nearest rank)."""
        ordered = sorted(self.milliseconds)
        rank = math.ceil(len(ordered) * percent / 100)
        return ordered[max(0, rank - 1)]


def time_calls(
    function: Callable[[], Any],
    *,
    device: Device | None = None,
    warmup: int = 3,
    repeats: int = 20,
    flush_cache: bool = False,
) -> Timing:
    """Time a call.

    Args:
        function: what to time; its device work is waited for.
        device: where it works; default the current one.
        warmup: calls first that are not counted (compilation, handles, page faults).
        repeats: calls that are.
        flush_cache: overwrite 256 MB before each, so that inputs come from memory.

    Raises:
        ValueError: no repeat.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}: expected at least 1 and 0")
    place = device or current_device()
    trash = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=place.torch_device) if flush_cache else None
    taken = []
    for number in range(warmup + repeats):
        if trash is not None:
            trash.zero_()
        place.synchronize()
        start, end = place.event(), place.event()
        start.record()
        function()
        end.record()
        end.synchronize()
        if number >= warmup:
            taken.append(end.milliseconds_since(start))
    return Timing(tuple(taken))
