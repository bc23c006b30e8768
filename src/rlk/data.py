"""Prompts from JSON lines, each with the place that it came from."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk.errors import InputError

Example = Mapping[str, Any]


@dataclass(frozen=True)
class Prompts:
    """Examples and where each stands (`file:line`)."""

    examples: tuple[Example, ...]
    places: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)

    def pick(self, indices: Sequence[int]) -> Prompts:
        """These examples alone."""
        return Prompts(tuple(self.examples[i] for i in indices), tuple(self.places[i] for i in indices))


def embedded(examples: Sequence[Example], name: str) -> Prompts:
    """Examples that stand in no file."""
    return Prompts(tuple(examples), tuple(f"{name}:{number}" for number in range(1, len(examples) + 1)))


def load_prompts(path: str | Path) -> Prompts:
    """Read `{"prompt": text or messages or ids, ...}` objects, one a line; blank lines are passed over.

    Raises:
        InputError: the file is absent or empty, or a line is no such object; names file and line.
    """
    try:
        # Not splitlines(): JSON allows U+2028 and its like inside a string.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"prompts {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"prompts {path}: no prompt in it; expected one JSON object a line")
    return Prompts(
        tuple(_example(line, f"{path}:{number}") for number, line in numbered),
        tuple(f"{path}:{number}" for number, _ in numbered),
    )


def split(prompts: Prompts, fraction: float, seed: int) -> tuple[Prompts, Prompts]:
    """Training and held-out prompts: disjoint, shuffled by the seed; no held-out ones where the fraction is 0."""
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    held_out = round(len(order) * fraction) if fraction else 0
    if fraction and not 0 < held_out < len(order):
        raise InputError(
            f"data.held_out={fraction} of {len(order)} prompts leaves no prompt on one side; "
            "add prompts, give --eval-prompts, or set --held-out 0"
        )
    return prompts.pick(sorted(order[held_out:])), prompts.pick(sorted(order[:held_out]))


def _example(line: str, place: str) -> Example:
    try:
        example = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, or a whole number of thousands of digits
        raise InputError(f"{place}: cannot be read: {str(error).split(';')[0]}") from error
    if not isinstance(example, dict) or "prompt" not in example:
        raise InputError(f'{place}: expected an object with the key "prompt", got {line.strip()[:80]!r}')
    prompt = example["prompt"]
    messages = isinstance(prompt, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
        for item in prompt
    )
    ids = isinstance(prompt, list) and all(type(item) is int and item >= 0 for item in prompt)
    if not prompt or not (isinstance(prompt, str) or messages or ids):
        raise InputError(
            f'{place}: "prompt" must be text, a list of messages with "role" and "content", or a list of token ids, '
            f"and not empty; got {json.dumps(prompt)[:80]}"
        )
    try:
        json.dumps(example, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no text") from error
    return example
