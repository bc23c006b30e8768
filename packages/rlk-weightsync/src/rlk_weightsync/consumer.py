"""The consumer's side: import, install, acknowledge, release; each step once, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Literal, Self

import torch

from rlk_weightsync.adapters.base import Adapter
from rlk_weightsync.arena import view
from rlk_weightsync.device import synchronize
from rlk_weightsync.errors import OutOfOrder, TransportUnsupported, UpdateRejected
from rlk_weightsync.integrity import verify_digest
from rlk_weightsync.manifest import Manifest
from rlk_weightsync.ticket import Receipt, Ticket
from rlk_weightsync.transports.base import Lease
from rlk_weightsync.transports.local import Local

# Closed on purpose: a ticket names a transport, never a class or a function to import.
CONNECT = {Local.kind: Local().connect}


class ConsumerState(Enum):
    """How far this consumer is."""

    OFFERED = 0
    IMPORTED = 1
    PREFLIGHTED = 2
    INSTALLING = 3
    INSTALLED = 4
    ACKNOWLEDGED = 5
    RELEASED = 6
    POISONED = 7


@dataclass(frozen=True)
class Keep:
    """Keep the engine's caches over an update, for a stated reason."""

    reason: str

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError("Keep(reason): expected why the caches stay valid under the new weights")


