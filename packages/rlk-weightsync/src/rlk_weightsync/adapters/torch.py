"""Install into a plain torch module, in place: the same parameters keep their addresses and get new values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rlk_weightsync.adapters.base import Poison
from rlk_weightsync.arena import copy_all
from rlk_weightsync.errors import UpdateRejected
from rlk_weightsync.manifest import DTYPE_NAMES, Manifest

MOST_NAMED = 5


class TorchAdapter:
    """Copies a full update of checkpoint format into a module whose state dict has exactly its names.

    Args:
        module: any module; its non-persistent buffers and whatever is not in its state dict keep their bits.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._poison = Poison()

    def preflight(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise UpdateRejected unless names, shapes, dtypes and ties all fit; nothing is written."""
        self._poison.check_kind(manifest)
        if manifest.kind != "full" or manifest.format != "checkpoint":
            raise UpdateRejected(
                f"a {manifest.kind} update of {manifest.format} format; expected a full one of checkpoint format"
            )
        targets = self._targets()
        _check_names(targets, tensors)
        for name, target in targets.items():
            _check_layout(name, target, tensors[name])
        _check_ties(targets, tensors)

    def install(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
        """Copy every tensor; a module's tied tensors are written once and reported `aliased`."""
        targets = self._targets()
        outcomes: dict[str, str] = {}
        written: dict[tuple[object, ...], str] = {}
        for name, target in targets.items():
            outcomes[name] = "aliased" if _place(target) in written and target.numel() else "copied"
            written.setdefault(_place(target), name)
        names = [name for name, outcome in outcomes.items() if outcome == "copied"]
        with self._poison.while_writing():
            copy_all([targets[name] for name in names], [tensors[name] for name in names])
        return outcomes

    def reset_caches(self) -> str:
        """A plain module has no cache."""
        return "a plain module has none"

    def require_usable(self) -> None:
        """Raise Poisoned where an installation died half-way."""
        self._poison.require_clean()

    def _targets(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._module.state_dict(keep_vars=True).items()}


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _check_names(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in targets if name not in tensors]
    unexpected = [name for name in tensors if name not in targets]
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}"
            for what, names in (("missing from the update", missing), ("unknown to the module", unexpected))
            if names
        ]
        raise UpdateRejected(f"names do not fit; {'; '.join(parts)}")


def _check_layout(name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
    if target.shape != tensor.shape:
        raise UpdateRejected(f"{name}: shape {tuple(tensor.shape)} published, the module has {tuple(target.shape)}")
    if target.dtype != tensor.dtype:
        raise UpdateRejected(
            f"{name}: {DTYPE_NAMES[tensor.dtype]} published, the module has {target.dtype}; "
            f"publish(..., cast={target.dtype})"
        )
    if target.is_meta:
        raise UpdateRejected(f"{name}: the module's tensor is on the meta device; materialise the module first")


def _check_ties(targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Names that the module ties must hold the same values."""
    first: dict[tuple[object, ...], str] = {}
    for name, target in targets.items():
        origin = first.setdefault(_place(target), name)
        if origin == name or target.numel() == 0 or tensors[name] is tensors[origin]:
            continue
        if not torch.equal(tensors[name].view(torch.uint8), tensors[origin].view(torch.uint8)):
            raise UpdateRejected(f"{origin} and {name} are tied in the module and differ in the update; untie one side")
