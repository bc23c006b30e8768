"""`rlk train` as a new user runs it, for seeds 0, 1, 2: held-out reward before and after, wall time of the process.

python benchmarks/bench_default_run.py [--device cpu] [--seeds 0 1 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from rlk.files import write_atomic
from rlk.run_folder import RunFolder
from rlk.versions import versions
from rlk_ops import Device

RESULTS = Path(__file__).parent / "results"


def run(seed: int, folder: Path, device: str) -> dict[str, object]:
    command = ["rlk", "train", "--seed", str(seed), "--out", str(folder), "--device", device]
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "rlk.cli", *command[1:]], check=True)
    seconds = time.perf_counter() - started
    steps = RunFolder(folder).metrics()
    before, after = RunFolder(folder).evaluations()
    return {
        "seed": seed,
        "held_out_before": before,
        "held_out_after": after,
        "seconds": round(seconds, 1),
        "steps": len(steps),
        "largest_drift": max(row["drift/max"] for row in steps),
        "tokens_per_s_median": sorted(row["tokens_per_s"] for row in steps)[len(steps) // 2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "default_run.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        runs = [run(seed, Path(parent) / str(seed), options.device) for seed in options.seeds]
    result = {
        "command": "rlk train --seed N",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{Device.parse('cpu').name}, {os.cpu_count()} cores, {platform.system()}",
        "device": options.device,
        "versions": {name: version for name, version in versions().items() if version},
        "runs": runs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
