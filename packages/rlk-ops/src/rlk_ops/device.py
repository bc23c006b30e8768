"""The hardware-aware context: one object that knows NVIDIA, AMD and CPU, so that nothing else asks.

PyTorch drives NVIDIA and AMD through the same `torch.cuda` interface; which of the two it was built for decides whether
the backend is called `cuda` or `rocm`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import platform
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

BACKENDS = ("cpu", "cuda", "rocm")

_REMEDY = {
    "cuda": "install a CUDA build of PyTorch and an NVIDIA driver, check CUDA_VISIBLE_DEVICES, or ask for 'cpu'",
    "rocm": "install a ROCm build of PyTorch and the amdgpu driver, check HIP_VISIBLE_DEVICES, or ask for 'cpu'",
}
_entered = threading.local()


class DeviceUnavailable(RuntimeError):
    """A backend or a device index that was asked for is absent; the message says what is there and the remedy."""


class Event(Protocol):
    """A point in a device's work."""

    def record(self) -> None:
        """Mark this point in the current stream."""

    def synchronize(self) -> None:
        """Wait until the work before this point is done."""

    def milliseconds_since(self, start: Event) -> float:
        """Time from `start` to this event; waits for both."""


class _CpuEvent:
    """CPU work is done when the call returns, so an event is the clock."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is pending on a CPU."""

    def milliseconds_since(self, start: Event) -> float:
        if not isinstance(start, _CpuEvent) or start.seconds is None or self.seconds is None:
            raise ValueError("start: expected an event of the same device, both recorded; call record() on each")
        return (self.seconds - start.seconds) * 1e3


class _GpuEvent:
    def __init__(self, index: int) -> None:
        self.index = index
        self.event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self.event.record(torch.cuda.current_stream(self.index))

    def synchronize(self) -> None:
        self.event.synchronize()

    def milliseconds_since(self, start: Event) -> float:
        if not isinstance(start, _GpuEvent):
            raise ValueError("start: expected an event of the same device")
        self.event.synchronize()
        return float(start.event.elapsed_time(self.event))


