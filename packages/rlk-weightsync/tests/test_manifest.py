"""Manifest, ticket and receipt: canonical bytes, every rule with its own error, documents of any origin."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_weightsync import Consumer, Local, Manifest, ManifestError, Publisher, Receipt, Ticket, errors
from rlk_weightsync.arena import plan_layout, view
from rlk_weightsync.integrity import content_digest, verify_digest
from rlk_weightsync.manifest import DTYPES, ArenaEntry, Span, TensorEntry, encode, standard_encode
from rlk_weightsync.validation import validate


def publish(tensors, **options):
    with Publisher(Local(), run_id="run") as publisher:
        return publisher.publish(tensors, version=1, **options).manifest


@pytest.fixture(scope="module")
def manifest():
    tied = torch.randn(4, 3)
    return publish(
        {"embed": tied, "head": tied, "ß.weight": torch.zeros(2, 2, dtype=torch.bfloat16), "zero": torch.empty(0, 5),
         "scalar": torch.tensor(3.0), "q": torch.ones(2), "k": torch.ones(2)},
        groups={"q": "qk", "k": "qk"},
    )  # fmt: skip


def test_canonical_bytes_round_trip_and_name_the_manifest(manifest):
    again = Manifest.from_bytes(manifest.canonical)
    assert again == manifest
    assert hash(again) == hash(manifest)
    assert manifest.manifest_id == hashlib.sha256(manifest.canonical).hexdigest()


def test_the_fast_codec_and_the_standard_library_give_the_same_bytes(manifest):
    document = json.loads(manifest.canonical)
    assert encode(document) == standard_encode(document) == manifest.canonical
    assert (
        manifest.canonical == json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )


TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(DOCUMENTS)
@settings(max_examples=300, deadline=None)
def test_codecs_agree_on_any_document(document):
    assert encode(document) == standard_encode(document)


def test_everything_is_frozen(manifest):
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.version = 2
    with pytest.raises(AttributeError):
        manifest.tensors[0].name = "x"


def replace_tensor(manifest, index, **changes):
    tensors = list(manifest.tensors)
    tensors[index] = tensors[index]._replace(**changes)
    return dataclasses.replace(manifest, tensors=tuple(tensors))


BROKEN = {
    "too_far": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(0, 1 << 20, 8))),
    "too_small": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(0, 256, 6))),
    "misaligned": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(0, 258, 8))),
    "no_arena": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(3, 0, 8))),
    "no_span": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=None)),
    "overlap": (errors.SpanOverlap, lambda m: replace_tensor(m, 4, span=Span(0, 0, 4))),
    "twice": (errors.NameDuplicate, lambda m: replace_tensor(m, 2, name="scalar")),
    "empty_name": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="")),
    "long_name": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="x" * 1025)),
    "not_nfc": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="e\u0301")),
    "control": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="a\nb")),
    "dtype": (errors.DtypeUnknown, lambda m: replace_tensor(m, 2, dtype="float128")),
    "negative": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, shape=(-1, 2))),
    "rank": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, stride=(1,))),
    "overflow": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, shape=(2**62, 2**62))),
    "alias_gone": (errors.AliasInvalid, lambda m: replace_tensor(m, 1, alias_of="nowhere")),
    "alias_differs": (errors.AliasInvalid, lambda m: replace_tensor(m, 1, dtype="i32")),
    "group": (errors.GroupIncomplete, lambda m: replace_tensor(m, 5, group=None)),
    "count": (errors.CountMismatch, lambda m: dataclasses.replace(m, tensor_count=99)),
    "bytes": (errors.CountMismatch, lambda m: dataclasses.replace(m, total_bytes=1)),
    "lost": (errors.CountMismatch, lambda m: dataclasses.replace(m, tensors=m.tensors[:4] + m.tensors[5:])),
    "ranks": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, consumers=(0, 0))),
    "kind": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, kind="partial")),
    "delta": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, kind="delta")),
    "layout": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, format="kernel")),
    "feature": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, requirements=("time travel",))),
    "arena": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, arenas=(ArenaEntry(1, 8, 3, "cpu", 1),))),
    "huge": (errors.TooLarge, lambda m: dataclasses.replace(m, arenas=(ArenaEntry(0, 1 << 60, 256, "cpu", 1),))),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_has_its_error(manifest, name):
    error, bend = BROKEN[name]
    bent = bend(manifest)
    with pytest.raises(error):
        validate(bent)
    with pytest.raises(error):
        Manifest.from_bytes(bent.canonical)


def bend_document(manifest, **changes):
    document = json.loads(manifest.canonical)
    document.update(changes)
    return standard_encode(document)


def test_unknown_majors_are_refused_and_unknown_minors_kept_in_the_digest(manifest):
    with pytest.raises(errors.SchemaUnsupported, match="update the reader"):
        Manifest.from_bytes(bend_document(manifest, schema="rlk-weightsync/manifest/2"))
    later = bend_document(manifest, schema_minor=7, novelty={"a": [1, None]})
    read = Manifest.from_bytes(later)
    assert read.canonical == later
    assert read.manifest_id == hashlib.sha256(later).hexdigest()
    with pytest.raises(errors.DocumentInvalid, match="novelty"):
        Manifest.from_bytes(bend_document(manifest, novelty=1))


def test_documents_that_are_not_canonical_are_refused(manifest):
    loose = json.dumps(json.loads(manifest.canonical)).encode()
    with pytest.raises(errors.DocumentInvalid, match="canonical"):
        Manifest.from_bytes(loose)


def test_mutated_documents_raise_only_typed_errors(manifest):
    ticket = Ticket(manifest.manifest_id, 0, "ab" * 16, "local", 1, (("pid", "1"),))
    receipt = Receipt(manifest.manifest_id, 1, 0, (("a", "copied"),), 4, 0, (("import", 5),), "reset: nothing")
    draw = random.Random(0)
    for reader, data in ((Manifest, manifest.canonical), (Ticket, ticket.to_bytes()), (Receipt, receipt.to_bytes())):
        original = reader.from_bytes(data)
        for _ in range(1500):
            bent = bytearray(data)
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(bent))
                bent[at : at + draw.randint(0, 2)] = bytes(draw.randrange(256) for _ in range(draw.randint(0, 2)))
            try:
                read = reader.from_bytes(bytes(bent[: draw.choice([None, draw.randrange(len(bent) + 1)])]))
            except ManifestError:
                continue
            assert read == original or bytes(bent) != data


def test_ticket_and_receipt_round_trip_and_are_closed():
    ticket = Ticket("m", 3, "n", "local", 2, (("pid", "17"),))
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket
    receipt = Receipt("m", 9, 1, (("w", "copied"), ("b", "skipped:frozen")), 10, 0, (("install", 123),), "kept: why")
    assert Receipt.from_bytes(receipt.to_bytes()) == receipt
    assert receipt.seconds == {"install": 123e-9}
    for reader, data in ((Ticket, ticket.to_bytes()), (Receipt, receipt.to_bytes())):
        document = json.loads(data)
        for name in set(document) - {"schema"}:
            with pytest.raises(errors.DocumentInvalid):
                reader.from_bytes(standard_encode({k: v for k, v in document.items() if k != name}))
            with pytest.raises(errors.DocumentInvalid):
                reader.from_bytes(standard_encode({**document, name: {"wrong": "type"}}))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(name):
    dtype = DTYPES[name]
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    source = data.view(dtype).reshape(2, 3)
    with Publisher(Local(), run_id="run") as publisher:
        update = publisher.publish({"x": source}, version=1)
        with Consumer(update.ticket()) as consumer:
            got = consumer.import_update()["x"]
    assert got.dtype == dtype
    assert torch.equal(got.contiguous().view(torch.uint8), source.view(torch.uint8))


def test_layouts_of_awkward_tensors():
    base = torch.arange(24.0)
    tensors = {
        "scalar": torch.tensor(7.0), "empty": torch.empty(3, 0), "transposed": base.view(4, 6).t(), "tail": base[1:],
        "every_other": base[::2], "expanded": torch.tensor([1.0]).expand(5), "one": base.view(1, 24, 1),
        "alias": base[1:], "other_view": base[1:5],
    }  # fmt: skip
    layout = plan_layout(tensors)
    entries = {entry.name: entry for entry in layout.entries}
    assert entries["alias"].alias_of == "tail"
    assert entries["other_view"].alias_of is None  # other bytes of the same storage are stored on their own
    assert entries["empty"].span is None
    arena = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name, entry in entries.items():
        if entry.span:
            view(entry, arena).copy_(tensors[name])
    assert all(torch.equal(view(entry, arena), tensors[name]) for name, entry in entries.items() if entry.span)


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_a_flipped_bit_anywhere_is_seen_at_level_full(algorithm):
    data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    digest = content_digest(data, "full", algorithm)
    verify_digest(data, digest, "arena")
    for at in (0, 1, 2499, 4998, 4999):
        data[at] ^= 1
        with pytest.raises(errors.DigestMismatch, match="arena"):
            verify_digest(data, digest, "arena")
        data[at] ^= 1
    with pytest.raises(errors.DigestMismatch):
        verify_digest(data[:-1].clone(), digest, "arena")
    verify_digest(data, digest, "arena")


def test_level_sample_sees_the_ends_and_the_length_and_level_off_nothing():
    data = torch.zeros(8 << 20, dtype=torch.uint8)
    digest = content_digest(data, "sample")
    for at in (0, len(data) - 1):
        data[at] ^= 1
        with pytest.raises(errors.DigestMismatch):
            verify_digest(data, digest, "arena")
        data[at] ^= 1
    with pytest.raises(errors.DigestMismatch):
        verify_digest(data[:-1], digest, "arena")
    assert content_digest(data, "off") is None
    with pytest.raises(errors.DigestMismatch, match="no known form"):
        verify_digest(data, "md5:full:00", "arena")


def test_entries_survive_their_list_form():
    entry = TensorEntry("a", "f32", (2, 3), (3, 1), Span(0, 256, 24), "g:1", None, "cast:f64", "xxh3-128:full:00")
    assert TensorEntry.from_list(json.loads(json.dumps(entry.to_list()))) == entry
