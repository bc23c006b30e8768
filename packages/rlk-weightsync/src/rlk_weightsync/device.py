"""Where tensors are, in terms that another process understands. Small, since this package imports no sibling."""

from __future__ import annotations

import functools
from pathlib import Path

import torch


@functools.cache
def host_id() -> str:
    """The running kernel's boot id: the same in every process and container of this host until it restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def process_start_time(pid: int) -> int:
    """Clock ticks since boot at which a process started; with the pid it names the process for good."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def device_id(device: torch.device) -> str:
    """`cpu`, or the kind and canonical UUID of an accelerator."""
    if device.type == "cpu":
        return "cpu"
    return f"gpu:{torch.cuda.get_device_properties(device).uuid}"


def synchronize(device: torch.device) -> None:
    """Wait until the device's queued work is done; nothing to wait for on the CPU."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
