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
    """

    name: str
    vendor: str
    arch: str
    bf16_tflops: float
    bandwidth_gbs: float
    memory_gb: float
    source: str


# Dense figures; the makers' sheets often lead with the twice as large sparse ones.
TARGETS = (
    HardwareTarget("A100 SXM 80GB", "nvidia", "sm_80", 312, 2039, 80, "NVIDIA A100 datasheet"),
    HardwareTarget("L40S", "nvidia", "sm_89", 362, 864, 48, "NVIDIA L40S datasheet"),
    HardwareTarget("H100 SXM", "nvidia", "sm_90", 989, 3350, 80, "NVIDIA H100 datasheet"),
    HardwareTarget("H100 PCIe", "nvidia", "sm_90", 756, 2000, 80, "NVIDIA H100 datasheet"),
    HardwareTarget("H200", "nvidia", "sm_90", 989, 4800, 141, "NVIDIA H200 datasheet"),
    HardwareTarget("B200", "nvidia", "sm_100", 2250, 8000, 180, "NVIDIA DGX B200 datasheet, per GPU"),
    HardwareTarget("MI300X", "amd", "gfx942", 1307, 5300, 192, "AMD Instinct MI300X datasheet"),
    HardwareTarget("MI325X", "amd", "gfx942", 1307, 6000, 256, "AMD Instinct MI325X datasheet"),
    HardwareTarget("MI350X", "amd", "gfx950", 2300, 8000, 288, "AMD Instinct MI350X datasheet"),
    HardwareTarget("MI355X", "amd", "gfx950", 2500, 8000, 288, "AMD Instinct MI355X datasheet"),
)


def find_target(device: Device) -> HardwareTarget | None:
    """The part that a device is, by its name, variants told apart; None where it is not in the table."""
    words = device.name.upper().replace("-", " ").split()
    if not device.is_gpu:
        return None
    for target in TARGETS:
        wanted = target.name.upper().split()
        model, variant = wanted[0], wanted[1] if len(wanted) > 1 else None
        if model in words and (variant in (None, "SXM") or variant in words):
            if variant == "SXM" and "PCIE" in words:
                continue
            return target
    return None
