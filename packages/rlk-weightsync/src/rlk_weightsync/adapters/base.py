"""What an adapter must be, and the poison that a half-written engine carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from rlk_weightsync.errors import Poisoned, WeightSyncError
from rlk_weightsync.manifest import Manifest


class Adapter(Protocol):
    """Installs imported tensors into one engine; the same object for the engine's whole life."""

    def preflight(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise UpdateRejected unless everything fits; writes nothing."""

    def install(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
        """Write; returns the outcome of every tensor (`copied`, `bound`, `aliased`, `skipped:reason`)."""

    def reset_caches(self) -> str:
        """Drop what was computed with the old weights; says what was done."""

    def require_usable(self) -> None:
        """Raise Poisoned where an installation died half-way."""


class Poison:
    """Whether an engine's weights are undefined."""

    def __init__(self) -> None:
        self._cause: str | None = None

    def require_clean(self) -> None:
        """Raise :class:`Poisoned` where they are."""
        if self._cause is not None:
            raise Poisoned(f"the weights are undefined ({self._cause}); install a full update first")

    def check_kind(self, manifest: Manifest) -> None:
        """Raise unless the update can heal what is there: a full one always can, a partial one only clean weights."""
        if manifest.kind != "full":
            self.require_clean()

    @contextmanager
    def while_writing(self) -> Iterator[None]:
        """Poisoned from the first write on, clean again after the last."""
        self._cause = "an installation is under way"
        try:
            yield
        except BaseException as error:
            self._cause = f"an installation died half-way: {type(error).__name__}: {str(error)[:200]}"
            raise WeightSyncError(f"{self._cause}; install a full update before using the engine") from error
        self._cause = None
