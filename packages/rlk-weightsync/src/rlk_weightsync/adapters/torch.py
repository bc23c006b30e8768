"""Install into a plain torch module, in place: the same parameters keep their addresses and get new values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from rlk_weightsync.adapters.base import Fitness
from rlk_weightsync.arena import copy_all, fingerprint, place, require_plain_tensor
from rlk_weightsync.device import synchronize
from rlk_weightsync.errors import ShapeInvalid, UpdateRejected, WeightSyncError
from rlk_weightsync.integrity import digest_of_all
from rlk_weightsync.manifest import DTYPE_NAMES, Manifest

MOST_NAMED = 5


@dataclass(frozen=True)
class _Plan:
    """What a module's tensors are to an installation.

    Attributes:
        fingerprint: of the tensors that it was made for.
        ties: name to the earlier name whose memory it is.
    """

    fingerprint: tuple[object, ...] | None
    ties: Mapping[str, str]


class TorchAdapter:
    """Copies a full update of checkpoint format into a module whose state dict has exactly its names.

    What is not in the state dict, such as non-persistent buffers, keeps its bits; that is checked after every
    installation.

    Args:
        module: any module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._fitness = Fitness()
        self._plan: _Plan | None = None

    @property
    def fitness(self) -> Fitness:
        """Of the module: whether its weights are defined."""
        return self._fitness

    def preflight(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise UpdateRejected unless names, shapes, dtypes and ties all fit; nothing is written."""
        if manifest.kind != "full" or manifest.format != "checkpoint":
            raise UpdateRejected(
                f"a {manifest.kind} update of {manifest.format} format; expected a full one of checkpoint format"
            )
        targets = self._targets()
        plan = self._planned(targets)
        _check_names(targets, tensors)
        for name, target in targets.items():
            _check_layout(name, target, tensors[name])
        for entry in manifest.tensors:
            if entry.shard is not None:
                raise UpdateRejected(f"{entry.name}: part {entry.shard.rank} of {entry.shard.world}; expected it whole")
        for name, origin in plan.ties.items():
            _check_tie(name, origin, tensors)

    def install(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
        """Copy every tensor; a module's tied tensors are written once and reported `aliased`.

        Raises:
            WeightSyncError: something that the update does not name has changed.
        """
        targets = self._targets()
        plan = self._planned(targets)
        others = self._others(targets)
        before = digest_of_all(others)
        names = [name for name in targets if name not in plan.ties]
        copy_all([targets[name] for name in names], [tensors[name] for name in names])
        for device in {target.device for target in targets.values()}:
            synchronize(device)
        if digest_of_all(others) != before:
            raise WeightSyncError("a tensor that the update does not name has changed")
        return {name: "aliased" if name in plan.ties else "copied" for name in targets}

    def read_back(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """The module's tensors as they are now."""
        targets = self._targets()
        return [targets[name] for name in names]

    def reset_caches(self) -> str:
        """A plain module has no cache."""
        return "a plain module has none"

    def require_usable(self) -> None:
        """Raise Poisoned where an installation died half-way."""
        self._fitness.require_usable()

    def _targets(self) -> dict[str, torch.Tensor]:
        return dict(self._module.state_dict(keep_vars=True))

    def _planned(self, targets: Mapping[str, torch.Tensor]) -> _Plan:
        """What is written and what is tied; made anew only where the module's tensors lie elsewhere than before."""
        found = fingerprint(targets)
        if self._plan is None or found is None or self._plan.fingerprint != found:
            self._check_state(targets)
            _check_overlaps(targets)
            first: dict[tuple[object, ...], str] = {}
            origins = {name: first.setdefault(place(t), name) for name, t in targets.items() if t.numel()}
            ties = {name: origin for name, origin in origins.items() if name != origin}
            self._plan = _Plan(found, ties)
        return self._plan

    def _check_state(self, targets: Mapping[str, torch.Tensor]) -> None:
        """A state dict may hold tensors made for it alone, by a hook; a copy into those would reach nothing."""
        owned = {tensor.untyped_storage().data_ptr() for tensor in self._everything()}
        for name, target in targets.items():
            try:
                require_plain_tensor(name, target)
            except ShapeInvalid as error:
                raise UpdateRejected(f"the module's state: {error}") from None
            if target.numel() and target.untyped_storage().data_ptr() not in owned:
                raise UpdateRejected(f"{name}: a state-dict hook makes it; the module holds no such tensor to write to")

    def _others(self, targets: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Parameters and buffers that share no storage with what is written."""
        written = {target.untyped_storage().data_ptr() for target in targets.values()}
        return [t for t in self._everything() if t.untyped_storage().data_ptr() not in written and not t.is_meta]

    def _everything(self) -> list[torch.Tensor]:
        return [*self._module.parameters(), *self._module.buffers()]


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


def _check_tie(name: str, origin: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Names that the module ties must hold the same values."""
    if tensors[name] is not tensors[origin] and digest_of_all([tensors[name]]) != digest_of_all([tensors[origin]]):
        raise UpdateRejected(f"{origin} and {name} are tied in the module and differ in the update; untie one side")


def _check_overlaps(targets: Mapping[str, torch.Tensor]) -> None:
    """Tensors that share a part of their memory cannot all get the values they are sent."""
    extents: dict[tuple[object, ...], tuple[object, int, int, str]] = {}
    for name, target in targets.items():
        if not target.numel():
            continue
        reach = 1 + sum((size - 1) * step for size, step in zip(target.shape, target.stride(), strict=True))
        repeated = any(step == 0 and size > 1 for size, step in zip(target.shape, target.stride(), strict=True))
        if repeated or reach < target.numel():
            raise UpdateRejected(f"{name}: several of the module's elements are one in memory; make it contiguous")
        start = target.data_ptr()
        extents.setdefault(place(target), (str(target.device), start, start + reach * target.element_size(), name))
    for (device, _, stop, name), (other_device, start, _, other) in pairwise(sorted(extents.values())):
        if start < stop and device == other_device:
            raise UpdateRejected(f"{name} and {other} share a part of their memory in the module; make one a copy")
