"""The manifest: an immutable record of one complete published update, and its canonical bytes.

`manifest_id` is the SHA-256 of the canonical bytes (see `codec`). Handles never enter a manifest: they are short-lived
and travel in tickets.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch

from rlk_weightsync import codec
from rlk_weightsync.errors import DocumentInvalid, SchemaUnsupported

SCHEMA = "rlk-weightsync/manifest"
SCHEMA_VERSION = (1, 0)

_TORCH_DTYPES = {
    "bool": torch.bool, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64,
    "c32": torch.complex32, "c64": torch.complex64, "c128": torch.complex128,
    "f8_e4m3fn": torch.float8_e4m3fn, "f8_e4m3fnuz": torch.float8_e4m3fnuz,
    "f8_e5m2": torch.float8_e5m2, "f8_e5m2fnuz": torch.float8_e5m2fnuz, "f8_e8m0fnu": torch.float8_e8m0fnu,
    "f4_e2m1fn_x2": torch.float4_e2m1fn_x2,
}  # fmt: skip
DTYPES: Mapping[str, torch.dtype] = _TORCH_DTYPES
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


class Span(NamedTuple):
    """Bytes [offset, offset + nbytes) of an arena."""

    arena: int
    offset: int
    nbytes: int


class Shard(NamedTuple):
    """Which part of a larger tensor an entry is.

    Attributes:
        global_shape: of the whole.
        offsets: where the part begins, per dimension.
        axis: the dimension that is cut.
        rank: of the part's owner.
        world: how many parts there are.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    axis: int
    rank: int
    world: int


class TensorEntry(NamedTuple):
    """One tensor; a tuple, because a manifest of a large model holds tens of thousands.

    Attributes:
        name: unique, NFC-normalised.
        dtype: a key of `DTYPES`.
        shape: its sizes.
        stride: in elements, of its bytes in the arena.
        span: its bytes; None for a tensor without elements.
        group: the fuse group that is installed as one, written `NAME:MEMBERS`, or None.
        alias_of: the tensor whose bytes these are (a tied head), or None.
        transform: a declared change since the producer's own tensor (`cast:f32`, from that dtype), or None.
        digest: of its bytes alone, or None.
        shard: the part of a larger tensor that it is, or None for a whole one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span: Span | None = None
    group: str | None = None
    alias_of: str | None = None
    transform: str | None = None
    digest: str | None = None
    shard: Shard | None = None

    @property
    def logical_nbytes(self) -> int:
        """Bytes of its elements; those of its span where the strides leave no gaps."""
        count = DTYPES[self.dtype].itemsize
        for size in self.shape:
            count *= size
        return count

    @classmethod
    def from_list(cls, row: Any) -> TensorEntry:
        """An entry from its row in a document: the fields in their order, so that 20,000 rows repeat no keys."""
        name, dtype, shape, stride, span, group, alias_of, transform, digest, shard = row
        span = None if span is None else Span(*span)
        if shard is not None:
            whole, offsets, axis, rank, world = shard
            shard = Shard(tuple(whole), tuple(offsets), axis, rank, world)
        return cls(name, dtype, tuple(shape), tuple(stride), span, group, alias_of, transform, digest, shard)


@dataclass(frozen=True)
class ArenaEntry:
    """One block of memory that holds tensors.

    Attributes:
        arena_id: its index.
        nbytes: its size.
        alignment: in bytes, of every tensor in it.
        device: `cpu`, or `gpu:UUID` or `mig:UUID` of an accelerator.
        host: the boot id of the host whose memory it is.
        generation: how often its slot has been filled.
        content_digest: `algorithm:level:hex` over its bytes, or None at level `off`.
    """

    arena_id: int
    nbytes: int
    alignment: int
    device: str
    host: str
    generation: int
    content_digest: str | None = None


@dataclass(frozen=True)
class Counts:
    """What the producer published, so that a loss on the way is seen.

    Attributes:
        tensors: how many.
        bytes: of their spans, aliases counted once.
        groups: fuse groups.
    """

    tensors: int
    bytes: int
    groups: int


@dataclass(frozen=True)
class Producer:
    """Who published: pid and its start time, so that a reused pid is seen, the user, and the host's boot id."""

    pid: int
    start_time: int
    uid: int
    host: str


