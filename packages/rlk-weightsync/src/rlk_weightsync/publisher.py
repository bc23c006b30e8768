"""The producer's side: fill a slot, seal it, lease it to every consumer, and take it back."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Self

import torch

from rlk_weightsync.arena import ALIGNMENT, Layout, fill, plan_layout, views
from rlk_weightsync.device import device_id, host_id, process_start_time, synchronize
from rlk_weightsync.errors import OutOfOrder, PeerLost, UpdateRejected, WeightSyncError
from rlk_weightsync.integrity import ALGORITHMS, LEVELS, content_digest
from rlk_weightsync.manifest import ArenaEntry, Manifest, Producer
from rlk_weightsync.ticket import Receipt, Ticket
from rlk_weightsync.transports.base import Transport
from rlk_weightsync.validation import validate


class SlotState(Enum):
    """A slot's life: FREE, FILLING, SEALED, LEASED, DRAINING (some consumers released it), FREE; or REVOKED, FREE."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    LEASED = "leased"
    DRAINING = "draining"
    REVOKED = "revoked"


class LeaseState(Enum):
    """How far one consumer is with one update."""

    OFFERED = 0
    IMPORTED = 1
    INSTALLED = 2
    ACKNOWLEDGED = 3
    RELEASED = 4
    FAILED = 5
    REVOKED = 6


@dataclass
class Slot:
    """Memory for one snapshot."""

    arena: torch.Tensor | None = None
    layout: Layout | None = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    state: SlotState = SlotState.FREE
    generation: int = 0
    update: Update | None = None


