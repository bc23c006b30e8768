"""The consumer's side: import, install, acknowledge, release; each step once, in order."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Literal, Self

import torch

from rlk_weightsync.adapters.base import Adapter
from rlk_weightsync.arena import views
from rlk_weightsync.errors import (
    DigestMismatch,
    OutOfOrder,
    TransportUnsupported,
    Uncommitted,
    UpdateRejected,
    WeightSyncError,
)
from rlk_weightsync.integrity import digest_of_all, verify_digest
from rlk_weightsync.manifest import Manifest
from rlk_weightsync.ticket import OUTCOMES, Receipt, Ticket
from rlk_weightsync.transports import local
from rlk_weightsync.transports.base import Connect, Lease

# Closed on purpose: a ticket names a transport, never a class or a function to import.
CONNECT: Mapping[str, Connect] = {local.Local.kind: local.connect}


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
        model_id: refuse an update of another model; None takes any.
        model_config_digest: refuse an update of another configuration; None takes any.
        timeout: seconds to wait for the other consumers, before installing and before committing.

    Raises:
        ManifestError: the bytes are no ticket.
        TransportUnsupported: the ticket's transport does not work here.
        UpdateRejected: the update was released or revoked.
    """

    def __init__(
        self,
        ticket: bytes,
        *,
        run_id: str | None = None,
        model_id: str | None = None,
        model_config_digest: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._ticket = Ticket.from_bytes(ticket)
        connect = CONNECT.get(self._ticket.transport)
        if connect is None:
            known = ", ".join(CONNECT)
            raise TransportUnsupported(
                f"transport {self._ticket.transport!r:.40} is not known to this version", f"publish through: {known}"
            )
        self._lease: Lease = connect(self._ticket)
        self._expected = {"run_id": run_id, "model_id": model_id, "model_config_digest": model_config_digest}
        self._timeout = timeout
        self._manifest: Manifest | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._receipt: Receipt | None = None
        self._durations: dict[str, int] = {}
        self._abandoned = weakref.finalize(self, self._lease.abandoned)
        self._abandoned.atexit = False
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
            Name to tensor. Over the local transport they are this consumer's own copies; over others they may be
            mapped read-only: do not write to them.

        Raises:
            ManifestError: a broken rule or a digest that does not fit; nothing was installed.
            UpdateRejected: an update of another run or model, another manifest than the ticket's, a stale or revoked
                one.
        """
        self._require(ConsumerState.OFFERED, ConsumerState.IMPORTED, doing="import")
        if self.state is ConsumerState.OFFERED:
            with self._telling(), self._timed("import"):
                manifest = Manifest.from_bytes(self._lease.manifest_bytes())
                self._check(manifest)
                tensors = self._take(manifest)
                self._lease.imported()
            self._manifest, self._tensors, self.state = manifest, tensors, ConsumerState.IMPORTED
        return self._tensors

    def install(self, adapter: Adapter, *, caches: Literal["reset"] | Keep, read_back: bool = False) -> Receipt:
        """Put the weights into an engine: preflight, write when all can, commit when all have, then caches.

        Args:
            adapter: of the engine.
            caches: `"reset"`, or `Keep(reason)`; there is no default, because what a cache holds was computed with the
                old weights.
            read_back: compare the engine's tensors with the update's after writing, byte by byte.

        Raises:
            UpdateRejected: the preflight refused, or another consumer failed; nothing was written.
            PeerLost: another consumer did not import and check it in time; nothing was written.
            Uncommitted: the weights are in this engine and not in all; it is poisoned until a full update commits.
            WeightSyncError: writing failed half-way; the engine is poisoned until a full update is installed.
        """
        if caches != "reset" and not isinstance(caches, Keep):
            raise ValueError(f"caches={caches!r}: expected 'reset' or Keep(reason)")
        self._require(ConsumerState.IMPORTED, doing="install")
        with self._telling(), adapter.fitness.exclusive():
            with self._timed("preflight"):
                adapter.fitness.require_healing(self.manifest)
                adapter.preflight(self.manifest, self._tensors)
                self._lease.preflighted()
            self.state = ConsumerState.PREFLIGHTED
            with self._timed("barrier"):
                self._lease.await_all_preflighted(self._timeout)
            receipt = self._write(adapter, caches, read_back)
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
            self._abandoned.detach()
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
        if time.time_ns() > manifest.expires_at:
            raise UpdateRejected(f"version {manifest.version} has expired; publish it anew")
        for name, expected in self._expected.items():
            found = getattr(manifest, name)
            if expected is not None and found != expected:
                raise UpdateRejected(f"the update is of {name} {found!r:.80}, this engine takes {expected!r:.80}")

    def _take(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The bytes, checked, as tensors."""
        arenas = {}
        for arena in manifest.arenas:
            data = self._lease.read_arena(arena.arena_id)
            what = f"arena {arena.arena_id} of version {manifest.version}"
            if data.numel() != arena.nbytes:
                raise DigestMismatch(f"{what}: {data.numel()} bytes arrived of {arena.nbytes}")
            verify_digest(data, arena.content_digest, what)
            arenas[arena.arena_id] = data
        tensors = views(manifest.tensors, arenas)
        for entry in manifest.tensors:
            if entry.digest is not None:
                verify_digest(tensors[entry.name].contiguous(), entry.digest, f"tensor {entry.name!r:.80}")
        return tensors

    def _write(self, adapter: Adapter, caches: Literal["reset"] | Keep, read_back: bool) -> Receipt:
        manifest, tensors = self.manifest, self._tensors
        self.state, digest = ConsumerState.INSTALLING, None
        try:
            with adapter.fitness.undefined_while(f"version {manifest.version}"):
                with self._timed("install"):
                    outcomes = adapter.install(manifest, tensors)
                if read_back:
                    with self._timed("read_back"):
                        digest = _compare(adapter, tensors)
                with self._timed("commit"):
                    self._commit()
                with self._timed("caches"):
                    action = f"reset: {adapter.reset_caches()}" if caches == "reset" else f"kept: {caches.reason}"
                return self._receipt_of(outcomes, action, digest)
        except BaseException:
            self.state = ConsumerState.POISONED
            raise

    def _commit(self) -> None:
        manifest = self.manifest
        try:
            self._lease.installed(manifest.manifest_id)
            self._lease.await_commit(self._timeout)
        except WeightSyncError as error:
            raise Uncommitted(f"version {manifest.version} is installed and uncommitted: {error}") from error

    def _receipt_of(self, outcomes: Mapping[str, str], caches: str, read_back: str | None) -> Receipt:
        entries = self.manifest.by_name
        unknown = {outcome for outcome in outcomes.values() if outcome.partition(":")[0] not in OUTCOMES}
        if outcomes.keys() != entries.keys() or unknown:
            raise WeightSyncError(f"the adapter reports outcomes {sorted(unknown)}, or not of every tensor")

        def nbytes(outcome: str) -> int:
            return sum(entries[name].logical_nbytes for name, got in outcomes.items() if got == outcome)

        return Receipt(
            manifest_id=self.manifest.manifest_id,
            version=self.manifest.version,
            rank=self._ticket.rank,
            outcomes=tuple(outcomes.items()),
            bytes_copied=nbytes("copied"),
            bytes_mapped=nbytes("bound"),
            nanoseconds=tuple(self._durations.items()),
            caches=caches,
            read_back=read_back,
        )

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


def _compare(adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of the engine's tensors, which must be the update's."""
    found, expected = digest_of_all(adapter.read_back(list(tensors))), digest_of_all(tensors.values())
    if found != expected:
        raise DigestMismatch(f"the engine's tensors are not the update's ({found} against {expected})")
    return found
