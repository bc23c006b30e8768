"""An update and its leases: who holds which snapshot, how far each consumer is, and when the slot is free again."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import torch

from rlk_weightsync.arena import Layout
from rlk_weightsync.errors import OutOfOrder, PeerLost, UpdateRejected
from rlk_weightsync.manifest import Manifest
from rlk_weightsync.ticket import Receipt, Ticket
from rlk_weightsync.transports.base import Transport

POLL_SECONDS = 0.05  # how soon a wait sees what nobody notifies it of: an abandoned consumer, an expired update


class SlotState(Enum):
    """A slot's life: FREE, FILLING, SEALED, LEASED, DRAINING (some consumers are done), FREE.

    REVOKED: taken back, and still pinned by a consumer that was reading; FREE follows when it has finished.
    """

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    LEASED = "leased"
    DRAINING = "draining"
    REVOKED = "revoked"


class Progress(IntEnum):
    """How far one consumer has come with one update."""

    OFFERED = 0
    IMPORTED = 1
    PREFLIGHTED = 2
    INSTALLED = 3
    ACKNOWLEDGED = 4


class End(Enum):
    """How a lease ended."""

    RELEASED = "released"
    FAILED = "failed"
    REVOKED = "revoked"
    LOST = "lost"


@dataclass
class Slot:
    """Memory for one snapshot."""

    arena: torch.Tensor | None = None
    layout: Layout | None = None
    fingerprint: object = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    state: SlotState = SlotState.FREE
    generation: int = 0
    pins: int = 0
    update: Update | None = None


@dataclass
class Ledger:
    """What a publisher's updates share.

    Attributes:
        changed: guards every slot and lease.
        newest: the newest version that each rank has installed.
    """

    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    newest: dict[int, int] = field(default_factory=dict)

    def wait_for(self, done: Callable[[], bool], timeout: float) -> bool:
        """Wait, with `changed` held, until something is so; False when the time is over."""
        if not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout >= 0):
            raise ValueError(f"timeout={timeout!r}: expected seconds; every wait has a deadline")
        deadline = time.monotonic() + timeout
        while not done():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self.changed.wait(min(remaining, POLL_SECONDS))
        return True


class Update:
    """One published, sealed update.

    Attributes:
        manifest: immutable and hashable.
    """

    def __init__(self, transport: Transport, slot: Slot, manifest: Manifest, ledger: Ledger) -> None:
        self._transport, self._slot, self.manifest, self._ledger = transport, slot, manifest, ledger
        self._leases = {rank: ConsumerLease(self, rank) for rank in manifest.consumers}

    def ticket(self, rank: int = 0) -> bytes:
        """The bytes that let consumer `rank` take this update; send them over any channel.

        Raises:
            ValueError: the update has no such consumer.
            UpdateRejected: the update was revoked.
            OutOfOrder: that consumer is done with the update.
        """
        if rank not in self._leases:
            raise ValueError(f"rank {rank}: this update's consumers are {sorted(self._leases)}")
        lease = self._leases[rank]
        with self._ledger.changed:
            lease.require_live()
            handle = self._transport.offer(lease.nonce, lease, lease)
            if self._slot.state is SlotState.SEALED:
                self._slot.state = SlotState.LEASED
            manifest_id, generation = self.manifest.manifest_id, self._slot.generation
        return Ticket(manifest_id, rank, lease.nonce, self._transport.kind, generation, handle).to_bytes()

    def wait(self, timeout: float = 30.0) -> dict[int, Receipt]:
        """Wait until every consumer has acknowledged.

        Whatever else happens, the update is taken back from those that did not, so that the slot comes free.

        Args:
            timeout: seconds.

        Returns:
            The receipt of every rank.

        Raises:
            UpdateRejected: a consumer refused or failed; carries its message.
            PeerLost: a consumer did not answer in time or is gone; `ranks` names them.
        """
        what = f"version {self.manifest.version}"
        with self._ledger.changed:
            done = self._ledger.wait_for(lambda: not self.pending() or bool(self.problems()), timeout)
            problems, late = self.problems(), self.pending()
            lost = tuple(rank for rank, lease in self._leases.items() if lease.end is End.LOST)
            if late:
                self.take_back("another consumer failed" if problems else "its deadline passed")
            if problems:
                text = f"{what}: {'; '.join(problems)}"
                raise PeerLost(text, lost) if lost else UpdateRejected(text)
            if not done:
                raise PeerLost(f"{what}: no acknowledgement of {late} in {timeout:g} s", late)
            return {rank: lease.receipt for rank, lease in self._leases.items() if lease.receipt is not None}

    def revoke(self, reason: str = "its publisher revoked it") -> None:
        """Take the update back: consumers that have not installed it cannot any more, and the slot comes free."""
        with self._ledger.changed:
            self.take_back(reason)

    @property
    def committed(self) -> bool:
        """Whether every consumer has installed it."""
        with self._ledger.changed:
            return not self.behind(Progress.INSTALLED)

    def pending(self) -> tuple[int, ...]:
        """The ranks that have not acknowledged; with the ledger held, like all below."""
        return self.behind(Progress.ACKNOWLEDGED)

    def behind(self, progress: Progress) -> tuple[int, ...]:
        """The ranks that have not come that far."""
        return tuple(rank for rank, lease in self._leases.items() if lease.progress < progress)

    def problems(self) -> list[str]:
        """What kept consumers from acknowledging."""
        for lease in self._leases.values():
            lease.notice()
        return [f"rank {rank}: {lease.problem}" for rank, lease in self._leases.items() if lease.problem]

    def live_ranks(self) -> list[int]:
        """The ranks that may still need the slot."""
        return [rank for rank, lease in self._leases.items() if lease.end is None]

    def take_back(self, reason: str) -> None:
        """End every lease that is not ended."""
        for lease in self._leases.values():
            lease.finish(End.REVOKED, reason)

    def settle(self) -> None:
        """Free the slot once nobody holds or reads it."""
        slot, live = self._slot, self.live_ranks()
        if slot.update is self:
            if not live and not slot.pins:
                slot.state, slot.update = SlotState.FREE, None
            elif not live:
                slot.state = SlotState.REVOKED
            elif len(live) < len(self._leases):
                slot.state = SlotState.DRAINING
        self._ledger.changed.notify_all()


class ConsumerLease:
    """The producer's record of one consumer; see :class:`rlk_weightsync.transports.base.Lease` and `Offer`.

    Attributes:
        progress: how far it came.
        end: how it ended, or None.
        problem: why it ended without acknowledging, or None.
        receipt: what it acknowledged with.
    """

    def __init__(self, update: Update, rank: int) -> None:
        self._update, self.rank = update, rank
        self.nonce = secrets.token_hex(16)
        self.progress = Progress.OFFERED
        self.end: End | None = None
        self.problem: str | None = None
        self.receipt: Receipt | None = None
        self._dropped = False

    def require_live(self) -> None:
        """Raise unless the lease holds."""
        version = self._update.manifest.version
        self.notice()
        if self.end is End.REVOKED:
            raise UpdateRejected(f"version {version} was taken back from rank {self.rank}: {self.problem}")
        if self.end is not None:
            raise OutOfOrder(f"rank {self.rank} is done with version {version}: {self.end.value}")

    def manifest_bytes(self) -> bytes:
        """The sealed manifest."""
        with self._held():
            return self._update.manifest.canonical

    @contextmanager
    def pinned(self, index: int) -> Iterator[torch.Tensor]:
        """The arena itself, in a slot that stays as it is meanwhile; others are not kept waiting."""
        slot = self._update._slot
        with self._held():
            if index != 0 or slot.arena is None:
                raise OutOfOrder(f"the update has no arena {index}")
            arena = slot.arena
            slot.pins += 1
        try:
            yield arena
        finally:
            with self._update._ledger.changed:
                slot.pins -= 1
                self._update.settle()

    def read_arena(self, index: int) -> torch.Tensor:
        """A private copy of an arena's bytes."""
        with self.pinned(index) as arena:
            return self._update._transport.copy(arena)

    def imported(self) -> None:
        """The consumer has the bytes."""
        self._advance(Progress.IMPORTED)

    def preflighted(self) -> None:
        """The consumer's engine can take it, if it is not older than what the engine has."""
        with self._held():
            newest, version = self._update._ledger.newest.get(self.rank, -1), self._update.manifest.version
            if newest > version:
                raise UpdateRejected(f"rank {self.rank} has version {newest}; version {version} is stale")
            self._advance(Progress.PREFLIGHTED)

    def await_all_preflighted(self, timeout: float) -> None:
        """Wait for the other consumers, so that one refusal comes before anybody's first write."""
        self._await(Progress.PREFLIGHTED, timeout, "import and check")

    def installed(self, manifest_id: str) -> None:
        """The consumer's model holds the weights."""
        manifest = self._update.manifest
        if manifest_id != manifest.manifest_id:
            raise UpdateRejected(f"rank {self.rank} installed {manifest_id:.12}, not {manifest.manifest_id[:12]}")
        self._advance(Progress.INSTALLED)
        with self._update._ledger.changed:
            newest = self._update._ledger.newest
            newest[self.rank] = max(manifest.version, newest.get(self.rank, -1))

    def await_commit(self, timeout: float) -> None:
        """Wait until every consumer has installed."""
        self._await(Progress.INSTALLED, timeout, "install")

    def acknowledged(self, receipt: Receipt) -> None:
        """The consumer is done with the weights' bytes."""
        self._check(receipt)
        with self._update._ledger.changed:
            if self.receipt not in (None, receipt):
                raise UpdateRejected(f"rank {self.rank} has acknowledged with another receipt")
            self._advance(Progress.ACKNOWLEDGED)
            self.receipt = receipt

    def failed(self, message: str) -> None:
        """The consumer refused or failed; the other consumers are told."""
        with self._update._ledger.changed:
            self.finish(End.FAILED, message[:2000])

    def released(self) -> None:
        """The consumer needs the slot no more."""
        with self._update._ledger.changed:
            self.finish(End.RELEASED, "released without acknowledging")

    def abandoned(self) -> None:
        """The consumer was dropped; the next wait notices."""
        self._dropped = True

    def notice(self) -> None:
        """End the lease of a consumer that was dropped."""
        if self._dropped and self.end is None:
            self.finish(End.LOST, "its consumer was dropped without release()")

    def finish(self, end: End, problem: str) -> None:
        """End the lease, with the ledger held; the first end counts."""
        if self.end is None:
            self.end = end
            self.problem = None if self.progress is Progress.ACKNOWLEDGED else problem
            self._update._transport.withdraw(self.nonce)
            self._update.settle()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._update._ledger.changed:
            self.require_live()
            yield

    def _advance(self, progress: Progress) -> None:
        with self._held():
            if progress > self.progress + 1:
                now = self.progress.name.lower()
                raise OutOfOrder(f"rank {self.rank} cannot be {progress.name.lower()}: it is {now}")
            if progress > self.progress:
                self.progress = progress
                self._update._ledger.changed.notify_all()

    def _await(self, progress: Progress, timeout: float, verb: str) -> None:
        update = self._update

        def ready() -> bool:
            return bool(update.problems()) or not update.behind(progress)

        with self._held():
            done = update._ledger.wait_for(ready, timeout)
            self.require_live()
            if update.problems():
                raise UpdateRejected(f"another consumer gave up: {'; '.join(update.problems())}")
            if not done:
                late = update.behind(progress)
                raise PeerLost(f"consumers {late} did not {verb} the update in {timeout:g} s", late)

    def _check(self, receipt: Receipt) -> None:
        manifest = self._update.manifest
        told = (receipt.manifest_id, receipt.version, receipt.rank)
        if told != (manifest.manifest_id, manifest.version, self.rank):
            raise UpdateRejected(
                f"rank {self.rank}: a receipt of version {receipt.version} ({receipt.manifest_id[:12]}) by rank "
                f"{receipt.rank} for version {manifest.version} ({manifest.manifest_id[:12]})"
            )
        if {name for name, _ in receipt.outcomes} != manifest.by_name.keys():
            raise UpdateRejected(f"rank {self.rank}: its receipt does not speak of every tensor, and of no other")
