"""Packing tensors into an arena and reading them back out of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlk_weightsync.errors import DtypeUnknown, ShapeInvalid
from rlk_weightsync.manifest import DTYPE_NAMES, DTYPES, Span, TensorEntry

ALIGNMENT = 256


@dataclass(frozen=True)
class Layout:
    """Where each tensor goes in an arena.

    Attributes:
        entries: one a tensor, in order.
        nbytes: of the arena.
    """

    entries: tuple[TensorEntry, ...]
    nbytes: int


def plan_layout(
    tensors: Mapping[str, torch.Tensor],
    *,
    cast: torch.dtype | None = None,
    groups: Mapping[str, str] | None = None,
    alignment: int = ALIGNMENT,
) -> Layout:
    """The layout of a snapshot: contiguous copies side by side; tensors with the same bytes stored once.

    Args:
        tensors: name to tensor; any strides. Two that share storage, offset, shape and stride become aliases.
        cast: floating tensors are stored in this dtype, which their entries declare.
        groups: name to fuse group.
        alignment: of every tensor, in bytes.
    """
    counts = Counter((groups or {}).values())
    entries: list[TensorEntry] = []
    origins: dict[tuple[object, ...], TensorEntry] = {}
    offset = 0
    for name, tensor in tensors.items():
        dtype, transform = _stored_dtype(name, tensor, cast)
        group = None if groups is None or name not in groups else f"{groups[name]}:{counts[groups[name]]}"
        nbytes = tensor.numel() * DTYPES[dtype].itemsize
        key = _identity(tensor)
        origin = origins.get(key)
        span = origin.span if origin else Span(0, offset, nbytes) if nbytes else None
        alias_of = origin.name if origin else None
        shape = tuple(tensor.shape)
        entry = TensorEntry(name, dtype, shape, _contiguous(shape), span, group, alias_of, transform)
        entries.append(entry)
        if origin is None and nbytes:
            origins[key] = entry
            offset += -(-nbytes // alignment) * alignment
    return Layout(tuple(entries), offset)


def views(layout: Layout, arena: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name to tensor over an arena's bytes; aliases share one tensor's memory.

    Args:
        layout: of the arena.
        arena: (nbytes,) uint8.
    """
    return {entry.name: view(entry, arena) for entry in layout.entries}


def view(entry: TensorEntry, arena: torch.Tensor) -> torch.Tensor:
    """One tensor over its arena's bytes."""
    dtype = DTYPES[entry.dtype]
    if entry.span is None:
        return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device=arena.device)
    data = arena[entry.span.offset : entry.span.offset + entry.span.nbytes].view(dtype)
    return data.as_strided(entry.shape, entry.stride)


def fill(destinations: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Copy every tensor that is no alias into its place."""
    names = [entry.name for entry in layout.entries if entry.span is not None and entry.alias_of is None]
    copy_all([destinations[name] for name in names], [tensors[name] for name in names])


def copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy pairwise, in one call where the pairs are alike; a packed dtype is copied as bytes."""
    pairs = [_as_copyable(d, s) for d, s in zip(destinations, sources, strict=True)]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([d for d, _ in pairs], [s for _, s in pairs])


def _as_copyable(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if destination.dtype == torch.float4_e2m1fn_x2:
        return destination.view(torch.uint8), source.view(torch.uint8)
    return destination, source


def _stored_dtype(name: str, tensor: torch.Tensor, cast: torch.dtype | None) -> tuple[str, str | None]:
    """The dtype in which a tensor is stored, and the transform that its entry declares."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ShapeInvalid(f"tensor {name!r:.80}: expected a dense tensor, got {type(tensor).__name__}")
    dtype = cast if cast is not None and tensor.is_floating_point() else tensor.dtype
    if dtype not in DTYPE_NAMES or tensor.dtype not in DTYPE_NAMES:
        raise DtypeUnknown(f"tensor {name!r:.80}: dtype {tensor.dtype}; known are {', '.join(DTYPES)}")
    return DTYPE_NAMES[dtype], None if dtype == tensor.dtype else f"cast:{DTYPE_NAMES[tensor.dtype]}"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
