"""Canonical bytes: by the standard library, and sooner, the same ones, where msgspec is installed.

Canonical means UTF-8 JSON with keys sorted, no white space, nothing escaped that need not be, integers of 64 bits and
no floats. A reader accepts nothing else, so equal documents have equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlk_weightsync.errors import DocumentInvalid, TooLarge

MAX_DOCUMENT_BYTES = 256 << 20
MAX_INTEGER = (1 << 63) - 1


@dataclass(frozen=True)
class Codec:
    """One way to write and read canonical bytes.

    Attributes:
        name: `standard` or `msgspec`.
        encode: a document's bytes.
        decode: the document behind bytes; ValueError where they are no JSON.
        decode_rows: the same, where the list at a key is already a tuple of the given NamedTuple if every row has its
            types, and plain lists otherwise.
    """

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    decode_rows: Callable[[bytes, str, type], Any]


def _encode_by_json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _decode_rows_by_json(data: bytes, key: str, row: type) -> Any:
    return json.loads(data)


STANDARD = Codec("standard", _encode_by_json, json.loads, _decode_rows_by_json)


def msgspec_codec() -> Codec | None:
    """The codec by msgspec, or None where it is not installed."""
    try:
        import msgspec
    except ImportError:
        return None
    decode = msgspec.json.Decoder().decode
    decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
    decoders: dict[type, Any] = {}

    def decode_rows(data: bytes, key: str, row: type) -> Any:
        fields = decode_raw(data)
        decoder = decoders.get(row) or decoders.setdefault(row, msgspec.json.Decoder(tuple[row, ...]))  # type: ignore[valid-type]
        return {name: (_typed(decoder, raw) if name == key else decode(raw)) for name, raw in fields.items()}

    def _typed(decoder: Any, raw: Any) -> Any:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError:  # the rule it breaks is named by whoever reads the plain lists
            return decode(raw)

    return Codec("msgspec", msgspec.json.Encoder(order="sorted").encode, decode, decode_rows)


_active: list[Codec] = [msgspec_codec() or STANDARD]


def active_codec() -> Codec:
    """The codec in use."""
    return _active[-1]


@contextmanager
def using_codec(codec: Codec) -> Iterator[None]:
    """Use one codec for a while, to compare or to time it; not for several threads at once."""
    _active.append(codec)
    try:
        yield
    finally:
        _active.pop()


def encode(document: Any) -> bytes:
    """Canonical bytes of a document of strings, integers, booleans, None, lists, tuples and string-keyed mappings."""
    return _active[-1].encode(document)


def decode(data: bytes) -> dict[str, Any]:
    """The document behind canonical bytes.

    Raises:
        TooLarge: more bytes than a document may have.
        DocumentInvalid: not a JSON object, or not in canonical form.
    """
    document = parse(data, lambda: _active[-1].decode(data))
    require_canonical(data, lambda: encode(document))
    return document


def decode_rows(data: bytes, key: str, row: type) -> dict[str, Any]:
    """A document whose list at `key` holds rows, see `Codec`; the caller compares its canonical bytes.

    Raises:
        TooLarge: more bytes than a document may have.
        DocumentInvalid: not a JSON object.
    """
    return parse(data, lambda: _active[-1].decode_rows(data, key, row))


def parse(data: bytes, read: Callable[[], Any]) -> dict[str, Any]:
    """What `read` makes of bounded data, if it is an object."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise TooLarge(f"a document of {len(data)} bytes; at most {MAX_DOCUMENT_BYTES}")
    try:
        document = read()
    except (ValueError, RecursionError) as error:
        raise DocumentInvalid(f"not JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise DocumentInvalid(f"expected a JSON object, got {type(document).__name__}")
    return document


def require_canonical(data: bytes, written: Callable[[], bytes]) -> None:
    """Raise DocumentInvalid unless the document, written again, gives its own bytes."""
    try:
        same = written() == data
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DocumentInvalid(f"has no canonical form: {str(error)[:200]}") from None
    if not same:
        raise DocumentInvalid("not in canonical form (sorted keys, no white space, integers only)")


def require_plain(value: Any) -> None:
    """Raise DocumentInvalid where a value of unknown meaning holds a float or an integer beyond 64 bits.

    The codecs write these differently, and a digest must not depend on who computes it.
    """
    if isinstance(value, float) or (isinstance(value, int) and not -MAX_INTEGER - 1 <= value <= MAX_INTEGER):
        raise DocumentInvalid(f"{value!r:.60}: expected integers of 64 bits and no floats")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        require_plain(item)
