"""Packing tensors into an arena and reading them back out of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rlk_weightsync.errors import DtypeUnknown, ShapeInvalid
from rlk_weightsync.manifest import DTYPE_NAMES, DTYPES, Shard, Span, TensorEntry

ALIGNMENT = 256
PLAIN = (torch.Tensor, torch.nn.Parameter)
CASTABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    shards: Mapping[str, Shard] | None = None,
    alignment: int = ALIGNMENT,
) -> Layout:
    """The layout of a snapshot: contiguous copies side by side; tensors with the same bytes stored once.

    Args:
        tensors: name to tensor; any strides. Two that share storage, offset, shape and stride become aliases.
        cast: floating tensors of 16 bits and more are stored in this dtype, which their entries declare.
        groups: name to fuse group.
        shards: name to the part of a larger tensor that it is.
        alignment: of every tensor, in bytes.

    Raises:
        ShapeInvalid: something that is not a plain dense tensor with its values in memory.
        DtypeUnknown: a dtype outside the closed list.
    """
    groups, shards = groups or {}, shards or {}
    members = Counter(groups.values())
    entries: list[TensorEntry] = []
    origins: dict[tuple[object, ...], TensorEntry] = {}
    offset = 0
    for name, tensor in tensors.items():
        require_plain_tensor(name, tensor)
        dtype, transform = _stored_dtype(name, tensor, cast)
        shape = tuple(tensor.shape)
        nbytes = tensor.numel() * DTYPES[dtype].itemsize
        key = place(tensor)
        origin = origins.get(key) if nbytes else None
        span = origin.span if origin else Span(0, offset, nbytes) if nbytes else None
        group = f"{groups[name]}:{members[groups[name]]}" if name in groups else None
        entry = TensorEntry(
            name, dtype, shape, _contiguous(shape), span, group, origin.name if origin else None, transform,
            None, shards.get(name),
        )  # fmt: skip
        entries.append(entry)
        if origin is None and nbytes:
            origins[key] = entry
            offset += -(-nbytes // alignment) * alignment
    return Layout(tuple(entries), offset)


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    """What two tensors share if each is an alias of the other: device, address, type, shape, strides, lazy bits."""
    lazy = tensor.is_conj(), tensor.is_neg()
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), lazy)


def fingerprint(tensors: Mapping[str, object]) -> tuple[object, ...] | None:
    """Equal for two mappings that have the same layout, whatever their values; None where one is no plain tensor."""
    found = []
    for name, tensor in tensors.items():
        if type(tensor) not in PLAIN or not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        found.append((name, place(tensor)))
    return tuple(found)


def require_plain_tensor(name: str, tensor: object) -> None:
    """Raise ShapeInvalid for what a copy of bytes would not reproduce, with the remedy."""
    if not isinstance(tensor, torch.Tensor):
        raise ShapeInvalid(f"{name!r:.80}: expected a tensor, got {type(tensor).__name__}")
    remedy = None
    if is_traceable_wrapper_subclass(tensor):
        remedy = f"a {type(tensor).__name__} holds its values elsewhere; publish full_tensor(), or its parts by name"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        remedy = "neither sparse nor quantized tensors are published; publish what they are made of by name"
    elif tensor.device.type == "meta":
        remedy = "it is on the meta device and has no values; materialise the module first"
    elif tensor.numel() == 0 and getattr(tensor, "ds_numel", 0) > 0:
        remedy = "it is partitioned by ZeRO-3; gather it first"
    if remedy:
        raise ShapeInvalid(f"tensor {name!r:.80}: {remedy}")


def views(entries: Iterable[TensorEntry], arenas: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name to tensor over the arenas' bytes; an alias is the very tensor it is an alias of.

    Args:
        entries: in any order.
        arenas: arena id to its (nbytes,) uint8.
    """
    typed: dict[tuple[int, str], torch.Tensor] = {}
    made: dict[str, torch.Tensor] = {}
    aliases: list[TensorEntry] = []
    for entry in entries:
        if entry.alias_of is not None:
            aliases.append(entry)
            made[entry.name] = _EMPTY  # keeps the place in the order
        elif entry.span is None:
            made[entry.name] = torch.empty_strided(entry.shape, entry.stride, dtype=DTYPES[entry.dtype])
        else:
            number, offset, _ = entry.span
            dtype = DTYPES[entry.dtype]
            base = typed.get((number, entry.dtype))
            if base is None:
                whole = arenas[number]
                base = typed[number, entry.dtype] = whole[: len(whole) // dtype.itemsize * dtype.itemsize].view(dtype)
            made[entry.name] = base.as_strided(entry.shape, entry.stride, offset // dtype.itemsize)
    made.update({entry.name: made[entry.alias_of or ""] for entry in aliases})
    return made


_EMPTY = torch.empty(0)


def copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy pairwise, in one call where the pairs are alike; a packed dtype is copied as bytes."""
    pairs = [_as_copyable(d, s) for d, s in zip(destinations, sources, strict=True)]
    if pairs:
        # A tensor made in inference mode takes writes in inference mode alone.
        inference = any(destination.is_inference() for destination, _ in pairs)
        with torch.inference_mode() if inference else torch.no_grad():
            torch._foreach_copy_([d for d, _ in pairs], [s for _, s in pairs])


def _as_copyable(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if destination.dtype == torch.float4_e2m1fn_x2:
        return destination.view(torch.uint8), source.view(torch.uint8)
    return destination, source


def _stored_dtype(name: str, tensor: torch.Tensor, cast: torch.dtype | None) -> tuple[str, str | None]:
    """The dtype in which a tensor is stored, and the transform that its entry declares."""
    dtype = cast if cast is not None and tensor.dtype in CASTABLE else tensor.dtype
    if tensor.dtype not in DTYPE_NAMES or dtype not in DTYPE_NAMES:
        raise DtypeUnknown(f"tensor {name!r:.80}: dtype {tensor.dtype}; known are {', '.join(DTYPES)}")
    return DTYPE_NAMES[dtype], None if dtype == tensor.dtype else f"cast:{DTYPE_NAMES[tensor.dtype]}"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
