"""Digests of bytes at three levels: `off` (structure alone), `sample` (blocks all over), `full` (every byte).

xxh3-128 guards against accidents at memory speed; it is no defence against an adversary. For untrusted storage use
SHA-256.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import xxhash

from rlk_weightsync.errors import DigestMismatch

LEVELS = ("off", "sample", "full")
ALGORITHMS = ("xxh3-128", "sha256")
BLOCK = 4096
SAMPLED_BLOCKS = 256


def content_digest(data: torch.Tensor, level: str, algorithm: str = "xxh3-128") -> str | None:
    """The digest of a block of bytes.

    Args:
        data: (n,) uint8 on the CPU, contiguous.
        level: `off`, `sample` (the first, the last and 254 strided blocks of 4 KiB, and the length) or `full`.
        algorithm: `xxh3-128` or `sha256`.

    Returns:
        `algorithm:level:hex`, or None at level `off`.
    """
    if level not in LEVELS or algorithm not in ALGORITHMS:
        raise ValueError(f"level={level!r}, algorithm={algorithm!r}: expected one of {LEVELS} and of {ALGORITHMS}")
    if level == "off":
        return None
    hasher: Any = xxhash.xxh3_128() if algorithm == "xxh3-128" else hashlib.sha256()
    buffer: Any = data.numpy()
    view = memoryview(buffer)
    if level == "full" or len(view) <= BLOCK * SAMPLED_BLOCKS:
        hasher.update(view)
    else:
        last = len(view) - BLOCK
        for block in range(SAMPLED_BLOCKS):
            start = last * block // (SAMPLED_BLOCKS - 1)
            hasher.update(view[start : start + BLOCK])
    hasher.update(len(view).to_bytes(8, "little"))
    return f"{algorithm}:{level}:{hasher.hexdigest()}"


def verify_digest(data: torch.Tensor, expected: str | None, what: str) -> None:
    """Raise :class:`DigestMismatch` unless the bytes are those whose digest is given; None verifies nothing."""
    if expected is None:
        return
    algorithm, _, rest = expected.partition(":")
    level = rest.partition(":")[0]
    if algorithm not in ALGORITHMS or level not in LEVELS[1:]:
        raise DigestMismatch(f"{what}: digest {expected!r:.80} is of no known form")
    found = content_digest(data, level, algorithm)
    if found != expected:
        raise DigestMismatch(f"{what}: its bytes are not those that were published ({found} against {expected})")
