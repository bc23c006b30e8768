"""The loop that composes the five packages, and its command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlk.loop import Loop

__all__ = ["Loop"]


def __getattr__(name: str) -> Any:
    # The loop imports torch; the command line's --help should not wait for it.
    if name == "Loop":
        from rlk.loop import Loop

        return Loop
    raise AttributeError(f"module 'rlk' has no attribute {name!r}")
