"""Where tensors are, in terms that another process understands. Small, since this package imports no sibling."""

from __future__ import annotations

import functools
import os
import time
import uuid
from pathlib import Path

import torch

_IMPORTED_AT = time.time_ns()


@functools.cache
def host_id() -> str:
    """The running kernel's boot id: the same in every process and container of this host until it restarts.

    Where there is none (no Linux), the machine's network address: the same across restarts.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text().strip() if boot_id.exists() else f"node-{uuid.getnode():012x}"


@functools.cache
def start_time(pid: int) -> int:
    """Clock ticks since boot at which a process started; with the pid it names the process for good.

    Where there is no /proc, nanoseconds since the epoch at which this process imported the package.
    """
    stat = Path(f"/proc/{pid}/stat")
    return int(stat.read_text().rpartition(")")[2].split()[19]) if stat.exists() else _IMPORTED_AT


def user_id() -> int:
    """The process's user, 0 on systems without numeric users."""
    return os.getuid() if hasattr(os, "getuid") else 0


def device_id(device: torch.device) -> str:
    """`cpu`, or the kind and canonical UUID of an accelerator."""
    if device.type == "cpu":
        return "cpu"
    visible = [label for label in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if label]
    index = device.index or 0
    sliced = index < len(visible) and visible[index].startswith("MIG-")
    label = str(torch.cuda.get_device_properties(device).uuid)
    return canonical_device(label if label.startswith(("GPU-", "MIG-")) else f"{'MIG' if sliced else 'GPU'}-{label}")


def canonical_device(label: str) -> str:
    """One form for `GPU-…` and `MIG-…`, whoever wrote them and in whatever case.

    Raises:
        ValueError: the label says neither, or holds no UUID: a device is never guessed.
    """
    kind, _, number = label.partition("-")
    if kind not in ("GPU", "MIG"):
        raise ValueError(f"device label {label!r:.80}: expected GPU-UUID or MIG-UUID")
    try:
        return f"{kind.lower()}:{uuid.UUID(number)}"
    except ValueError:
        raise ValueError(f"device label {label!r:.80} holds no UUID") from None


def synchronize(device: torch.device) -> None:
    """Wait until the device's queued work is done; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
