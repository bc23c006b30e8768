"""Hardware targets: what the makers say of a part, so that a measurement can be given as a fraction of it."""

from __future__ import annotations

from dataclasses import dataclass

from rlk_ops.device import Device


@dataclass(frozen=True)
class HardwareTarget:
    """One part.

    Attributes:
        name: as its maker calls it.
        vendor: `nvidia` or `amd`.
        arch: compiler target (`sm_90`, `gfx942`).
        bf16_tflops: dense bf16 peak of the matrix units, TFLOP/s.
        bandwidth_gbs: memory bandwidth, GB/s.
        memory_gb: memory, GB.
        source: the document that says so.
        reported: the names under which drivers report it, in lower case.
    """

    name: str
    vendor: str
    arch: str
    bf16_tflops: float
    bandwidth_gbs: float
    memory_gb: float
    source: str
    reported: tuple[str, ...]


def _nvidia(name: str, arch: str, tflops: float, bandwidth: float, memory: float, *reported: str) -> HardwareTarget:
    source = f"NVIDIA {name.split()[0]} datasheet"
    return HardwareTarget(name, "nvidia", arch, tflops, bandwidth, memory, source, reported)


def _instinct(model: str, arch: str, tflops: float, bandwidth: float, memory: float) -> HardwareTarget:
    reported = tuple(f"amd instinct {model.lower()}{suffix}" for suffix in ("", " oam"))
    return HardwareTarget(model, "amd", arch, tflops, bandwidth, memory, f"AMD Instinct {model} datasheet", reported)


# Dense figures; the makers' sheets often lead with the twice as large sparse ones. B200: a DGX B200's, per GPU.
TARGETS = (
    _nvidia("A100 SXM 80GB", "sm_80", 312, 2039, 80, "nvidia a100-sxm4-80gb"),
    _nvidia("A100 SXM 40GB", "sm_80", 312, 1555, 40, "nvidia a100-sxm4-40gb"),
    _nvidia("A100 PCIe 80GB", "sm_80", 312, 1935, 80, "nvidia a100 80gb pcie"),
    _nvidia("L40S", "sm_89", 362, 864, 48, "nvidia l40s"),
    _nvidia("H100 SXM", "sm_90", 989, 3350, 80, "nvidia h100 80gb hbm3"),
    _nvidia("H100 PCIe", "sm_90", 756, 2000, 80, "nvidia h100 pcie"),
    _nvidia("H200", "sm_90", 989, 4800, 141, "nvidia h200"),
    _nvidia("B200", "sm_100", 2250, 8000, 180, "nvidia b200"),
    _instinct("MI300X", "gfx942", 1307, 5300, 192),
    _instinct("MI325X", "gfx942", 1307, 6000, 256),
    _instinct("MI350X", "gfx950", 2300, 8000, 288),
    _instinct("MI355X", "gfx950", 2500, 8000, 288),
)


def find_target(device: Device) -> HardwareTarget | None:
    """The part that a device is, by the exact name that its driver reports; None where the table does not have it.

    A near name is another part: an H100 NVL is no H100 SXM, and a fraction of the wrong peak is worse than none.
    """
    wanted = " ".join(device.name.lower().split())
    return next((target for target in TARGETS if device.is_gpu and wanted in target.reported), None)