class Update:
    """One published, sealed update.

    Attributes:
        manifest: immutable and hashable.
    """

    def __init__(self, publisher: Publisher, slot: Slot, manifest: Manifest) -> None:
        self._publisher, self._slot, self.manifest = publisher, slot, manifest
        self._changed = publisher._changed
        self._leases = {rank: ConsumerLease(self, rank) for rank in manifest.consumers}

    def ticket(self, rank: int = 0) -> bytes:
        """The bytes that let consumer `rank` take this update; send them over any channel.

        Raises:
            ValueError: the update has no such consumer.
            UpdateRejected: the update was revoked.
        """
        if rank not in self._leases:
            raise ValueError(f"rank {rank}: this update's consumers are {sorted(self._leases)}")
        lease = self._leases[rank]
        with self._changed:
            lease.require_live()
            transport = self._publisher.transport
            handle = transport.offer(lease.nonce, lease)
            self._slot.state = SlotState.LEASED
            return Ticket(
                self.manifest.manifest_id, rank, lease.nonce, transport.kind, self._slot.generation, handle
            ).to_bytes()

    def wait(self, timeout: float = 30.0) -> dict[int, Receipt]:
        """Wait until every consumer has acknowledged.

        Args:
            timeout: seconds; past it the update is revoked, so that the slot comes free.

        Returns:
            The receipt of every rank.

        Raises:
            UpdateRejected: a consumer refused or failed; carries its message.
            PeerLost: a consumer did not answer in time; `ranks` names them.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._pending() or bool(self._problems()), timeout)
            problems = self._problems()
            if problems:
                raise UpdateRejected(f"version {self.manifest.version}: {'; '.join(problems)}")
            if not done:
                late = tuple(self._pending())
                self._revoke("its deadline passed")
                raise PeerLost(f"version {self.manifest.version}: no acknowledgement of {late} in {timeout:g} s", late)
            return {rank: lease.receipt for rank, lease in self._leases.items() if lease.receipt is not None}

    def revoke(self, reason: str = "its publisher revoked it") -> None:
        """Take the update back: consumers that have not imported it cannot any more, and the slot is free."""
        with self._changed:
            self._revoke(reason)

    @property
    def committed(self) -> bool:
        """Whether every consumer has installed and acknowledged it."""
        with self._changed:
            return not self._pending() and not self._problems()

    def _pending(self) -> list[int]:
        return [rank for rank, lease in self._leases.items() if lease.receipt is None or not lease.acked]

    def _problems(self) -> list[str]:
        problems = [f"rank {rank}: {lease.problem}" for rank, lease in self._leases.items() if lease.problem]
        gone = [r for r, lease in self._leases.items() if lease.state is LeaseState.RELEASED and not lease.acked]
        return problems + [f"rank {rank}: released without acknowledging" for rank in gone if not problems]

    def _revoke(self, reason: str) -> None:
        for lease in self._leases.values():
            lease.end(LeaseState.REVOKED, reason)
        self._settle()

    def _settle(self) -> None:
        """Free the slot once nobody holds it; the caller holds the lock."""
        live = [lease for lease in self._leases.values() if lease.live]
        if self._slot.update is self:
            if live:
                partly = len(live) < len(self._leases)
                self._slot.state = SlotState.DRAINING if partly else self._slot.state
            else:
                self._slot.state, self._slot.update = SlotState.FREE, None
        self._changed.notify_all()


class ConsumerLease:
    """See :class:`rlk_weightsync.transports.base.Lease`."""

    def __init__(self, update: Update, rank: int) -> None:
        self._update, self.rank = update, rank
        self.nonce = secrets.token_hex(16)
        self.state = LeaseState.OFFERED
        self.receipt: Receipt | None = None
        self.acked = False
        self.problem: str | None = None

    @property
    def live(self) -> bool:
        """Whether the consumer may still need the slot."""
        return self.state in (LeaseState.OFFERED, LeaseState.IMPORTED, LeaseState.INSTALLED, LeaseState.ACKNOWLEDGED)

    def require_live(self) -> None:
        """Raise unless the lease holds."""
        if self.state is LeaseState.REVOKED:
            version = self._update.manifest.version
            raise UpdateRejected(f"version {version} was taken back from rank {self.rank}: {self.problem}")
        if not self.live:
            raise OutOfOrder(f"rank {self.rank} is {self.state.name.lower()} with this update already")

    def manifest_bytes(self) -> bytes:
        """The sealed manifest."""
        with self._held():
            return self._update.manifest.canonical

    def read_arena(self, index: int) -> torch.Tensor:
        """A private copy of an arena's bytes."""
        with self._held():
            arena = self._update._slot.arena
            if index != 0 or arena is None:
                raise OutOfOrder(f"the update has no arena {index}")
            return arena.clone()

    def imported(self) -> None:
        """The consumer has the bytes."""
        self._advance(LeaseState.IMPORTED)

    def await_all_imported(self, timeout: float) -> None:
        """Wait for the other consumers."""
        changed, leases = self._update._changed, self._update._leases
        with changed:

            def ready() -> bool:
                self.require_live()
                return bool(self._update._problems()) or all(
                    x.state.value >= LeaseState.IMPORTED.value for x in leases.values()
                )

            done = changed.wait_for(ready, timeout)
            if self._update._problems():
                raise UpdateRejected(f"another consumer gave up: {'; '.join(self._update._problems())}")
            if not done:
                late = tuple(r for r, lease in leases.items() if lease.state is LeaseState.OFFERED)
                raise PeerLost(f"consumers {late} did not import the update in {timeout:g} s", late)

    def installed(self, receipt: Receipt) -> None:
        """The consumer's model holds the weights."""
        self._check(receipt)
        self._advance(LeaseState.INSTALLED)
        self.receipt = receipt

    def acknowledged(self, receipt: Receipt) -> None:
        """The consumer is done with the weights' bytes."""
        self._check(receipt)
        if self.receipt != receipt:
            raise UpdateRejected(f"rank {self.rank} acknowledges what it has not installed")
        self._advance(LeaseState.ACKNOWLEDGED)
        with self._update._changed:
            self.acked = True
            self._update._changed.notify_all()

    def failed(self, message: str) -> None:
        """The consumer refused or failed; the other consumers are told."""
        with self._update._changed:
            self.end(LeaseState.FAILED, message[:2000])
            self._update._settle()

    def released(self) -> None:
        """The consumer needs the slot no more."""
        with self._update._changed:
            self.end(LeaseState.RELEASED, None)
            self._update._settle()

    def end(self, state: LeaseState, problem: str | None) -> None:
        """Close the lease; the caller holds the lock. The first end counts."""
        if self.live:
            self.state = state
            self.problem = None if self.acked else problem
        self._update._publisher.transport.withdraw(self.nonce)

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._update._changed:
            self.require_live()
            yield

    def _advance(self, state: LeaseState) -> None:
        with self._held():
            if state.value > self.state.value + 1:
                raise OutOfOrder(f"rank {self.rank} cannot be {state.name.lower()}: it is {self.state.name.lower()}")
            if state.value > self.state.value:
                self.state = state
                self._update._changed.notify_all()

    def _check(self, receipt: Receipt) -> None:
        manifest = self._update.manifest
        told = (receipt.manifest_id, receipt.version, receipt.rank)
        if told != (manifest.manifest_id, manifest.version, self.rank):
            raise UpdateRejected(
                f"rank {self.rank}: a receipt of version {receipt.version} ({receipt.manifest_id[:12]}) by rank "
                f"{receipt.rank} for version {manifest.version} ({manifest.manifest_id[:12]})"
            )


