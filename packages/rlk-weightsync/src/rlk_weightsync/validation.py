"""Every rule that a manifest must keep before a byte moves; each has its own error.

Tensors are checked column by column: a large model has tens of thousands, and only a broken rule is worth a loop that
finds who broke it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from operator import itemgetter
from types import NoneType

from rlk_weightsync.codec import MAX_INTEGER
from rlk_weightsync.errors import (
    AliasInvalid,
    CountMismatch,
    DocumentInvalid,
    DtypeUnknown,
    GroupIncomplete,
    NameDuplicate,
    NameInvalid,
    ShapeInvalid,
    ShardInvalid,
    SpanInvalid,
    SpanOverlap,
    TooLarge,
)
from rlk_weightsync.manifest import DTYPES, ArenaEntry, Manifest, Shard, Span, TensorEntry

MAX_TENSORS = 1_000_000
MAX_NAME_BYTES = 1024
MAX_TOTAL_BYTES = 1 << 46
MIN_ALIGNMENT = 16  # of the widest dtype, complex128
KINDS = ("full", "delta", "lora")
FORMATS = ("checkpoint", "kernel")
FEATURES: frozenset[str] = frozenset()  # that this reader has and a manifest may require
DEVICE = re.compile(r"cpu|(gpu|mig):[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_TEXT: frozenset[type] = frozenset({str})
_OPTIONAL_TEXT: frozenset[type] = frozenset({str, NoneType})
_SIZES: frozenset[type] = frozenset({tuple})
_COLUMN_TYPES: tuple[frozenset[type], ...] = (
    _TEXT, _TEXT, _SIZES, _SIZES, frozenset({Span, NoneType}),
    _OPTIONAL_TEXT, _OPTIONAL_TEXT, _OPTIONAL_TEXT, _OPTIONAL_TEXT, frozenset({Shard, NoneType}),
)  # fmt: skip


def validate(manifest: Manifest, *, typed: bool = False) -> None:
    """Raise the :class:`ManifestError` of the first broken rule.

    Args:
        typed: the tensors come from a decoder that has checked the types of their fields.
    """
    validate_header(manifest)
    tensors = manifest.tensors
    if len(tensors) > MAX_TENSORS:
        raise TooLarge(f"{len(tensors)} tensors; at most {MAX_TENSORS}")
    if not typed:
        _check_types(tensors)
    _check_dtypes(tensors)
    _check_names([entry.name for entry in tensors])
    _check_layouts(tensors, manifest.arenas)
    _check_aliases(tensors)
    _check_overlap(tensors)
    _check_counts(manifest)
    _check_shards(tensors)


def validate_header(manifest: Manifest) -> None:
    """The rules about everything but the tensors."""
    _check_fields(manifest)
    _check_kind(manifest)
    _check_consumers(manifest)
    _check_arenas(manifest.arenas)


def _is_int(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_NAME_BYTES


def _check_fields(manifest: Manifest) -> None:
    for name in ("run_id", "model_id", "model_config_digest", "kind", "format"):
        if not _is_text(getattr(manifest, name)):
            raise DocumentInvalid(f"{name}: expected a string of at most {MAX_NAME_BYTES} characters")
    for name in ("version", "created_at", "expires_at", "schema_minor"):
        if not _is_int(getattr(manifest, name)):
            raise DocumentInvalid(f"{name}: expected an integer of at least 0, got {getattr(manifest, name)!r:.60}")
    if not manifest.run_id:
        raise DocumentInvalid("run_id: expected a name")
    if manifest.expires_at < manifest.created_at:
        raise DocumentInvalid(f"expires_at {manifest.expires_at} lies before created_at {manifest.created_at}")
    producer, counts = manifest.producer, manifest.counts
    if not all(map(_is_int, (producer.pid, producer.start_time, producer.uid))) or not _is_text(producer.host):
        raise DocumentInvalid("producer: expected pid, start_time, uid and host")
    if not all(map(_is_int, (counts.tensors, counts.bytes, counts.groups))):
        raise DocumentInvalid("counts: expected tensors, bytes and groups")


def _check_kind(manifest: Manifest) -> None:
    if manifest.kind not in KINDS or manifest.format not in FORMATS:
        raise DocumentInvalid(f"kind {manifest.kind!r:.40} or format {manifest.format!r:.40} is not known")
    base = manifest.base_version, manifest.base_digest
    if base != (None, None) if manifest.kind == "full" else not (_is_int(base[0]) and _is_text(base[1])):
        raise DocumentInvalid(f"a {manifest.kind} update and base_version={base[0]!r:.40} contradict")
    fingerprint = manifest.layout_fingerprint
    if fingerprint is not None if manifest.format == "checkpoint" else not (fingerprint and _is_text(fingerprint)):
        raise DocumentInvalid("layout_fingerprint: required by format 'kernel' and by no other")
    missing = [feature for feature in manifest.requirements if type(feature) is not str or feature not in FEATURES]
    if missing:
        raise DocumentInvalid(f"requirements {missing!r:.200} are not met by this reader; update it")


def _check_consumers(manifest: Manifest) -> None:
    if not manifest.consumers or not all(map(_is_int, manifest.consumers)):
        raise DocumentInvalid("consumers: expected at least one rank")
    if len(set(manifest.consumers)) != len(manifest.consumers):
        raise DocumentInvalid("consumers: a rank stands twice")


def _check_arenas(arenas: Iterable[ArenaEntry]) -> None:
    total = 0
    for index, arena in enumerate(arenas):
        numbers = (arena.arena_id, arena.nbytes, arena.alignment, arena.generation)
        if not all(map(_is_int, numbers)) or arena.arena_id != index or not _is_text(arena.host):
            raise DocumentInvalid(f"arena {index}: expected its own index, sizes and a host")
        if not _is_text(arena.device) or not DEVICE.fullmatch(arena.device):
            raise DocumentInvalid(f"arena {index}: device {arena.device!r:.60}; expected cpu, gpu:UUID or mig:UUID")
        if arena.alignment < MIN_ALIGNMENT or arena.alignment & (arena.alignment - 1):
            raise DocumentInvalid(f"arena {index}: alignment {arena.alignment}; expected a power of two from 16 on")
        if arena.content_digest is not None and not _is_text(arena.content_digest):
            raise DocumentInvalid(f"arena {index}: expected a digest or null")
        total += arena.nbytes
    if total > MAX_TOTAL_BYTES:
        raise TooLarge(f"arenas of {total} bytes; at most {MAX_TOTAL_BYTES}")


def _first(tensors: Iterable[TensorEntry], broken: Callable[[TensorEntry], bool]) -> str:
    return next(repr(entry.name)[:82] for entry in tensors if broken(entry))


def _check_types(tensors: tuple[TensorEntry, ...]) -> None:
    for field, allowed, column in zip(TensorEntry._fields, _COLUMN_TYPES, zip(*tensors, strict=True), strict=False):
        if not allowed.issuperset(map(type, column)):
            wrong = [type(value) not in allowed for value in column].index(True)
            raise DocumentInvalid(f"tensor {tensors[wrong].name!r:.80}: {field} is of the wrong type")
    numbers = chain.from_iterable(chain.from_iterable(map(itemgetter(2, 3), tensors)))
    if not {int}.issuperset(map(type, numbers)):
        raise ShapeInvalid(f"tensor {_first(tensors, _sizes_untyped)}: a size or stride is no integer")
    if not {int}.issuperset(map(type, chain.from_iterable(entry.span for entry in tensors if entry.span))):
        raise SpanInvalid("a span holds something that is no integer")


def _sizes_untyped(entry: TensorEntry) -> bool:
    return not {int}.issuperset(map(type, entry.shape + entry.stride))


def _check_dtypes(tensors: tuple[TensorEntry, ...]) -> None:
    unknown = set(map(itemgetter(1), tensors)) - DTYPES.keys()
    if unknown:
        name = _first(tensors, lambda entry: entry.dtype in unknown)
        raise DtypeUnknown(f"tensor {name}: dtype {min(unknown)!r:.40}; known are {', '.join(DTYPES)}")


def _check_names(names: list[str]) -> None:
    joined = "".join(names)
    if not (joined.isascii() and joined.isprintable() and all(1 <= n <= MAX_NAME_BYTES for n in set(map(len, names)))):
        for name in names:
            _check_name(name)
    if len(set(names)) != len(names):
        twice, count = Counter(names).most_common(1)[0]
        raise NameDuplicate(f"name {twice!r:.80} stands {count} times")


def _check_name(name: str) -> None:
    if not 1 <= len(name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
        raise NameInvalid(f"name {name!r:.80}: expected 1 to {MAX_NAME_BYTES} bytes")
    if unicodedata.normalize("NFC", name) != name or any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
        raise NameInvalid(f"name {name!r:.80} is not NFC-normalised, or holds a control character or a surrogate")


class _Extents(dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]):
    """Bytes by (dtype, shape, stride), -1 where no tensor has these; a large model has few distinct ones."""

    def __missing__(self, key: tuple[str, tuple[int, ...], tuple[int, ...]]) -> int:
        self[key] = _extent(*key)
        return self[key]


def _check_layouts(tensors: tuple[TensorEntry, ...], arenas: tuple[ArenaEntry, ...]) -> None:
    extents = _Extents()
    needed = list(map(extents.__getitem__, map(itemgetter(1, 2, 3), tensors)))
    if -1 in extents.values():
        bad = tensors[needed.index(-1)]
        raise ShapeInvalid(f"tensor {bad.name!r:.80}: shape {bad.shape!r:.80} with stride {bad.stride!r:.80}")
    _check_spans(tensors, needed, arenas)


def _extent(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes from a tensor's first element to its last; -1 for a shape and stride that no tensor has."""
    if len(shape) != len(stride) or any(n < 0 for n in shape) or any(n < 0 for n in stride):
        return -1
    elements, reach = 1, 1
    for size, step in zip(shape, stride, strict=True):
        elements *= size
        reach += (size - 1) * step
    largest = max(reach, elements, *shape, *stride, 0) * DTYPES[dtype].itemsize
    return -1 if largest > MAX_INTEGER else reach * DTYPES[dtype].itemsize if elements else 0


