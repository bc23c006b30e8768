"""The record of a run, the hardware table and the timer."""

from __future__ import annotations

import json
import time

import pytest

from rlk_ops.bench import TARGETS, Record, Timing, find_target, read_records, time_calls, write_records
from rlk_ops.device import Device


def test_percentiles_are_nearest_rank():
    timing = Timing(tuple(float(n) for n in range(100, 0, -1)))
    assert (timing.median, timing.percentile(50), timing.percentile(90), timing.percentile(99)) == (50.5, 50, 90, 99)
    assert Timing((3.0,)).percentile(99) == 3.0


def test_the_timer_waits_counts_and_leaves_out_the_warm_up():
    calls = []
    timing = time_calls(lambda: (calls.append(1), time.sleep(0.02)), device=Device.parse("cpu"), warmup=2, repeats=3)
    assert len(calls) == 5
    assert len(timing.milliseconds) == 3
    assert min(timing.milliseconds) >= 20.0  # sleep never returns early


def test_the_timer_flushes_and_refuses_no_repeats():
    assert (
        len(time_calls(lambda: None, device=Device.parse("cpu"), warmup=0, repeats=1, flush_cache=True).milliseconds)
        == 1
    )
    with pytest.raises(ValueError, match="repeats=0"):
        time_calls(lambda: None, repeats=0)


def test_rates_follow_from_the_median_and_survive_the_file(tmp_path):
    record = Record.of(
        "matmul", Timing((1.0, 2.0, 4.0)), Device.parse("cpu"), parameters={"n": 8}, tokens=100, flops=4e9,
        peak_memory_bytes=7, extra={"ratio": 0.5},
    )  # fmt: skip
    assert record.tokens_per_s == pytest.approx(100 / 0.002)
    assert record.tflops == pytest.approx(2.0)
    assert record.fraction_of_peak is None  # a CPU is in no table, and nothing is guessed
    assert record.target is None
    assert record.latency_ms == {"p50": 2.0, "p90": 4.0, "p99": 4.0, "min": 1.0, "max": 4.0}
    write_records(tmp_path / "deep" / "r.json", [record, record])
    assert read_records(tmp_path / "deep" / "r.json") == [record, record]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["r.json"]


def test_a_file_of_something_else_is_named(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps([{"workload": "x"}]))
    with pytest.raises(ValueError, match=r"r\.json: no list of records"):
        read_records(tmp_path / "r.json")


class Named:
    is_gpu = True

    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("AMD Instinct MI355X OAM", "MI355X"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_parts_are_known_by_their_names_and_unknown_ones_are_not_guessed(name, target):
    found = find_target(Named(name))
    assert (found.name if found else None) == target


def test_the_table_names_its_sources_and_is_dense():
    assert all(target.source and target.bf16_tflops < 3000 and target.bandwidth_gbs > 500 for target in TARGETS)
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    assert len({name for target in TARGETS for name in target.reported}) == sum(len(t.reported) for t in TARGETS)
