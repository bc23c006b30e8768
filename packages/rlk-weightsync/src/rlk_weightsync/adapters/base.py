"""What an adapter must be, and what an engine is fit for after an installation that died."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from rlk_weightsync.errors import Poisoned, Uncommitted, UpdateRejected, WeightSyncError
from rlk_weightsync.manifest import Manifest


class Adapter(Protocol):
    """Installs imported tensors into one engine; the same object for the engine's whole life.

    A consumer calls `preflight`, `install`, `read_back` where asked, and `reset_caches`, all under `fitness`.
    """

    @property
    def fitness(self) -> Fitness:
        """Of the engine: one for its whole life."""

    def preflight(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise UpdateRejected unless everything fits; writes nothing."""

    def install(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, str]:
        """Write, and return when the device's work is done.

        Returns:
            The outcome of every tensor: `copied`, `bound`, `aliased`, or `skipped:reason`.
        """

    def read_back(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """The engine's tensors as they are now; UpdateRejected where its layout is not the update's."""

    def reset_caches(self) -> str:
        """Drop what was computed with the old weights; says what was done."""

    def require_usable(self) -> None:
        """Raise Poisoned where the engine's weights are undefined."""


class Fitness:
    """Whether an engine's weights are defined, and who is writing them."""

    def __init__(self) -> None:
        self._cause: str | None = None
        self._writing = threading.Lock()

    def require_usable(self) -> None:
        """Raise :class:`Poisoned` where the weights are undefined."""
        if self._cause is not None:
            raise Poisoned(f"the weights are undefined ({self._cause}); install a full update first")

    def require_healing(self, manifest: Manifest) -> None:
        """Raise unless the update may be installed: a full one always, a partial one over defined weights alone."""
        if manifest.kind != "full":
            self.require_usable()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One installation at a time; a second is refused, not queued.

        Raises:
            UpdateRejected: another is under way.
        """
        if not self._writing.acquire(blocking=False):
            raise UpdateRejected("another installation into this engine is under way; install one update at a time")
        try:
            yield
        finally:
            self._writing.release()

    @contextmanager
    def undefined_while(self, what: str) -> Iterator[None]:
        """Undefined from the first write on, defined again after the last step.

        Args:
            what: of the update, for messages.

        Raises:
            WeightSyncError: the body failed; the engine is poisoned.
        """
        self._cause = f"the installation of {what} is under way"
        try:
            yield
        except BaseException as error:
            self._cause = str(error) if isinstance(error, Uncommitted) else _death(what, error)
            if isinstance(error, Uncommitted) or not isinstance(error, Exception):
                raise
            raise WeightSyncError(f"{self._cause}; install a full update before using the engine") from error
        self._cause = None


def _death(what: str, error: BaseException) -> str:
    return f"the installation of {what} died half-way: {type(error).__name__}: {str(error)[:200]}"
