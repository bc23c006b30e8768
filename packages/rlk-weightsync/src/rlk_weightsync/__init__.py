"""Weight sync from trainer to rollout engine: manifests, tickets, receipts, transports."""

from rlk_weightsync.consumer import Consumer, Keep
from rlk_weightsync.errors import (
    DigestMismatch,
    ManifestError,
    OutOfOrder,
    PeerLost,
    Poisoned,
    TransportUnsupported,
    Uncommitted,
    UpdateRejected,
    WeightSyncError,
)
from rlk_weightsync.leases import Update
from rlk_weightsync.manifest import Manifest
from rlk_weightsync.publisher import Publisher
from rlk_weightsync.ticket import Receipt, Ticket
from rlk_weightsync.transports.local import Local

__all__ = [
    "Consumer",
    "DigestMismatch",
    "Keep",
    "Local",
    "Manifest",
    "ManifestError",
    "OutOfOrder",
    "PeerLost",
    "Poisoned",
    "Publisher",
    "Receipt",
    "Ticket",
    "TransportUnsupported",
    "Uncommitted",
    "Update",
    "UpdateRejected",
    "WeightSyncError",
]
