"""Digests of bytes at three levels: `off` (structure alone), `sample` (blocks all over), `full` (every byte).

xxh3-128 guards against accidents at memory speed; it is no defence against an adversary. For untrusted storage use
SHA-256.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import xxhash

from rlk_weightsync.errors import DigestMismatch

LEVELS = ("off", "sample", "full")
ALGORITHMS = ("xxh3-128", "sha256")
BLOCK = 4096
SAMPLED_BLOCKS = 256
CHUNK = 64 << 20  # hashed at a time, so that Ctrl-C is not kept waiting


def content_digest(data: torch.Tensor, level: str, algorithm: str = "xxh3-128") -> str | None:
    """The digest of a block of bytes.

    Args:
        data: contiguous, on the CPU, any shape and dtype.
        level: `off`, `sample` (the first, the last and 254 strided blocks of 4 KiB, and the length) or `full`.
        algorithm: `xxh3-128` or `sha256`.

    Returns:
        `algorithm:level:hex`, or None at level `off`.
    """
    if level not in LEVELS or algorithm not in ALGORITHMS:
        raise ValueError(f"level={level!r}, algorithm={algorithm!r}: expected one of {LEVELS} and of {ALGORITHMS}")
    if level == "off":
        return None
    view = host_bytes(data)
    hasher = _hasher(algorithm)
    for start, stop in _blocks(len(view), level):
        hasher.update(view[start:stop])
    hasher.update(len(view).to_bytes(8, "little"))
    return f"{algorithm}:{level}:{hasher.hexdigest()}"


def digest_of_all(tensors: Iterable[torch.Tensor], algorithm: str = "xxh3-128") -> str:
    """The full digest of tensors in their order, strides left aside; each is copied to the host in its turn."""
    hasher = _hasher(algorithm)
    for tensor in tensors:
        view = host_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())
        for start, stop in _blocks(len(view), "full"):
            hasher.update(view[start:stop])
        hasher.update(len(view).to_bytes(8, "little"))
    return f"{algorithm}:full:{hasher.hexdigest()}"


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


def host_bytes(data: torch.Tensor) -> memoryview:
    """A tensor's bytes where they lie; the view keeps the tensor alive.

    Raises:
        ValueError: the tensor is not contiguous, or not on the CPU.
    """
    if data.device.type != "cpu" or not data.is_contiguous():
        raise ValueError(f"expected a contiguous tensor on the CPU, got strides {data.stride()} on {data.device}")
    nbytes = data.numel() * data.element_size()
    # Without a copy, and without numpy, which torch does not require.
    array: Any = (ctypes.c_ubyte * nbytes).from_address(data.data_ptr()) if nbytes else (ctypes.c_ubyte * 0)()
    array.tensor = data
    return memoryview(array).cast("B")


def _hasher(algorithm: str) -> Any:
    return xxhash.xxh3_128() if algorithm == "xxh3-128" else hashlib.sha256()


def _blocks(nbytes: int, level: str) -> Iterable[tuple[int, int]]:
    if level == "full" or nbytes <= BLOCK * SAMPLED_BLOCKS:
        return [(start, min(start + CHUNK, nbytes)) for start in range(0, nbytes, CHUNK)]
    last = nbytes - BLOCK
    starts = (last * block // (SAMPLED_BLOCKS - 1) for block in range(SAMPLED_BLOCKS))
    return [(start, start + BLOCK) for start in starts]