class Consumer:
    """Takes one update; a context manager that releases it.

    Args:
        ticket: from `Update.ticket(rank)`.
        run_id: refuse an update of another run; None takes any.
        timeout: seconds to wait for the other consumers before installing.

    Raises:
        ManifestError: the bytes are no ticket.
        TransportUnsupported: the ticket's transport does not work here.
        UpdateRejected: the update was released or revoked.
    """

    def __init__(self, ticket: bytes, *, run_id: str | None = None, timeout: float = 30.0) -> None:
        self._ticket = Ticket.from_bytes(ticket)
        connect = CONNECT.get(self._ticket.transport)
        if connect is None:
            known = ", ".join(CONNECT)
            raise TransportUnsupported(
                f"transport {self._ticket.transport!r:.40} is not known to this version", f"publish through: {known}"
            )
        self._lease: Lease = connect(self._ticket)
        self._run_id, self._timeout = run_id, timeout
        self._manifest: Manifest | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._receipt: Receipt | None = None
        self._durations: dict[str, int] = {}
        self.state = ConsumerState.OFFERED

    @property
    def manifest(self) -> Manifest:
        """The update's manifest; read after :meth:`import_update`."""
        if self._manifest is None:
            raise OutOfOrder("the update is not imported yet; call import_update()")
        return self._manifest

    def import_update(self) -> Mapping[str, torch.Tensor]:
        """Check the manifest and the bytes; called again, gives the same.

        Returns:
            Name to tensor. Over the local transport they are this consumer's own copies; treat them as read-only.

        Raises:
            ManifestError: a broken rule or a digest that does not fit; nothing was installed.
            UpdateRejected: another run's update, another manifest than the ticket's, or a revoked one.
        """
        self._require(ConsumerState.OFFERED, ConsumerState.IMPORTED, doing="import")
        if self.state is ConsumerState.OFFERED:
            with self._telling(), self._timed("import"):
                manifest = Manifest.from_bytes(self._lease.manifest_bytes())
                self._check(manifest)
                arenas = []
                for arena in manifest.arenas:
                    data = self._lease.read_arena(arena.arena_id)
                    verify_digest(data, arena.content_digest, f"arena {arena.arena_id} of version {manifest.version}")
                    arenas.append(data)
                self._tensors = _tensors(manifest, arenas)
            self._manifest = manifest
            self._lease.imported()
            self.state = ConsumerState.IMPORTED
        return self._tensors

    def install(self, adapter: Adapter, *, caches: Literal["reset"] | Keep) -> Receipt:
        """Put the weights into an engine: preflight everything first, then write, then see to the caches.

        Args:
            adapter: of the engine.
            caches: `"reset"`, or `Keep(reason)`; there is no default, because what a cache holds was computed with the
                old weights.

        Raises:
            UpdateRejected: the preflight refused, or another consumer failed; nothing was written.
            PeerLost: another consumer did not import in time; nothing was written.
            WeightSyncError: writing failed half-way; the adapter is poisoned until a full update is installed.
        """
        if caches != "reset" and not isinstance(caches, Keep):
            raise ValueError(f"caches={caches!r}: expected 'reset' or Keep(reason)")
        self._require(ConsumerState.IMPORTED, doing="install")
        manifest, tensors = self.manifest, self._tensors
        with self._telling():
            with self._timed("barrier"):
                self._lease.await_all_imported(self._timeout)
            with self._timed("preflight"):
                adapter.preflight(manifest, tensors)
            self.state = ConsumerState.PREFLIGHTED
            outcomes = self._write(adapter)
            with self._timed("caches"):
                action = f"reset: {adapter.reset_caches()}" if caches == "reset" else f"kept: {caches.reason}"
            spans = {name: entry.span.nbytes if entry.span else 0 for name, entry in manifest.by_name.items()}
            receipt = Receipt(
                manifest_id=manifest.manifest_id,
                version=manifest.version,
                rank=self._ticket.rank,
                outcomes=tuple(outcomes.items()),
                bytes_copied=sum(spans[name] for name, outcome in outcomes.items() if outcome == "copied"),
                bytes_mapped=sum(spans[name] for name, outcome in outcomes.items() if outcome == "bound"),
                nanoseconds=tuple(self._durations.items()),
                caches=action,
            )
            self._lease.installed(receipt)
        self._receipt, self.state = receipt, ConsumerState.INSTALLED
        return receipt

    def acknowledge(self, receipt: Receipt) -> None:
        """Tell the producer that the weights are in and their bytes are no longer read; harmless when repeated.

        Raises:
            UpdateRejected: the receipt is not the one that :meth:`install` gave.
        """
        self._require(ConsumerState.INSTALLED, ConsumerState.ACKNOWLEDGED, doing="acknowledge")
        if receipt != self._receipt:
            raise UpdateRejected("the receipt is not the one of this installation")
        if self.state is ConsumerState.INSTALLED:
            self._lease.acknowledged(receipt)
            self.state = ConsumerState.ACKNOWLEDGED

    def release(self) -> None:
        """Let the update go; harmless when repeated."""
        if self.state is not ConsumerState.RELEASED:
            self._tensors = {}
            self._lease.released()
            self.state = ConsumerState.RELEASED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _check(self, manifest: Manifest) -> None:
        if manifest.manifest_id != self._ticket.manifest_id:
            raise UpdateRejected("the manifest is not the one that the ticket was made for")
        if self._ticket.rank not in manifest.consumers:
            raise UpdateRejected(f"rank {self._ticket.rank} is no consumer of this update")
        if any(arena.generation != self._ticket.generation for arena in manifest.arenas):
            raise UpdateRejected("the slot was filled anew since the ticket was made")
        if self._run_id is not None and manifest.run_id != self._run_id:
            raise UpdateRejected(
                f"the update is of run {manifest.run_id!r:.80}, this engine takes {self._run_id!r:.80}"
            )

    def _write(self, adapter: Adapter) -> Mapping[str, str]:
        self.state = ConsumerState.INSTALLING
        try:
            with self._timed("install"):
                outcomes = adapter.install(self.manifest, self._tensors)
                for device in {tensor.device for tensor in self._tensors.values()}:
                    synchronize(device)
                return outcomes
        except BaseException:
            self.state = ConsumerState.POISONED
            raise

    def _require(self, *states: ConsumerState, doing: str) -> None:
        if self.state not in states:
            raise OutOfOrder(f"cannot {doing}: this consumer is {self.state.name.lower()}")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the producer of a failure before raising it."""
        try:
            yield
        except BaseException as error:
            self._lease.failed(f"{type(error).__name__}: {error}")
            raise

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter_ns()
        yield
        self._durations[phase] = time.perf_counter_ns() - started


def _tensors(manifest: Manifest, arenas: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8)
    made = {entry.name: view(entry, arenas[entry.span.arena] if entry.span else nothing) for entry in manifest.tensors}
    return {entry.name: made[entry.alias_of or entry.name] for entry in manifest.tensors}