def _check_spans(tensors: tuple[TensorEntry, ...], needs: list[int], arenas: tuple[ArenaEntry, ...]) -> None:
    ends, steps = [arena.nbytes for arena in arenas], [arena.alignment for arena in arenas]
    for entry, needed in zip(tensors, needs, strict=True):
        if entry.span is None:
            if needed:
                raise SpanInvalid(f"tensor {entry.name!r:.80}: {needed} bytes and no span")
            continue
        arena, offset, size = entry.span
        if not 0 <= arena < len(arenas):
            raise SpanInvalid(f"tensor {entry.name!r:.80}: {entry.span} names no arena")
        if offset < 0 or offset % steps[arena] or offset + size > ends[arena]:
            raise SpanInvalid(f"tensor {entry.name!r:.80}: {entry.span} does not lie, aligned, in {ends[arena]} bytes")
        if size != needed or not size:
            raise SpanInvalid(f"tensor {entry.name!r:.80}: a span of {size} bytes; its shape and stride take {needed}")


def _check_aliases(tensors: tuple[TensorEntry, ...]) -> None:
    aliases = [entry for entry in tensors if entry.alias_of is not None]
    by_name = {entry.name: entry for entry in tensors} if aliases else {}
    for entry in aliases:
        origin = by_name.get(entry.alias_of or "")
        if origin is None or origin.alias_of is not None:
            raise AliasInvalid(f"tensor {entry.name!r:.80} is an alias of {entry.alias_of!r:.80}, which is no tensor")
        if origin[1:5] != entry[1:5]:
            raise AliasInvalid(f"tensor {entry.name!r:.80} and {origin.name!r:.80}, its origin, differ in their layout")