class Publisher:
    """Publishes complete updates of a run's weights; a context manager.

    Args:
        transport: how the bytes travel.
        run_id: of the run; consumers may refuse another's.
        consumers: how many (ranks 0 to n-1), or the ranks themselves.
        model_id: of the model, free text.
        integrity: `off`, `sample` or `full`: how much of the bytes the digest covers.
        algorithm: `xxh3-128` (accidents) or `sha256` (untrusted storage).
        slots: snapshots that may be held at once: 2 lets a publication overlap a slow consumer.
        reuse_timeout: seconds that a publication waits for a slot.
        lifetime: seconds until an update that a consumer holds is stale and may be revoked by the next publication.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        run_id: str,
        consumers: int | Sequence[int] = 1,
        model_id: str = "",
        integrity: str = "full",
        algorithm: str = "xxh3-128",
        slots: int = 2,
        reuse_timeout: float = 30.0,
        lifetime: float = 3600.0,
    ) -> None:
        if integrity not in LEVELS or algorithm not in ALGORITHMS:
            raise ValueError(f"integrity={integrity!r}, algorithm={algorithm!r}: expected {LEVELS}, {ALGORITHMS}")
        if slots < 1 or reuse_timeout < 0 or lifetime <= 0:
            raise ValueError("expected slots >= 1, reuse_timeout >= 0 and lifetime > 0")
        ranks = tuple(range(consumers)) if isinstance(consumers, int) else tuple(consumers)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise ValueError(f"consumers={consumers!r}: expected at least one, or distinct ranks of at least 0")
        self.transport, self.run_id, self.model_id, self.consumers = transport, run_id, model_id, ranks
        self._integrity, self._algorithm = integrity, algorithm
        self._reuse_timeout, self._lifetime = reuse_timeout, lifetime
        self._changed = threading.Condition(threading.RLock())
        self._publishing = threading.Lock()
        self._slots = [Slot() for _ in range(slots)]
        self._version: int | None = None
        self._closed = False
        self._pid = os.getpid()

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        cast: torch.dtype | None = None,
        groups: Mapping[str, str] | None = None,
        model_config_digest: str = "",
    ) -> Update:
        """Take a snapshot and seal it; later writes to the tensors do not reach it.

        Args:
            tensors: name to tensor, any strides, dtypes and devices. Tied tensors are stored once.
            version: larger than any before in this run.
            cast: floating tensors are published in this dtype, and their entries say so.
            groups: name to fuse group: members are installed together or not at all.
            model_config_digest: of the model's configuration, for the consumers to compare.

        Raises:
            ManifestError: the tensors make no valid manifest (a name, a dtype, an empty update).
            UpdateRejected: the version does not increase.
            PeerLost: every slot is held and none came free in time.
        """
        if os.getpid() != self._pid:
            raise WeightSyncError("the publisher was made in another process; make one after the fork")
        unknown = sorted(set(groups or {}) - set(tensors))
        if unknown:
            raise ValueError(f"groups: no such tensors: {', '.join(unknown)[:200]}")
        with self._publishing:
            self._check_version(version)
            layout = plan_layout(tensors, cast=cast, groups=groups)
            slot = self._take_slot()
            try:
                manifest = self._fill(slot, layout, tensors, version, model_config_digest)
            except BaseException:
                with self._changed:
                    slot.state = SlotState.FREE
                raise
            with self._changed:
                update = Update(self, slot, manifest)
                slot.state, slot.update, self._version = SlotState.SEALED, update, version
            return update

    def close(self) -> None:
        """Revoke what is held and free the slots; harmless when closed already."""
        with self._changed:
            self._closed = True
            for slot in self._slots:
                if slot.update is not None:
                    slot.update._revoke("its publisher was closed")
                self._drop(slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def counters(self) -> dict[str, int]:
        """Bytes of slot memory, slots in use, live leases: what must not grow over a run."""
        with self._changed:
            held = [slot.update for slot in self._slots if slot.update is not None]
            return {
                "arena_bytes": sum(slot.arena.numel() for slot in self._slots if slot.arena is not None),
                "slots_in_use": len(held),
                "leases": sum(lease.live for update in held for lease in update._leases.values()),
            }

    def _check_version(self, version: int) -> None:
        if self._closed:
            raise WeightSyncError("the publisher is closed")
        if self._version is not None and version <= self._version:
            raise UpdateRejected(f"version {version} does not follow {self._version}; versions increase strictly")

    def _take_slot(self) -> Slot:
        def free() -> Slot | None:
            now = time.time_ns()
            for slot in self._slots:
                if slot.update is not None and slot.update.manifest.expires_at < now:
                    slot.update._revoke("it expired")
            return next((slot for slot in self._slots if slot.state is SlotState.FREE), None)

        with self._changed:
            self._changed.wait_for(lambda: free() is not None, self._reuse_timeout)
            slot = free()
            if slot is None:
                held = [update for update in (slot.update for slot in self._slots) if update is not None]
                ranks = tuple(sorted({rank for update in held for rank, x in update._leases.items() if x.live}))
                versions = ", ".join(str(update.manifest.version) for update in held)
                raise PeerLost(
                    f"every slot is held (versions {versions}, ranks {ranks}) and none came free in "
                    f"{self._reuse_timeout:g} s; release or revoke() an update, or make more slots",
                    ranks,
                )
            slot.state = SlotState.FILLING
            return slot

    def _fill(
        self, slot: Slot, layout: Layout, tensors: Mapping[str, torch.Tensor], version: int, config_digest: str
    ) -> Manifest:
        if slot.arena is None or slot.arena.numel() != layout.nbytes:
            self._drop(slot)
            slot.arena = self.transport.allocate(layout.nbytes)
        if slot.layout != layout:
            slot.layout, slot.views = layout, views(layout, slot.arena)
        slot.generation += 1
        for device in {tensor.device for tensor in tensors.values()}:
            synchronize(device)
        fill(slot.views, tensors, layout)
        synchronize(self.transport.device)
        digest = content_digest(slot.arena, self._integrity, self._algorithm)
        manifest = self._manifest(slot, layout, version, config_digest, digest)
        validate(manifest)
        return manifest

    def _manifest(self, slot: Slot, layout: Layout, version: int, config_digest: str, digest: str | None) -> Manifest:
        now = time.time_ns()
        spans = (entry.span for entry in layout.entries if entry.alias_of is None)
        device = device_id(self.transport.device)
        return Manifest(
            run_id=self.run_id,
            model_id=self.model_id,
            model_config_digest=config_digest,
            version=version,
            tensors=layout.entries,
            arenas=(ArenaEntry(0, layout.nbytes, ALIGNMENT, device, slot.generation, digest),),
            tensor_count=len(layout.entries),
            total_bytes=sum(span.nbytes for span in spans if span is not None),
            consumers=self.consumers,
            created_at=now,
            expires_at=now + int(self._lifetime * 1e9),
            producer=Producer(os.getpid(), process_start_time(os.getpid()), os.getuid(), host_id()),
        )

    def _drop(self, slot: Slot) -> None:
        if slot.arena is not None:
            slot.views, slot.layout = {}, None
            self.transport.free(slot.arena)
            slot.arena = None
