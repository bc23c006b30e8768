"""An update and its leases: who holds which snapshot, how far each consumer is, and when the slot is free again."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch

from rlk_weightsync.arena import Layout
from rlk_weightsync.errors import OutOfOrder, PeerLost, UpdateRejected
from rlk_weightsync.manifest import Manifest
from rlk_weightsync.ticket import Receipt, Ticket
from rlk_weightsync.transports.base import Transport


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

    def __init__(self, transport: Transport, slot: Slot, manifest: Manifest, changed: threading.Condition) -> None:
        self._transport, self._slot, self.manifest, self._changed = transport, slot, manifest, changed
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
            transport = self._transport
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
        self._update._transport.withdraw(self.nonce)

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
