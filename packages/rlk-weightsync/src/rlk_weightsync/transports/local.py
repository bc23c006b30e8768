"""The local copying transport: producer and consumers in one process, every hand-over an explicit copy."""

from __future__ import annotations

import os
import threading

import torch

from rlk_weightsync.errors import TransportUnsupported, UpdateRejected
from rlk_weightsync.ticket import Ticket
from rlk_weightsync.transports.base import Lease

_leases: dict[str, Lease] = {}
_lock = threading.Lock()


class Local:
    """Slots in host memory of this process.

    A publication copies the tensors into a slot, an import copies the slot into memory of the consumer's own, so the
    consumer may keep or change what it got, and nobody waits for it longer than that copy takes.
    """

    kind = "local"
    device = torch.device("cpu")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 on the host, every page touched, so that later copies run at memory speed."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def free(self, arena: torch.Tensor) -> None:
        """Nothing to do: the memory goes with its last reference, which the publisher drops."""

    def offer(self, nonce: str, lease: Lease) -> tuple[tuple[str, str], ...]:
        """Enter the lease in this process's table."""
        with _lock:
            _leases[nonce] = lease
        return (("pid", str(os.getpid())),)

    def withdraw(self, nonce: str) -> None:
        """Take the lease out of the table."""
        with _lock:
            _leases.pop(nonce, None)

    def connect(self, ticket: Ticket) -> Lease:
        """The lease behind a ticket.

        Raises:
            TransportUnsupported: the ticket is of another process.
            UpdateRejected: the update was released or revoked.
        """
        pid = dict(ticket.handle).get("pid")
        if pid != str(os.getpid()):
            raise TransportUnsupported(
                f"a local ticket of process {pid!r:.20} reached process {os.getpid()}",
                "consume it in the process that published it, or publish through a transport between processes",
            )
        with _lock:
            lease = _leases.get(ticket.nonce)
        if lease is None:
            raise UpdateRejected(f"update {ticket.manifest_id[:12]} for rank {ticket.rank} was released or revoked")
        return lease


def open_leases() -> int:
    """How many leases of the local transport are reachable in this process; 0 when nothing leaks."""
    with _lock:
        return len(_leases)
