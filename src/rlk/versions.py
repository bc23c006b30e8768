"""Which versions a run used."""

from __future__ import annotations

import platform
from importlib import metadata

NAMED = (
    "rlk", "rlk-ops", "rlk-weightsync", "rlk-rollout", "rlk-score", "rlk-train", "torch", "triton", "transformers",
    "safetensors", "vllm", "deepspeed", "ray", "flash-attn", "flashinfer-python",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Distribution to version; None where it is not installed (or runs from a source folder without metadata)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