@dataclass(frozen=True)
class Device:
    """One CPU or one GPU; `with device:` sets the current device, its stream and the seeds, and restores them.

    Attributes:
        backend: "cpu", "cuda" (NVIDIA) or "rocm" (AMD).
        index: which GPU; 0 for the CPU.
        seed: within the `with` block the CPU's and the GPU's random generators start from it. None leaves them alone.
        stream: a stream of :meth:`new_stream`, current within the `with` block. None leaves it alone.

    Raises:
        ValueError: an unknown backend, or an option that the CPU does not have.
        DeviceUnavailable: the backend or the index is not on this machine.
    """

    backend: str
    index: int = 0
    seed: int | None = field(default=None, kw_only=True)
    stream: Any = field(default=None, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            near = difflib.get_close_matches(str(self.backend), BACKENDS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"backend: {self.backend!r}{hint}; expected one of {', '.join(BACKENDS)}")
        if self.backend == "cpu":
            self._check_cpu()
        else:
            self._check_gpu()

    def _check_cpu(self) -> None:
        if self.index != 0:
            raise ValueError(f"index: the CPU is one device, index 0, got {self.index}")
        if self.stream is not None:
            raise ValueError("stream: the CPU has none; leave it out")

    def _check_gpu(self) -> None:
        present = gpu_backend()
        if present != self.backend:
            found = f"a {present} device is" if present else "no GPU is"
            message = f"backend {self.backend!r} was asked for, but {found} visible to torch {torch.__version__}; "
            raise DeviceUnavailable(message + _REMEDY[self.backend])
        count = torch.cuda.device_count()
        if not 0 <= self.index < count:
            raise DeviceUnavailable(f"{self.backend}:{self.index} was asked for; indices 0 to {count - 1} are visible")

    @classmethod
    def parse(cls, spec: Device | torch.device | str, *, seed: int | None = None) -> Device:
        """A device from "cpu", "cuda:1", "rocm", a `torch.device` or a :class:`Device` (whose stream is kept).

        "cuda" without an index is the current GPU. A `torch.device("cuda")` is an AMD GPU under a ROCm build.
        """
        if isinstance(spec, Device):
            return cls(spec.backend, spec.index, seed=spec.seed if seed is None else seed, stream=spec.stream)
        if isinstance(spec, torch.device):
            backend = (gpu_backend() or "cuda") if spec.type == "cuda" else spec.type
            return cls(backend, _index(backend, spec.index), seed=seed)
        if not isinstance(spec, str):
            raise TypeError(f"device: expected a string, torch.device or Device, got {type(spec).__name__}")
        backend, colon, number = spec.partition(":")
        if colon and not number.isdigit():
            raise ValueError(f"device: {spec!r} is not of the form backend or backend:index")
        return cls(backend, _index(backend, int(number) if colon else None), seed=seed)

    @property
    def is_gpu(self) -> bool:
        """Whether this is a GPU of either maker."""
        return self.backend != "cpu"

    @property
    def torch_device(self) -> torch.device:
        """The name that PyTorch uses: an AMD GPU is "cuda" there."""
        return torch.device("cuda", self.index) if self.is_gpu else torch.device("cpu")

    @property
    def name(self) -> str:
        """The product's name, as the driver reports it."""
        return str(torch.cuda.get_device_name(self.index)) if self.is_gpu else _cpu_name()

    @property
    def arch(self) -> str:
        """The architecture: "sm_90", "gfx942", or "cpu"."""
        if self.backend == "cuda":
            major, minor = torch.cuda.get_device_capability(self.index)
            return f"sm_{major}{minor}"
        if self.backend == "rocm":
            return str(torch.cuda.get_device_properties(self.index).gcnArchName).split(":")[0]
        return "cpu"

    @property
    def uuid(self) -> str | None:
        """The GPU's identity, the same in every process and container; None for the CPU."""
        return str(torch.cuda.get_device_properties(self.index).uuid) if self.is_gpu else None

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors, compute units, or the CPU's usable cores."""
        if self.is_gpu:
            return int(torch.cuda.get_device_properties(self.index).multi_processor_count)
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def total_memory(self) -> int:
        """Bytes of device memory, or of physical memory."""
        if self.is_gpu:
            return int(torch.cuda.get_device_properties(self.index).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    @property
    def free_memory(self) -> int:
        """Bytes that a new allocation could take now, by the driver's or the kernel's account."""
        if self.is_gpu:
            return int(torch.cuda.mem_get_info(self.index)[0])
        available = _proc_bytes("/proc/meminfo", "MemAvailable")
        return available if available is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak_memory(self) -> int:
        """Bytes: the most that PyTorch's tensors took on the GPU, or that the process held resident on the CPU.

        Counted since :meth:`reset_peak_memory`, or since the process began.
        """
        if self.is_gpu:
            return int(torch.cuda.max_memory_allocated(self.index))
        peak = _proc_bytes("/proc/self/status", "VmHWM")
        return peak if peak is not None else _lifetime_peak()

    def reset_peak_memory(self) -> None:
        """Start :meth:`peak_memory` afresh.

        Raises:
            DeviceUnavailable: the operating system keeps only the process's lifetime peak (anything but Linux).
        """
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.index)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets VmHWM, proc(5)
        except OSError as error:
            raise DeviceUnavailable(f"this system cannot reset a process's peak memory: {error}; use Linux") from error

    def synchronize(self) -> None:
        """Wait for all of the device's work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.index)

    def event(self) -> Event:
        """A new event, for timing and for waiting."""
        return _GpuEvent(self.index) if self.is_gpu else _CpuEvent()

    def new_stream(self) -> Any:
        """A stream of this GPU, for `Device(..., stream=...)`; None on the CPU, which has none."""
        return torch.cuda.Stream(self.index) if self.is_gpu else None

    def current_stream(self) -> Any:
        """The GPU's current stream; None on the CPU."""
        return torch.cuda.current_stream(self.index) if self.is_gpu else None

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU's generator and, on a GPU, this GPU's."""
        torch.default_generator.manual_seed(seed)
        if self.is_gpu:
            with torch.cuda.device(self.index):
                torch.cuda.manual_seed(seed)

    def __enter__(self) -> Device:
        with contextlib.ExitStack() as stack:
            if self.is_gpu:
                stack.enter_context(torch.cuda.device(self.index))
                stack.enter_context(torch.cuda.stream(self.stream))
            if self.seed is not None:
                stack.callback(torch.set_rng_state, torch.get_rng_state())
                if self.is_gpu:
                    stack.callback(torch.cuda.set_rng_state, torch.cuda.get_rng_state(self.index), self.index)
                self.manual_seed(self.seed)
            _entries().append((self, stack.pop_all()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _, stack = _entries().pop()
        stack.__exit__(kind, error, trace)

    def __str__(self) -> str:
        return f"{self.backend}:{self.index}" if self.is_gpu else "cpu"


def gpu_backend() -> str | None:
    """The backend of the usable GPUs, "cuda" or "rocm"; None where there is none."""
    if not torch.cuda.is_available():
        return None
    return "rocm" if torch.version.hip else "cuda"


def current_device() -> Device:
    """The innermost `with device:` of this thread; else the current GPU; else the CPU."""
    if _entries():
        return _entries()[-1][0]
    backend = gpu_backend()
    return Device(backend, torch.cuda.current_device()) if backend else Device("cpu")


def _entries() -> list[tuple[Device, contextlib.ExitStack]]:
    if not hasattr(_entered, "entries"):
        _entered.entries = []
    entries: list[tuple[Device, contextlib.ExitStack]] = _entered.entries
    return entries


def _index(backend: str, index: int | None) -> int:
    if index is not None:
        return index
    return torch.cuda.current_device() if backend != "cpu" and gpu_backend() == backend else 0


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _proc_bytes(path: str, key: str) -> int | None:
    if not os.path.exists(path):
        return None
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _lifetime_peak() -> int:
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024  # getrusage(2): bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
