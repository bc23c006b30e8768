"""The record of one measured run: what was measured, on what, by which command, and when."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rlk_ops.bench.hardware import find_target
from rlk_ops.bench.timer import Timing
from rlk_ops.device import Device


@dataclass(frozen=True)
class Record:
    """One workload, measured once.

    Attributes:
        workload: its name.
        parameters: shapes, dtypes, options.
        latency_ms: p50, p90, p99, min and max.
        repeats: of the timed call.
        tokens_per_s: where the workload has tokens, else None.
        tflops: achieved, where its operations were counted, else None.
        fraction_of_peak: of the part's bf16 peak, where both are known, else None.
        peak_memory_bytes: of the device during the call, or None where it was not measured.
        device: the device's name.
        target: the part's name in the hardware table, or None: unknown.
        versions: python, torch, triton.
        command: how it was started.
        date: ISO 8601, UTC.
        extra: further numbers by name (ratios, errors).
    """

    workload: str
    parameters: Mapping[str, Any]
    latency_ms: Mapping[str, float]
    repeats: int
    tokens_per_s: float | None
    tflops: float | None
    fraction_of_peak: float | None
    peak_memory_bytes: int | None
    device: str
    target: str | None
    versions: Mapping[str, str]
    command: str
    date: str
    extra: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        workload: str,
        timing: Timing,
        device: Device,
        *,
        parameters: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        flops: float | None = None,
        peak_memory_bytes: int | None = None,
        extra: Mapping[str, float] | None = None,
    ) -> Record:
        """The record of a timing.

        Args:
            workload: its name.
            timing: from :func:`rlk_ops.bench.time_calls`.
            device: where it ran.
            parameters: shapes, dtypes, options.
            tokens: handled by one call.
            flops: operations of one call.
            peak_memory_bytes: during it.
            extra: further numbers.
        """
        seconds, target = timing.median / 1e3, find_target(device)
        tflops = flops / seconds / 1e12 if flops else None
        marks = {f"p{percent}": timing.percentile(percent) for percent in (50, 90, 99)}
        return cls(
            workload=workload,
            parameters=dict(parameters or {}),
            latency_ms={**marks, "min": min(timing.milliseconds), "max": max(timing.milliseconds)},
            repeats=len(timing.milliseconds),
            tokens_per_s=tokens / seconds if tokens else None,
            tflops=tflops,
            fraction_of_peak=tflops / target.bf16_tflops if tflops and target else None,
            peak_memory_bytes=peak_memory_bytes,
            device=device.name,
            target=target.name if target else None,
            versions=_versions(),
            command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            extra=dict(extra or {}),
        )


def write_records(path: str | Path, records: Iterable[Record]) -> None:
    """Write records as a JSON list, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(record) for record in records], indent=1, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_records(path: str | Path) -> list[Record]:
    """The records that :func:`write_records` wrote.

    Raises:
        ValueError: the file holds something else; says where.
    """
    try:
        return [Record(**item) for item in json.loads(Path(path).read_text(encoding="utf-8"))]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no list of records: {error}") from error


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    try:
        import triton
    except ImportError:
        return found
    return {**found, "triton": str(triton.__version__)}
