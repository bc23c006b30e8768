"""What travels beside a manifest: the ticket that hands one update to one consumer, and the receipt that comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rlk_weightsync.codec import MAX_INTEGER, decode, encode
from rlk_weightsync.errors import DocumentInvalid, SchemaUnsupported, TooLarge

TICKET_SCHEMA = "rlk-weightsync/ticket/1"
RECEIPT_SCHEMA = "rlk-weightsync/receipt/1"
MAX_TICKET_BYTES = 64 << 10
OUTCOMES = ("bound", "copied", "aliased", "skipped")


@dataclass(frozen=True)
class Ticket:
    """One consumer's way to one update; short-lived, and worthless to anyone once the update is released.

    Attributes:
        manifest_id: of the update.
        rank: of the consumer.
        nonce: names the lease; like the handle a secret, and not in the repr.
        transport: its kind.
        generation: of the slot, so that a ticket to a slot that was filled anew is refused.
        handle: the transport's own fields, as (name, text) pairs.
    """

    manifest_id: str
    rank: int
    nonce: str = field(repr=False)
    transport: str
    generation: int
    handle: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def to_bytes(self) -> bytes:
        """The ticket's canonical bytes."""
        return encode({**asdict(self), "schema": TICKET_SCHEMA})

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """A ticket from bytes of any origin.

        Raises:
            ManifestError: not a ticket; the subclass names the rule.
        """
        if len(data) > MAX_TICKET_BYTES:
            raise TooLarge(f"a ticket of {len(data)} bytes; at most {MAX_TICKET_BYTES}")
        document = _document(data, TICKET_SCHEMA, cls)
        texts, numbers = ("manifest_id", "nonce", "transport"), ("rank", "generation")
        pairs = document["handle"]
        right = all(isinstance(document[name], str) for name in texts) and all(_natural(document[n]) for n in numbers)
        right = right and isinstance(pairs, list) and all(_is_pair(pair) for pair in pairs)
        if not right:
            raise DocumentInvalid("ticket: a field is of the wrong type")
        return cls(**{**document, "handle": tuple((name, text) for name, text in pairs)})


@dataclass(frozen=True)
class Receipt:
    """What one consumer did with one update.

    Attributes:
        manifest_id: of the update.
        version: of its weights.
        rank: of the consumer.
        outcomes: (name, outcome) per tensor: `bound`, `copied`, `aliased`, or `skipped:reason`.
        bytes_copied: payload bytes written.
        bytes_mapped: payload bytes mapped without a copy.
        nanoseconds: (phase, duration) pairs: import, preflight, barrier, install, read_back if asked, commit, caches.
        caches: `reset: what was done`, or `kept: reason`.
        read_back: `algorithm:full:hex` over the engine's tensors as they were after the installation, in the
            manifest's order; None where it was not asked for.
    """

    manifest_id: str
    version: int
    rank: int
    outcomes: tuple[tuple[str, str], ...]
    bytes_copied: int
    bytes_mapped: int
    nanoseconds: tuple[tuple[str, int], ...]
    caches: str
    read_back: str | None = None

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""
        return {phase: duration / 1e9 for phase, duration in self.nanoseconds}

    def to_bytes(self) -> bytes:
        """The receipt's canonical bytes."""
        return encode({**asdict(self), "schema": RECEIPT_SCHEMA})

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """A receipt from bytes of any origin.

        Raises:
            ManifestError: not a receipt; the subclass names the rule.
        """
        document = _document(data, RECEIPT_SCHEMA, cls)
        numbers = ("version", "rank", "bytes_copied", "bytes_mapped")
        right = all(_natural(document[name]) for name in numbers)
        right = right and all(isinstance(document[name], str) for name in ("manifest_id", "caches"))
        right = right and isinstance(document["read_back"], str | None)
        outcomes, durations = document["outcomes"], document["nanoseconds"]
        right = right and isinstance(outcomes, list) and all(_is_pair(p) and _is_outcome(p[1]) for p in outcomes)
        right = right and isinstance(durations, list) and all(map(_is_duration, durations))
        if not right:
            raise DocumentInvalid("receipt: a field is of the wrong type")
        pairs = {name: tuple(map(tuple, document[name])) for name in ("outcomes", "nanoseconds")}
        return cls(**{**document, **pairs})


def _document(data: bytes, schema: str, cls: Any) -> dict[str, Any]:
    document = decode(data)
    found = document.pop("schema", None)
    if found != schema:
        raise SchemaUnsupported(f"schema {found!r:.80}: expected {schema}")
    expected = {f.name for f in fields(cls)}
    if document.keys() != expected:
        raise DocumentInvalid(f"{schema}: fields {sorted(document)!r:.200}, expected {sorted(expected)}")
    return document


def _natural(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _is_pair(pair: object) -> bool:
    return type(pair) is list and len(pair) == 2 and all(type(item) is str for item in pair)


def _is_duration(pair: object) -> bool:
    return type(pair) is list and len(pair) == 2 and type(pair[0]) is str and _natural(pair[1])


def _is_outcome(text: str) -> bool:
    return text.partition(":")[0] in OUTCOMES
