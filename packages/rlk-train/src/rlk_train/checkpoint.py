"""Checkpoints in one safetensors file: written whole or not at all, read without running any code.

Tensors lie under `weights/`, `optimizer/` and `rng/`; everything else is JSON in the file's metadata. The file is
written to a temporary sibling folder, flushed to the disk and renamed, so a kill or a full disk leaves the previous
checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FORMAT = 1
_METADATA_KEY = "rlk_train"


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or belongs to another model or configuration."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        tensors: by flat name.
        state: JSON-able values by name.
    """

    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]


def write_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write the file atomically; on any failure the temporary is removed and what stood at `path` stays.

    Tensors that share one memory (tied weights) are stored once and come back under each name.

    Raises:
        OSError: the disk refused (full, not writable, no such folder).
        TypeError: the state holds something that is not JSON.
    """
    target = Path(path)
    stored, aliases = _without_aliases(checkpoint.tensors)
    document = {"format": FORMAT, "aliases": aliases, "state": dict(checkpoint.state)}
    try:
        metadata = {_METADATA_KEY: json.dumps(document)}
    except (TypeError, ValueError) as error:
        raise TypeError(f"the checkpoint's state must be JSON-able (extra holds the caller's part): {error}") from error
    # A folder, because safetensors writes to a temporary of its own beside its target: what a kill leaves goes with it.
    folder = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        save_file(stored, folder / target.name, metadata=metadata)
        _flush(folder / target.name)
        os.replace(folder / target.name, target)
    except SafetensorError as error:
        raise OSError(f"cannot write checkpoint {target}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _flush(target.parent)


def read_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a file that :func:`write_checkpoint` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is not a checkpoint of this format.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    if _METADATA_KEY not in metadata:
        raise CheckpointError(f"{path} is a safetensors file but not a checkpoint of rlk_train")
    document = json.loads(metadata[_METADATA_KEY])
    if document["format"] != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {document['format']}; this version reads {FORMAT}")
    tensors.update({name: tensors[first] for name, first in document["aliases"].items()})
    return Checkpoint(tensors, document["state"])


def rng_state(device: torch.device) -> Checkpoint:
    """The state of the random generators: torch's (CPU and `device`), python's, and numpy's where it is imported."""
    tensors = {"rng/torch": torch.get_rng_state()}
    if device.type != "cpu":
        tensors["rng/device"] = torch.get_device_module(device).get_rng_state(device)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss]}
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), position, has_gauss, cached]
    return Checkpoint(tensors, {"rng": state})


def restore_rng(checkpoint: Checkpoint, device: torch.device) -> None:
    """Set every random generator as :func:`rng_state` found it."""
    torch.set_rng_state(checkpoint.tensors["rng/torch"].cpu())
    if device.type != "cpu" and "rng/device" in checkpoint.tensors:
        torch.get_device_module(device).set_rng_state(checkpoint.tensors["rng/device"].cpu(), device)
    state = checkpoint.state["rng"]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))


def check_same(what: str, saved: Mapping[str, Any], current: Mapping[str, Any], remedy: str) -> None:
    """Raise :class:`CheckpointError` that shows where two descriptions differ, at most three places."""
    names = [n for n in sorted({*saved, *current}) if saved.get(n, "absent") != current.get(n, "absent")]
    if names:
        shown = "; ".join(f"{n}: saved {saved.get(n, 'absent')}, here {current.get(n, 'absent')}" for n in names[:3])
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        raise CheckpointError(f"the checkpoint is of another {what}: {shown}{more}. {remedy}")


def _without_aliases(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    first_name: dict[tuple[Any, ...], str] = {}
    stored, aliases = {}, {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in first_name:
            aliases[name] = first_name[place]
            continue
        first_name[place] = name
        stored[name] = _owning(tensor)
    return stored, aliases


def _owning(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor alone in its memory: safetensors refuses views into a larger or shared storage."""
    detached = tensor.detach()
    whole = detached.untyped_storage().nbytes() == detached.numel() * detached.element_size()
    return detached if whole and detached.is_contiguous() else detached.contiguous().clone()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
