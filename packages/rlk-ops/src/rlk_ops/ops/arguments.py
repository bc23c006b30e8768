"""Checks of arguments: each message says which argument, what was given and what was expected."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def describe(value: object) -> str:
    """What was given, for a message: a tensor's dtype and shape, else the value itself."""
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def check_floating(name: str, value: object, legend: str, *, ndim: int | None = None, min_ndim: int = 0) -> None:
    """Raise unless `value` is a float16, bfloat16, float32 or float64 tensor of that many dimensions."""
    if not isinstance(value, Tensor) or value.dtype not in FLOATING:
        raise TypeError(f"{name}: expected a float tensor of shape {legend}, got {describe(value)}")
    if value.ndim < min_ndim or (ndim is not None and value.ndim != ndim):
        raise ValueError(f"{name}: expected shape {legend}, got {tuple(value.shape)}")


def check_integers(name: str, value: object, legend: str) -> None:
    """Raise unless `value` is an integer tensor."""
    if not isinstance(value, Tensor) or value.dtype not in INTEGERS:
        raise TypeError(f"{name}: expected an integer tensor of shape {legend}, got {describe(value)}")


def check_shape(name: str, value: Tensor, expected: tuple[int, ...], legend: str) -> None:
    """Raise unless `value` has exactly the shape `expected`."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{name}: expected shape {legend} = {expected}, got {tuple(value.shape)}")


def check_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless both tensors are on one device."""
    if value.device != other.device:
        raise ValueError(f"{name}: is on {value.device}, but {other_name} is on {other.device}; move it there")


def check_same(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless both tensors have one dtype and are on one device."""
    check_device(name, value, other_name, other)
    if value.dtype != other.dtype:
        raise TypeError(f"{name}: is {value.dtype}, but {other_name} is {other.dtype}; cast one of them")


def check_positive(name: str, value: object) -> None:
    """Raise unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number above 0, got {describe(value)}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")


def check_count(name: str, value: object, *, low: int = 1) -> None:
    """Raise unless `value` is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer of at least {low}, got {describe(value)}")
    if value < low:
        raise ValueError(f"{name}: expected an integer of at least {low}, got {value}")


def check_values(name: str, value: Tensor, low: int, high: int) -> None:
    """Raise unless every element of an integer tensor is in [low, high]; costs one synchronisation."""
    if value.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in value.aminmax())
    if smallest < low or largest > high:
        raise ValueError(f"{name}: expected values in [{low}, {high}], got {smallest} to {largest}")


def check_out_dtype(out_dtype: object, inputs: torch.dtype, *, default: torch.dtype | None) -> None:
    """Raise unless `out_dtype` is a float dtype; float64 stays float64, so only that or `default` goes with it."""
    if out_dtype is not None and out_dtype not in FLOATING:
        raise TypeError(f"out_dtype: expected one of {', '.join(map(str, FLOATING))}, got {out_dtype!r}")
    if inputs == torch.float64 and out_dtype not in (torch.float64, default):
        raise ValueError(f"out_dtype: float64 inputs give a float64 result, got {out_dtype}; cast the result instead")
