"""What a transport must be, on the producer's side and on the consumer's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from rlk_weightsync.ticket import Receipt, Ticket


class Lease(Protocol):
    """One consumer's hold on one update, as a consumer calls it: directly, or through a transport's link.

    Every call is idempotent; one that does not follow from the lease's state raises OutOfOrder, and one on a revoked
    lease UpdateRejected.
    """

    def manifest_bytes(self) -> bytes:
        """The sealed manifest."""

    def read_arena(self, index: int) -> torch.Tensor:
        """An arena's bytes for this consumer: a private copy, or a read-only mapping that `released` ends."""

    def imported(self) -> None:
        """The consumer has checked and taken the bytes."""

    def preflighted(self) -> None:
        """The consumer's engine can take the update."""

    def await_all_preflighted(self, timeout: float) -> None:
        """Return once every consumer's engine can take the update; PeerLost names those that did not say so."""

    def installed(self, manifest_id: str) -> None:
        """The consumer's model holds the weights of this manifest."""

    def await_commit(self, timeout: float) -> None:
        """Return once every consumer has installed the same manifest; PeerLost names those that did not."""

    def acknowledged(self, receipt: Receipt) -> None:
        """The consumer's device work is done and nothing of it reads the slot."""

    def failed(self, message: str) -> None:
        """The consumer refused or failed."""

    def released(self) -> None:
        """The consumer needs the slot no more."""

    def abandoned(self) -> None:
        """The consumer was dropped unreleased. Called by finalisers: it takes no lock and raises nothing."""


class Offer(Protocol):
    """The producer's record of a lease, as a transport sees it: what a consumer may call, and the slot behind it."""

    def pinned(self, index: int) -> AbstractContextManager[torch.Tensor]:
        """The arena itself. Its slot is not filled anew while pinned, not even after a revocation.

        A transport that copies holds the pin for its copy; one whose consumers map the arena, until the consumer has
        released it or is proven dead.
        """


class Transport(Protocol):
    """The producer's side: memory for slots, and handles for tickets.

    A transport's consumer side is a function from a ticket to a lease, listed in `consumer.CONNECT`.
    """

    @property
    def kind(self) -> str:
        """The name that tickets carry."""

    @property
    def device(self) -> torch.device:
        """Where slots live."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A slot's memory: (nbytes,) uint8."""

    def free(self, arena: torch.Tensor) -> None:
        """Give a slot's memory back; nothing is pinned in it any more."""

    def copy(self, arena: torch.Tensor) -> torch.Tensor:
        """A copy of an arena for a consumer in this process."""

    def offer(self, nonce: str, lease: Lease, record: Offer) -> tuple[tuple[str, str], ...]:
        """Make a lease reachable and return the handle that its ticket carries."""

    def withdraw(self, nonce: str) -> None:
        """Make a lease unreachable; harmless where it is so already."""

    def close(self) -> None:
        """The publisher is done: give back what is kept for reuse."""


class Connect(Protocol):
    """The consumer's side of a transport."""

    def __call__(self, ticket: Ticket) -> Lease:
        """The lease behind a ticket; UpdateRejected where it is gone, TransportUnsupported where it cannot work."""
