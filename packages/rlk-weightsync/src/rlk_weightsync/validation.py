"""Every rule that a manifest must keep before a byte moves; each has its own error."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from rlk_weightsync.errors import (
    AliasInvalid,
    CountMismatch,
    DocumentInvalid,
    DtypeUnknown,
    GroupIncomplete,
    NameDuplicate,
    NameInvalid,
    ShapeInvalid,
    SpanInvalid,
    SpanOverlap,
    TooLarge,
)
from rlk_weightsync.manifest import DTYPES, ArenaEntry, Manifest, TensorEntry

MAX_TENSORS = 1_000_000
MAX_NAME_BYTES = 1024
MAX_TOTAL_BYTES = 1 << 46
MAX_INTEGER = (1 << 63) - 1
KINDS = ("full", "delta", "lora")
FORMATS = ("checkpoint", "kernel")
FEATURES: frozenset[str] = frozenset()  # that this reader has and a manifest may require


def validate(manifest: Manifest) -> None:
    """Raise the :class:`ManifestError` of the first broken rule."""
    _check_header(manifest)
    _check_arenas(manifest.arenas)
    if len(manifest.tensors) > MAX_TENSORS:
        raise TooLarge(f"{len(manifest.tensors)} tensors; at most {MAX_TENSORS}")
    for entry in manifest.tensors:
        _check_types(entry)
        _check_name(entry.name)
        _check_layout(entry, manifest.arenas)
    _check_names_unique(manifest.tensors)
    _check_aliases(manifest)
    _check_overlap(manifest.tensors)
    _check_counts(manifest)
    _check_groups(manifest)


def _is_int(value: object, low: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_INTEGER


def _check_header(manifest: Manifest) -> None:
    for name in ("run_id", "model_id", "model_config_digest", "kind", "format"):
        if not isinstance(getattr(manifest, name), str):
            raise DocumentInvalid(f"{name}: expected a string")
    for name in ("version", "tensor_count", "total_bytes", "created_at", "expires_at", "schema_minor"):
        if not _is_int(getattr(manifest, name)):
            raise DocumentInvalid(f"{name}: expected an integer of at least 0, got {getattr(manifest, name)!r:.60}")
    if manifest.kind not in KINDS or manifest.format not in FORMATS:
        raise DocumentInvalid(f"kind {manifest.kind!r:.40} or format {manifest.format!r:.40} is not known")
    if not manifest.run_id:
        raise DocumentInvalid("run_id: expected a name")
    if (manifest.kind == "full") != (manifest.base_version is None and manifest.base_digest is None):
        raise DocumentInvalid(f"a {manifest.kind} update and base_version={manifest.base_version!r:.40} contradict")
    if (manifest.format == "kernel") != isinstance(manifest.layout_fingerprint, str):
        raise DocumentInvalid("layout_fingerprint: required by format 'kernel' and by no other")
    if not all(_is_int(rank) for rank in manifest.consumers) or not manifest.consumers:
        raise DocumentInvalid("consumers: expected at least one rank")
    if len(set(manifest.consumers)) != len(manifest.consumers):
        raise DocumentInvalid("consumers: a rank stands twice")
    missing = [feature for feature in manifest.requirements if feature not in FEATURES]
    if missing:
        raise DocumentInvalid(f"requirements {missing!r:.200} are not met by this reader; update it")
    producer = manifest.producer
    if not all(map(_is_int, (producer.pid, producer.start_time, producer.uid))) or not isinstance(producer.host, str):
        raise DocumentInvalid("producer: expected pid, start_time, uid and host")


def _check_arenas(arenas: Iterable[ArenaEntry]) -> None:
    total = 0
    for index, arena in enumerate(arenas):
        numbers = (arena.arena_id, arena.nbytes, arena.alignment, arena.generation)
        if not all(map(_is_int, numbers)) or arena.arena_id != index or not isinstance(arena.device, str):
            raise DocumentInvalid(f"arena {index}: expected its own index, sizes and a device")
        if arena.alignment < 1 or arena.alignment & (arena.alignment - 1):
            raise DocumentInvalid(f"arena {index}: alignment {arena.alignment} is no power of two")
        if not isinstance(arena.content_digest, str | None):
            raise DocumentInvalid(f"arena {index}: expected a digest or null")
        total += arena.nbytes
    if total > MAX_TOTAL_BYTES:
        raise TooLarge(f"arenas of {total} bytes; at most {MAX_TOTAL_BYTES}")


def _check_types(entry: TensorEntry) -> None:
    for text in (entry.group, entry.alias_of, entry.transform, entry.digest):
        if text is not None and type(text) is not str:
            raise DocumentInvalid(f"tensor {entry.name!r:.80}: a field is of the wrong type")
    if type(entry.name) is not str or type(entry.dtype) is not str:
        raise DocumentInvalid(f"tensor {entry.name!r:.80}: a field is of the wrong type")
    if entry.dtype not in DTYPES:
        raise DtypeUnknown(f"tensor {entry.name!r:.80}: dtype {entry.dtype!r:.40}; known are {', '.join(DTYPES)}")


def _check_name(name: str) -> None:
    ascii_only = name.isascii()
    length = len(name) if ascii_only else len(name.encode(errors="surrogatepass"))
    if not 1 <= length <= MAX_NAME_BYTES:
        raise NameInvalid(f"name {name!r:.80}: expected 1 to {MAX_NAME_BYTES} bytes")
    if ascii_only:
        if not name.isprintable():
            raise NameInvalid(f"name {name!r:.80} holds a control character")
        return
    if unicodedata.normalize("NFC", name) != name or any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
        raise NameInvalid(f"name {name!r:.80} is not NFC-normalised, or holds a control character or a surrogate")


def _check_layout(entry: TensorEntry, arenas: tuple[ArenaEntry, ...]) -> None:
    itemsize = DTYPES[entry.dtype].itemsize
    elements, reach = _extent(entry)
    if max(reach, elements) * itemsize > MAX_INTEGER:
        raise ShapeInvalid(f"tensor {entry.name!r:.80}: {entry.shape} elements overflow 64 bits")
    if entry.span is None:
        if elements:
            raise SpanInvalid(f"tensor {entry.name!r:.80}: {elements} elements and no span")
        return
    number, offset, nbytes = entry.span
    if type(number) is not int or not 0 <= number < len(arenas) or not _is_int(offset) or not _is_int(nbytes):
        raise SpanInvalid(f"tensor {entry.name!r:.80}: {entry.span} names no arena")
    arena = arenas[number]
    if offset + nbytes > arena.nbytes or offset % max(itemsize, arena.alignment):
        raise SpanInvalid(f"tensor {entry.name!r:.80}: {entry.span} does not lie, aligned, in its {arena.nbytes} bytes")
    if reach * itemsize != nbytes:
        raise SpanInvalid(f"tensor {entry.name!r:.80}: {nbytes} bytes for {reach} elements of {entry.dtype}")


def _extent(entry: TensorEntry) -> tuple[int, int]:
    """How many elements a tensor has, and how many its bytes must hold."""
    elements, reach = 1, 1
    if len(entry.shape) != len(entry.stride):
        raise ShapeInvalid(f"tensor {entry.name!r:.80}: shape {entry.shape!r:.80}, stride {entry.stride!r:.80}")
    for size, step in zip(entry.shape, entry.stride, strict=True):
        # bool is no int here; the checks stand inline because a large model has a hundred thousand sizes.
        if (
            type(size) is not int
            or type(step) is not int
            or not (0 <= size <= MAX_INTEGER and 0 <= step <= MAX_INTEGER)
        ):
            raise ShapeInvalid(f"tensor {entry.name!r:.80}: shape {entry.shape!r:.80}, stride {entry.stride!r:.80}")
        elements *= size
        reach += (size - 1) * step
    return elements, reach if elements else 0


def _check_names_unique(tensors: tuple[TensorEntry, ...]) -> None:
    counts = Counter(entry.name for entry in tensors)
    if len(counts) != len(tensors):
        twice = next(name for name, count in counts.items() if count > 1)
        raise NameDuplicate(f"name {twice!r:.80} stands {counts[twice]} times")


def _check_aliases(manifest: Manifest) -> None:
    for entry in manifest.tensors:
        if entry.alias_of is None:
            continue
        origin = manifest.by_name.get(entry.alias_of)
        if origin is None or origin.alias_of is not None:
            raise AliasInvalid(f"tensor {entry.name!r:.80} is an alias of {entry.alias_of!r:.80}, which is no tensor")
        if (origin.dtype, origin.shape, origin.stride, origin.span) != (
            entry.dtype, entry.shape, entry.stride, entry.span,
        ):  # fmt: skip
            raise AliasInvalid(f"tensor {entry.name!r:.80} and {origin.name!r:.80}, its origin, differ in their layout")


def _check_overlap(tensors: tuple[TensorEntry, ...]) -> None:
    spans = sorted(
        (entry.span.arena, entry.span.offset, entry.span.offset + entry.span.nbytes, entry.name)
        for entry in tensors
        if entry.span is not None and entry.alias_of is None
    )
    for (arena, _, stop, name), (other_arena, start, _, other) in pairwise(spans):
        if arena == other_arena and start < stop:
            raise SpanOverlap(f"tensors {name!r:.80} and {other!r:.80} share bytes and are no aliases")


def _check_counts(manifest: Manifest) -> None:
    total = sum(entry.span.nbytes for entry in manifest.tensors if entry.span is not None and entry.alias_of is None)
    if manifest.tensor_count != len(manifest.tensors) or manifest.total_bytes != total:
        raise CountMismatch(
            f"{len(manifest.tensors)} tensors of {total} bytes; the manifest was made of {manifest.tensor_count} "
            f"tensors of {manifest.total_bytes} bytes"
        )


def _check_groups(manifest: Manifest) -> None:
    """A group is written `name:count`, so that a lost member is seen."""
    counts = Counter(entry.group for entry in manifest.tensors if entry.group is not None)
    for group, count in counts.items():
        _, separator, declared = group.rpartition(":")
        if not separator or declared != str(count):
            raise GroupIncomplete(f"fuse group {group!r:.80} has {count} members; expected NAME:{count}")