def _check_overlap(tensors: tuple[TensorEntry, ...]) -> None:
    spans = sorted(entry.span for entry in tensors if entry.span is not None and entry.alias_of is None)
    for (arena, offset, nbytes), (other_arena, start, _) in pairwise(spans):
        if start < offset + nbytes and arena == other_arena:
            inside = [e.name for e in tensors if e.span and e.span[:2] in ((arena, offset), (arena, start))]
            raise SpanOverlap(f"tensors {inside[:2]!r:.170} share bytes and are no aliases")


def _check_counts(manifest: Manifest) -> None:
    tensors, told = manifest.tensors, manifest.counts
    total = sum(entry.span[2] for entry in tensors if entry.span is not None and entry.alias_of is None)
    groups = Counter(entry.group for entry in tensors if entry.group is not None)
    for group, count in groups.items():
        _, separator, declared = group.rpartition(":")
        if not separator or declared != str(count):
            raise GroupIncomplete(f"fuse group {group!r:.80} has {count} members; expected NAME:{count}")
    if (told.tensors, told.bytes, told.groups) != (len(tensors), total, len(groups)):
        raise CountMismatch(
            f"{len(tensors)} tensors of {total} bytes in {len(groups)} groups; the manifest was made of "
            f"{told.tensors} tensors of {told.bytes} bytes in {told.groups} groups"
        )


def _check_shards(tensors: tuple[TensorEntry, ...]) -> None:
    for entry in tensors:
        if entry.shard is not None and not _is_part(entry.shard, entry.shape):
            raise ShardInvalid(f"tensor {entry.name!r:.80}: {entry.shard!r:.160} is no part with shape {entry.shape}")


def _is_part(shard: Shard, shape: tuple[int, ...]) -> bool:
    whole, offsets, axis, rank, world = shard
    if type(whole) is not tuple or type(offsets) is not tuple or not all(map(_is_int, whole + offsets)):
        return False
    if not all(map(_is_int, (axis, rank, world))) or not len(whole) == len(offsets) == len(shape) > axis:
        return False
    inside = all(start + size <= full for start, size, full in zip(offsets, shape, whole, strict=True))
    uncut = all(whole[d] == shape[d] and offsets[d] == 0 for d in range(len(shape)) if d != axis)
    return rank < world and inside and uncut
