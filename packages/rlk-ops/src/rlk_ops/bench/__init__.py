"""Measuring: the record of a run, the hardware it ran on, the timer."""

from rlk_ops.bench.hardware import TARGETS, HardwareTarget, find_target
from rlk_ops.bench.record import Record, read_records, write_records
from rlk_ops.bench.timer import Timing, time_calls

__all__ = [
    "TARGETS",
    "HardwareTarget",
    "Record",
    "Timing",
    "find_target",
    "read_records",
    "time_calls",
    "write_records",
]
