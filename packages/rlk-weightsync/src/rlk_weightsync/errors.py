"""What can go wrong between publishing and acknowledging, one class per rule."""

from __future__ import annotations


class WeightSyncError(RuntimeError):
    """Any failure of weight sync."""


class ManifestError(WeightSyncError, ValueError):
    """A manifest, ticket or receipt that breaks a rule; each rule has its subclass."""


class DocumentInvalid(ManifestError):
    """Not a document of the expected form: a field is missing, unknown, or of the wrong type."""


class SchemaUnsupported(ManifestError):
    """The document's schema is another one, or of a major version that this reader does not know."""


class NameInvalid(ManifestError):
    """A tensor's name is empty, too long, not normalised (NFC), or holds a control character."""


class NameDuplicate(ManifestError):
    """Two tensors have one name."""


class DtypeUnknown(ManifestError):
    """A dtype outside the closed list."""


class ShapeInvalid(ManifestError):
    """A shape or stride that is negative, of unequal lengths, or overflows 64 bits."""


class SpanInvalid(ManifestError):
    """A tensor's bytes lie outside their arena, do not fit its shape, or are misaligned."""


class SpanOverlap(ManifestError):
    """Two tensors that are no aliases of each other share bytes."""


class AliasInvalid(ManifestError):
    """An alias of a tensor that is absent, is an alias itself, or differs in dtype, shape or span."""


class ShardInvalid(ManifestError):
    """A shard that does not lie in its global shape, or whose rank is not of its world."""


class GroupIncomplete(ManifestError):
    """A fuse group whose members are not all there."""


class CountMismatch(ManifestError):
    """The document holds more or less than its own counts say."""


class TooLarge(ManifestError):
    """The document passes a ceiling on tensors, names, bytes or its own size."""


class DigestMismatch(ManifestError):
    """Bytes that are not those that were published."""


class TransportUnsupported(WeightSyncError):
    """The transport does not work on this runtime.

    Attributes:
        reason: what is in the way.
        remedy: what to do instead.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(f"{reason}; {remedy}")


class UpdateRejected(WeightSyncError):
    """An update that cannot be imported, installed or acknowledged; nothing was written."""


class OutOfOrder(UpdateRejected):
    """A step of the protocol that does not follow from the state it was called in."""


class PeerLost(WeightSyncError):
    """The other side did not answer before the deadline, or is gone.

    Attributes:
        ranks: the consumers that did not.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        super().__init__(message)


class Uncommitted(WeightSyncError):
    """The weights are in this engine and not in every consumer's: it stays out of use until a full update commits."""


class Poisoned(WeightSyncError):
    """An installation died half-way: the engine's weights are undefined until a full update is installed."""
