"""The manifest: an immutable record of one complete published update, and its canonical bytes.

Canonical bytes are UTF-8 JSON with sorted keys and no white space; integers only, no floats. `manifest_id` is their
SHA-256. Handles never enter a manifest: they are short-lived and travel in tickets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import torch

from rlk_weightsync.errors import DocumentInvalid, SchemaUnsupported, TooLarge

SCHEMA = "rlk-weightsync/manifest"
SCHEMA_VERSION = (1, 0)
MAX_DOCUMENT_BYTES = 256 << 20

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


class TensorEntry(NamedTuple):
    """One tensor; a tuple, because a manifest of a large model holds tens of thousands.

    Attributes:
        name: unique, NFC-normalised.
        dtype: a key of `DTYPES`.
        shape: its sizes.
        stride: in elements, of its bytes in the arena.
        span: its bytes; None for a tensor without elements.
        group: the fuse group that is installed as one, or None.
        alias_of: the tensor whose bytes these are (a tied head), or None.
        transform: a declared change since the producer's own tensor (`cast:f32`, from that dtype), or None.
        digest: of its bytes alone, or None.
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

    def to_list(self) -> list[Any]:
        """The entry in the document's order of fields; a list, because 20,000 of them repeat no keys."""
        return list(self)

    @classmethod
    def from_list(cls, row: Any) -> TensorEntry:
        """The inverse of :meth:`to_list`."""
        name, dtype, shape, stride, span, *rest = row
        return cls(name, dtype, tuple(shape), tuple(stride), None if span is None else Span(*span), *rest)


@dataclass(frozen=True)
class ArenaEntry:
    """One block of memory that holds tensors.

    Attributes:
        arena_id: its index.
        nbytes: its size.
        alignment: in bytes, of every tensor in it.
        device: `cpu`, or the kind and UUID of an accelerator.
        generation: how often its slot has been filled.
        content_digest: `algorithm:level:hex` over its bytes, or None at level `off`.
    """

    arena_id: int
    nbytes: int
    alignment: int
    device: str
    generation: int
    content_digest: str | None = None


@dataclass(frozen=True)
class Producer:
    """Who published: pid and its start time, so that a reused pid is seen, the user, and the host's boot id."""

    pid: int
    start_time: int
    uid: int
    host: str


@dataclass(frozen=True)
class Manifest:
    """A complete published update. Make one with :class:`rlk_weightsync.Publisher`; it is checked by `validate`.

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
        tensor_count: how many tensors the producer published.
        total_bytes: of their spans, aliases counted once.
        consumers: the ranks that must install it.
        created_at: nanoseconds since the epoch.
        expires_at: nanoseconds since the epoch; past it an update nobody holds is stale.
        producer: see :class:`Producer`.
        requirements: features that a reader must have.
        extra: fields of a later minor version, kept for the digest.
    """

    run_id: str
    version: int
    tensors: tuple[TensorEntry, ...]
    arenas: tuple[ArenaEntry, ...]
    tensor_count: int
    total_bytes: int
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

    @cached_property
    def manifest_id(self) -> str:
        """SHA-256 of the canonical bytes, as hex."""
        return hashlib.sha256(self.canonical).hexdigest()

    @cached_property
    def canonical(self) -> bytes:
        """The canonical bytes."""
        document: dict[str, Any] = {
            name: getattr(self, name) for name in _FIELDS if name not in ("tensors", "arenas", "producer")
        }
        document |= {
            "schema": f"{SCHEMA}/{SCHEMA_VERSION[0]}",
            "tensors": [entry.to_list() for entry in self.tensors],
            "arenas": [vars(entry) for entry in self.arenas],
            "producer": vars(self.producer),
        }
        document |= {name: json.loads(value) for name, value in self.extra}
        return encode(document)

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

        document = decode(data)
        schema = document.pop("schema", None)
        if schema != f"{SCHEMA}/{SCHEMA_VERSION[0]}":
            raise SchemaUnsupported(f"schema {schema!r:.80}: expected {SCHEMA}/{SCHEMA_VERSION[0]}; update the reader")
        unknown = {name: document.pop(name) for name in list(document) if name not in _FIELDS}
        minor = document.get("schema_minor")
        if unknown and not (isinstance(minor, int) and minor > SCHEMA_VERSION[1]):
            raise DocumentInvalid(f"unknown fields {sorted(unknown)!r:.200} in a manifest of a known minor version")
        try:
            document["tensors"] = tuple(TensorEntry.from_list(row) for row in document["tensors"])
            document["arenas"] = tuple(ArenaEntry(**entry) for entry in document["arenas"])
            document["producer"] = Producer(**document["producer"])
            for name in ("consumers", "requirements"):
                document[name] = tuple(document[name])
            extra = tuple((name, encode(value).decode()) for name, value in sorted(unknown.items()))
            manifest = cls(**document, extra=extra)
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentInvalid(f"not a manifest: {str(error)[:200]}") from None
        validate(manifest)
        return manifest


_FIELDS = tuple(f.name for f in fields(Manifest) if f.name != "extra")


def _load_codec() -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    try:
        import msgspec
    except ImportError:
        return standard_encode, json.loads
    encoder = msgspec.json.Encoder(order="sorted")
    return encoder.encode, msgspec.json.Decoder().decode


def standard_encode(document: Any) -> bytes:
    """Canonical bytes by the standard library; a faster codec gives the same ones."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


_encode, _decode = _load_codec()


def encode(document: Any) -> bytes:
    """Canonical bytes of a document of strings, integers, booleans, None, lists and string-keyed mappings."""
    return _encode(document)


def decode(data: bytes) -> dict[str, Any]:
    """The document behind canonical bytes.

    Raises:
        TooLarge: more bytes than a document may have.
        DocumentInvalid: not a JSON object, or not in canonical form.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise TooLarge(f"a document of {len(data)} bytes; at most {MAX_DOCUMENT_BYTES}")
    try:
        document = _decode(data)
        canonical = isinstance(document, dict) and encode(document) == data
    except (ValueError, RecursionError) as error:
        raise DocumentInvalid(f"not JSON: {str(error)[:200]}") from None
    if not canonical:
        raise DocumentInvalid("not a JSON object in canonical form (sorted keys, no white space)")
    return document
