"""What a transport must be, on the producer's side and on the consumer's."""

from __future__ import annotations

from typing import Protocol

import torch

from rlk_weightsync.ticket import Receipt, Ticket


class Lease(Protocol):
    """The producer's record of one consumer's hold on one update, as a transport's link talks to it.

    Every call is idempotent; a call that does not follow from the lease's state raises OutOfOrder, and one on a
    revoked lease UpdateRejected.
    """

    def manifest_bytes(self) -> bytes:
        """The sealed manifest."""

    def read_arena(self, index: int) -> torch.Tensor:
        """A private copy of an arena's bytes, made while the lease holds the slot."""

    def imported(self) -> None:
        """The consumer has checked and taken the bytes."""

    def await_all_imported(self, timeout: float) -> None:
        """Return once every consumer of the update has imported it; PeerLost names those that did not."""

    def installed(self, receipt: Receipt) -> None:
        """The consumer's model holds the weights."""

    def acknowledged(self, receipt: Receipt) -> None:
        """The consumer's device work is done and nothing of it reads the slot."""

    def failed(self, message: str) -> None:
        """The consumer refused or failed."""

    def released(self) -> None:
        """The consumer needs the slot no more."""


class Transport(Protocol):
    """The producer's side: memory for slots, and handles for tickets."""

    @property
    def kind(self) -> str:
        """The name that tickets carry."""

    @property
    def device(self) -> torch.device:
        """Where slots live."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A slot's memory: (nbytes,) uint8."""

    def free(self, arena: torch.Tensor) -> None:
        """Give a slot's memory back."""

    def offer(self, nonce: str, lease: Lease) -> tuple[tuple[str, str], ...]:
        """Make a lease reachable and return the handle that its ticket carries."""

    def withdraw(self, nonce: str) -> None:
        """Make a lease unreachable; harmless where it is so already."""

    def connect(self, ticket: Ticket) -> Lease:
        """The consumer's side: the lease behind a ticket; UpdateRejected where it is gone."""
