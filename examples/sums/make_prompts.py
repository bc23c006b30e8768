"""Write train.jsonl and held_out.jsonl: small sums asked in chat form, no sum in both."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

QUESTION = "What is {a} + {b}? Answer with the number only."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder (default: here)")
    parser.add_argument("--largest", type=int, default=20, help="largest summand (default: 20)")
    parser.add_argument("--held-out", type=int, default=100, help="how many sums are held out (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pairs = list(itertools.product(range(1, options.largest + 1), repeat=2))
    random.Random(options.seed).shuffle(pairs)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "held_out.jsonl", pairs[: options.held_out])
    write(options.out / "train.jsonl", pairs[options.held_out :])


def write(path: Path, pairs: list[tuple[int, int]]) -> None:
    lines = (
        json.dumps({"prompt": [{"role": "user", "content": QUESTION.format(a=a, b=b)}], "answer": str(a + b)})
        for a, b in pairs
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
