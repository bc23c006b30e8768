"""The local copying transport: producer and consumers in one process, every hand-over an explicit copy."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque

import torch

from rlk_weightsync.errors import TransportUnsupported, UpdateRejected
from rlk_weightsync.ticket import Ticket
from rlk_weightsync.transports.base import Lease, Offer

HUGE_PAGE = 2 << 20

_leases: dict[str, Lease] = {}
_lock = threading.Lock()


class Local:
    """Slots in host memory of this process.

    A publication copies the tensors into a slot; an import copies the slot into memory of the consumer's own, so that
    the consumer may keep or change what it got, and nobody waits for it longer than that copy takes. Memory of an
    import that nobody holds any more is used for the next one, because touching new pages costs several times what
    copying costs.
    """

    kind = "local"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._spare: deque[mmap.mmap] = deque()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 on the host, page-aligned, every page touched, so that later copies run at memory speed."""
        return _tensor_over(_pages(nbytes), nbytes)[0].zero_()

    def free(self, arena: torch.Tensor) -> None:
        """Nothing to do: the memory goes with its last reference, which the publisher drops."""

    def copy(self, arena: torch.Tensor) -> torch.Tensor:
        """The arena's bytes in other memory, which comes back for the next copy when no tensor over it is left."""
        nbytes = arena.numel()
        pages = self._reuse(nbytes) or _pages(nbytes)
        copied, owner = _tensor_over(pages, nbytes)
        if pages is not None:
            # Called in any thread, amid anything: appending to a deque takes no lock of ours.
            weakref.finalize(owner, self._spare.append, pages).atexit = False
        return copied.copy_(arena)

    def offer(self, nonce: str, lease: Lease, record: Offer) -> tuple[tuple[str, str], ...]:
        """Enter the lease in this process's table."""
        with _lock:
            _leases[nonce] = lease
        return (("pid", str(os.getpid())),)

    def withdraw(self, nonce: str) -> None:
        """Take the lease out of the table."""
        with _lock:
            _leases.pop(nonce, None)

    def close(self) -> None:
        """Let spare memory go; what consumers still hold goes with them."""
        self._spare.clear()

    @property
    def spare_bytes(self) -> int:
        """Bytes kept for the next imports."""
        return sum(map(len, tuple(self._spare)))

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        """Spare pages of this size; others are of a layout that is no more, and go."""
        while self._spare:
            try:
                pages = self._spare.pop()
            except IndexError:  # another thread took it
                return None
            if len(pages) == nbytes:
                return pages
        return None


def connect(ticket: Ticket) -> Lease:
    """The lease behind a local ticket.

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


def _pages(nbytes: int) -> mmap.mmap | None:
    if not nbytes:
        return None
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked child gets pages of its own
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= HUGE_PAGE:
        pages.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer faults on the first touch
    return pages


def _tensor_over(pages: mmap.mmap | None, nbytes: int) -> tuple[torch.Tensor, object]:
    """(nbytes,) uint8 over pages, and the object that lives exactly as long as some tensor over them."""
    if pages is None:
        return torch.empty(0, dtype=torch.uint8), object()
    owner = (ctypes.c_ubyte * nbytes).from_buffer(pages)
    return torch.frombuffer(owner, dtype=torch.uint8), owner
