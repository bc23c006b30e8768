"""Sums over a row by one fixed tree, so that a row's bits depend on nothing but the row.

A library's reduction may cut a row differently when there are few rows or many threads; a sum written as elementwise
additions has nothing to cut, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(x: Tensor) -> Tensor:
    """(*, N) to (*, 1), N >= 1: zeros fill the row up to a power of two, then halves are added until one is left."""
    width = x.shape[-1]
    total = torch.nn.functional.pad(x, (0, (1 << (width - 1).bit_length()) - width))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total


def running_sum(x: Tensor) -> Tensor:
    """(*, N) to (*, N): inclusive prefix sums by doubling steps. An element's tree depends on its index, not on N."""
    total, step = x, 1
    while step < x.shape[-1]:
        total = torch.cat([total[..., :step], total[..., step:] + total[..., :-step]], dim=-1)
        step *= 2
    return total