@dataclass(frozen=True, eq=False)
class Manifest:
    """A complete published update. Make one with :class:`rlk_weightsync.Publisher`; it is checked by `validate`.

    Two are equal where their canonical bytes are.

    Attributes:
        run_id: of the run; another run's weights are refused.
        model_id: of the model, free text.
        model_config_digest: of its configuration, or "".
        version: strictly increasing in a run.
        kind: `full`; other kinds (`delta`, `lora`) carry `base_version` and `base_digest`.
        format: `checkpoint`: names and layouts of the model's own state dict; `kernel`: as an engine's kernels read
            them, with `layout_fingerprint`.
        tensors: every tensor, in the producer's order.
        arenas: the memory behind them.
        counts: what the producer published.
        consumers: the ranks that must install it.
        created_at: nanoseconds since the epoch.
        expires_at: nanoseconds since the epoch; past it the update is stale and refused.
        producer: see :class:`Producer`.
        requirements: features that a reader must have.
        extra: fields of a later minor version with their canonical values, kept for the digest.
    """

    run_id: str
    version: int
    tensors: tuple[TensorEntry, ...]
    arenas: tuple[ArenaEntry, ...]
    counts: Counts
    consumers: tuple[int, ...]
    created_at: int
    expires_at: int
    producer: Producer
    model_id: str = ""
    model_config_digest: str = ""
    kind: str = "full"
    base_version: int | None = None
    base_digest: str | None = None
    format: str = "checkpoint"
    layout_fingerprint: str | None = None
    requirements: tuple[str, ...] = ()
    schema_minor: int = SCHEMA_VERSION[1]
    extra: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __eq__(self, other: object) -> bool:
        return self.canonical == other.canonical if isinstance(other, Manifest) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.manifest_id)

    @cached_property
    def manifest_id(self) -> str:
        """SHA-256 of the canonical bytes, as hex."""
        return hashlib.sha256(self.canonical).hexdigest()

    @cached_property
    def canonical(self) -> bytes:
        """The canonical bytes."""
        document: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        document |= {
            "schema": f"{SCHEMA}/{SCHEMA_VERSION[0]}",
            "arenas": [vars(entry) for entry in self.arenas],
            "counts": vars(self.counts),
            "producer": vars(self.producer),
        }
        document |= {name: codec.active_codec().decode(value.encode()) for name, value in self.extra}
        return codec.encode(document)

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """Every tensor by its name."""
        return {entry.name: entry for entry in self.tensors}

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """A manifest from its canonical bytes, checked.

        Raises:
            ManifestError: the subclass names the rule that the document breaks.
        """
        from rlk_weightsync.validation import validate

        with _collection_paused():
            document = codec.decode_rows(data, "tensors", TensorEntry)
            typed = isinstance(document.get("tensors"), tuple)
            manifest = cls._from_document(document)
        codec.require_canonical(data, lambda: manifest.canonical)
        validate(manifest, typed=typed)
        return manifest

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Manifest:
        schema = document.pop("schema", None)
        if schema != f"{SCHEMA}/{SCHEMA_VERSION[0]}":
            raise SchemaUnsupported(f"schema {schema!r:.80}: expected {SCHEMA}/{SCHEMA_VERSION[0]}; update the reader")
        extra = _split_unknown(document)
        try:
            return cls(**_records(document), extra=extra)
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentInvalid(f"not a manifest: {str(error)[:200]}") from None


@contextmanager
def _collection_paused() -> Iterator[None]:
    """20,000 rows are 80,000 new containers: collecting amid them doubles the time and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_FIELDS = tuple(f.name for f in fields(Manifest) if f.name != "extra")


def _split_unknown(document: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Take the fields that this reader does not know out of a document, if its minor version may have them."""
    unknown = {name: document.pop(name) for name in list(document) if name not in _FIELDS}
    minor = document.get("schema_minor")
    if unknown and not (isinstance(minor, int) and minor > SCHEMA_VERSION[1]):
        raise DocumentInvalid(f"unknown fields {sorted(unknown)!r:.200} in a manifest of a known minor version")
    codec.require_plain(unknown)
    return tuple((name, codec.encode(value).decode()) for name, value in sorted(unknown.items()))


def _records(document: dict[str, Any]) -> dict[str, Any]:
    """A document's nested rows as records; a later minor version may add fields at the top alone."""
    rows = document["tensors"]
    typed = isinstance(rows, tuple)
    document["tensors"] = rows if typed else tuple(TensorEntry.from_list(row) for row in rows)
    document["arenas"] = tuple(ArenaEntry(**entry) for entry in document["arenas"])
    document["counts"] = Counts(**document["counts"])
    document["producer"] = Producer(**document["producer"])
    for name in ("consumers", "requirements"):
        if not isinstance(document[name], list):
            raise TypeError(f"{name}: expected a list")
        document[name] = tuple(document[name])
    return document
