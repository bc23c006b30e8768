"""The local copying transport against a plain copy of the same bytes, in one run: ratios, not seconds.

python benchmarks/bench_weightsync_local.py [--device cpu] [--mib 512] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from rlk_ops import Device
from rlk_ops.bench import Record, time_calls, write_records
from rlk_weightsync import Consumer, Local, Manifest, Publisher, codec
from rlk_weightsync.adapters.torch import TorchAdapter
from rlk_weightsync.integrity import content_digest

RESULTS = Path(__file__).parent / "results"


class Holder(torch.nn.Module):
    """A module with these tensors as its state."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.empty_like(tensor))


def payload(mib: int, count: int) -> dict[str, torch.Tensor]:
    elements = (mib << 20) // 4 // count
    return {f"t{i}": torch.randn(elements) for i in range(count)}


def phases(tensors: dict[str, torch.Tensor], integrity: str, rounds: int) -> dict[str, float]:
    """Median seconds of publish, import and install; the first rounds, which fault pages in, are left out."""
    adapter, taken = TorchAdapter(Holder(tensors)), []
    with Publisher(Local(), run_id="bench", integrity=integrity) as publisher:
        for version in range(1, rounds + 4):
            started = time.perf_counter()
            update = publisher.publish(tensors, version=version)
            published = time.perf_counter() - started
            with Consumer(update.ticket()) as consumer:
                consumer.import_update()
                receipt = consumer.install(adapter, caches="reset")
                consumer.acknowledge(receipt)
            if version > 3:
                taken.append({"publish": published, **receipt.seconds})
    return {name: sorted(row[name] for row in taken)[len(taken) // 2] for name in taken[0]}


def sync_record(device: Device, mib: int, count: int) -> Record:
    tensors = payload(mib, count)
    source = torch.cat([t.view(torch.uint8) for t in tensors.values()])
    target = torch.empty_like(source)
    copy = time_calls(lambda: target.copy_(source), device=device, repeats=9)
    baseline = copy.median / 1e3
    off, full = phases(tensors, "off", 7), phases(tensors, "full", 7)
    digest = time_calls(lambda: content_digest(source, "full"), device=device, repeats=3).median / 1e3
    ratios = {f"{name}_of_copy": baseline / off[name] for name in ("publish", "import", "install")}
    ratios |= {"digest_gb_per_s": source.numel() / digest / 1e9, "round_ms_full": 1e3 * sum(full.values())}
    parameters = {"mib": mib, "tensors": count}
    return Record.of("weightsync local", copy, device, parameters=parameters, extra=ratios)


def small_record(device: Device) -> Record:
    """A whole round of a tiny model, as a loop does it every step."""
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(40)}
    adapter, version = TorchAdapter(Holder(tensors)), iter(range(1_000_000))
    with Publisher(Local(), run_id="bench", integrity="full") as publisher:

        def whole_round() -> None:
            update = publisher.publish(tensors, version=next(version))
            with Consumer(update.ticket()) as consumer:
                consumer.import_update()
                consumer.acknowledge(consumer.install(adapter, caches="reset"))
            update.wait(timeout=30)

        timing = time_calls(whole_round, device=device, warmup=20, repeats=200)
    return Record.of("weightsync round", timing, device, parameters={"tensors": 40, "elements": 64 * 64},
                     extra={"round_ms_full": timing.median})  # fmt: skip


def manifest_record(device: Device, count: int = 20_000) -> Record:
    """Encode, decode and validate a manifest of many tensors, with each codec."""
    shared = torch.zeros(2, 3)
    tensors = {f"model.layers.{i}.self_attn.q_proj.weight": shared.clone() for i in range(count)}
    with Publisher(Local(), run_id="bench") as publisher:
        made = publisher.publish(tensors, version=1).manifest
    data = made.canonical
    fields = {name: value for name, value in vars(made).items() if name not in ("canonical", "manifest_id", "by_name")}

    def round_trip() -> None:
        Manifest.from_bytes(Manifest(**fields).canonical)

    fast = time_calls(round_trip, device=device, warmup=1, repeats=9)
    with codec.using_codec(codec.STANDARD):
        standard = time_calls(round_trip, device=device, warmup=1, repeats=9)
    extra = {
        "standard_library_ms": standard.median,
        "fast_codec_ms": fast.median,
        "bytes_per_tensor": len(data) / count,
    }
    return Record.of("weightsync manifest", fast, device, parameters={"tensors": count}, extra=extra)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="must be cpu: the local transport works in host memory")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS / "weightsync_local.json")
    options = parser.parse_args()
    device = Device.parse("cpu")
    records = [sync_record(device, options.mib, count) for count in (64, 10_000)]
    records += [small_record(device), manifest_record(device)]
    for record in records:
        numbers = "  ".join(f"{name} {value:.2f}" for name, value in record.extra.items())
        print(f"{record.workload} {record.parameters}: p50 {record.latency_ms['p50']:.2f} ms  {numbers}")
    write_records(options.out, records)


if __name__ == "__main__":
    main()
