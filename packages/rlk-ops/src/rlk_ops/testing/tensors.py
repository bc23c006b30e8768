"""Trees of tensors: a case's arguments and a call's outputs, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree of dicts, tuples and lists with `function` applied to every tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the tree with its path: "q", "shared_prefix[0]", "metrics.kl"."""
    if isinstance(tree, Tensor):
        yield name or "out", tree
    elif isinstance(tree, bool | int | float):
        yield name or "out", torch.tensor(tree, dtype=torch.float64 if isinstance(tree, float) else None)
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}.{key}" if name else str(key))
    elif dataclasses.is_dataclass(tree):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        yield from named_tensors(fields, name)
    elif hasattr(tree, "_asdict"):
        yield from named_tensors(tree._asdict(), name)
    elif isinstance(tree, tuple | list):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{name or 'out'}[{index}]")
    elif tree is not None:
        raise TypeError(f"{name or 'out'}: an output is a tensor, a number, or a tree of them, got {type(tree)}")


def recast(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy in another dtype (floating tensors only) and on another device, with the same strides, gaps included."""
    if tensor.is_meta:
        return tensor
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    if tensor.numel() == 0:
        return tensor.to(device, wanted, copy=True)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = tensor.as_strided((extent,), (1,), tensor.storage_offset())
    return span.to(device, wanted, copy=True).as_strided(tensor.shape, tensor.stride())


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: the same bits, or both NaN. The two have one shape and one dtype."""
    if not a.is_floating_point():
        return a == b
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    bits = a.detach().contiguous().view(integer) == b.detach().contiguous().view(integer)
    return bits | (a.isnan() & b.isnan())


def transposed(tensor: Tensor) -> Tensor:
    """The same values, stored with the first dimension innermost."""
    if tensor.ndim < 2:
        return tensor.clone()
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def sliced(tensor: Tensor) -> Tensor:
    """The same values, every second element of a buffer whose other elements are NaN (or the largest integer)."""
    if tensor.ndim == 0:
        return tensor.clone()
    wide = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype, device=tensor.device)
    wide.fill_(garbage(tensor.dtype))
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


def garbage(dtype: torch.dtype) -> float | int | bool:
    """A value that spoils whatever reads it."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
