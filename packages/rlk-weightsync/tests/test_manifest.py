"""Manifest, ticket and receipt: canonical bytes, every rule with its own error, documents of any origin."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import random
import subprocess
import sys
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_weightsync import Consumer, Local, Manifest, ManifestError, Publisher, Receipt, Ticket, errors
from rlk_weightsync import codec as codecs
from rlk_weightsync.arena import plan_layout, views
from rlk_weightsync.codec import STANDARD, encode, msgspec_codec, using_codec
from rlk_weightsync.device import canonical_device
from rlk_weightsync.integrity import content_digest, digest_of_all, verify_digest
from rlk_weightsync.manifest import DTYPES, ArenaEntry, Counts, Shard, Span, TensorEntry
from rlk_weightsync.validation import validate

FAST = msgspec_codec()
assert FAST is not None, "the suite compares both codecs: install msgspec"
CODECS = {"standard": STANDARD, "msgspec": FAST}
standard_encode = STANDARD.encode


@pytest.fixture(params=CODECS)
def codec(request):
    with using_codec(CODECS[request.param]):
        yield request.param


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


def test_canonical_bytes_round_trip_and_name_the_manifest(manifest, codec):
    again = Manifest.from_bytes(manifest.canonical)
    assert again == manifest
    assert again.tensors == manifest.tensors
    assert all(type(entry) is TensorEntry and type(entry.shape) is tuple for entry in again.tensors)
    assert hash(again) == hash(manifest)
    assert manifest.manifest_id == hashlib.sha256(manifest.canonical).hexdigest()
    other = dataclasses.replace(manifest, version=2)
    assert other != manifest
    assert len({manifest, again, other}) == 2


def test_both_codecs_give_the_same_bytes(manifest):
    document = json.loads(manifest.canonical)
    plain = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    for chosen in CODECS.values():
        with using_codec(chosen):
            assert encode(document) == dataclasses.replace(manifest).canonical == plain


def test_without_msgspec_the_standard_library_reads_and_writes_the_same(manifest):
    code = (
        "import sys; sys.modules['msgspec'] = None\n"
        "from rlk_weightsync import Manifest, codec\n"
        "m = Manifest.from_bytes(bytes.fromhex(sys.stdin.read()))\n"
        "print(codec.active_codec().name, m.manifest_id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=manifest.canonical.hex(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["standard", manifest.manifest_id]


TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(DOCUMENTS)
@settings(max_examples=300, deadline=None)
def test_codecs_agree_on_any_document(document):
    data = standard_encode(document)
    assert FAST.encode(document) == data
    assert FAST.decode(data) == STANDARD.decode(data) == document


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def tensor_sets(draw):
    names = draw(st.lists(TEXT, min_size=1, max_size=6, unique_by=lambda name: unicodedata.normalize("NFC", name)))
    tensors = {}
    for name in names:
        name = unicodedata.normalize("NFC", "".join(c for c in name if unicodedata.category(c) != "Cc")) or "x"
        dtype = DTYPES[draw(st.sampled_from([d for d in DTYPES if d not in ("f4_e2m1fn_x2", "c32")]))]
        tied = draw(st.booleans()) and tensors
        tensors[name] = draw(st.sampled_from(list(tensors.values()))) if tied else torch.zeros(draw(SHAPES)).to(dtype)
    return tensors


@given(tensor_sets(), st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_any_published_manifest_survives_both_codecs(tensors, version):
    with Publisher(Local(), run_id="run") as publisher:
        made = publisher.publish(tensors, version=version).manifest
    for chosen in CODECS.values():
        with using_codec(chosen):
            read = Manifest.from_bytes(made.canonical)
            assert read.tensors == made.tensors
            assert dataclasses.replace(read).canonical == made.canonical


def test_everything_is_frozen(manifest):
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.version = 2
    with pytest.raises(AttributeError):
        manifest.tensors[0].name = "x"


def replace_tensor(manifest, index, **changes):
    tensors = list(manifest.tensors)
    tensors[index] = tensors[index]._replace(**changes)
    return dataclasses.replace(manifest, tensors=tuple(tensors))


WHOLE = Shard((4, 2), (2, 0), 0, 1, 2)  # of a (2, 2) part, for which it is right
BROKEN = {
    "too_far": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(0, 1 << 20, 8))),
    "too_small": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(0, 256, 6))),
    "misaligned": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(0, 258, 8))),
    "no_arena": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(3, 0, 8))),
    "arena_before": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(-1, 0, 8))),
    "offset_before": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=Span(0, -256, 8))),
    "no_span": (errors.SpanInvalid, lambda m: replace_tensor(m, 2, span=None)),
    "span_of_nothing": (errors.SpanInvalid, lambda m: replace_tensor(m, 3, span=Span(0, 0, 0))),
    "overlap": (errors.SpanOverlap, lambda m: replace_tensor(m, 4, span=Span(0, 0, 4))),
    "twice": (errors.NameDuplicate, lambda m: replace_tensor(m, 2, name="scalar")),
    "empty_name": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="")),
    "long_name": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="x" * 1025)),
    "long_in_bytes": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="ß" * 513)),
    "not_nfc": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="e\u0301")),
    "control": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="a\nb")),
    "delete": (errors.NameInvalid, lambda m: replace_tensor(m, 2, name="a\x7fb")),
    "dtype": (errors.DtypeUnknown, lambda m: replace_tensor(m, 2, dtype="float128")),
    "negative": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, shape=(-1, 2))),
    "backwards": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, stride=(-2, 1))),
    "rank": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, stride=(1,))),
    "overflow": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, shape=(2**62, 2**62))),
    "far_stride": (errors.ShapeInvalid, lambda m: replace_tensor(m, 2, stride=(2**62, 1))),
    "overflow_of_nothing": (errors.ShapeInvalid, lambda m: replace_tensor(m, 3, shape=(0, 2**63 - 1))),
    "alias_gone": (errors.AliasInvalid, lambda m: replace_tensor(m, 1, alias_of="nowhere")),
    "alias_of_itself": (errors.AliasInvalid, lambda m: replace_tensor(m, 1, alias_of="head")),
    "alias_differs": (errors.AliasInvalid, lambda m: replace_tensor(m, 1, dtype="i32")),
    "alias_elsewhere": (errors.AliasInvalid, lambda m: replace_tensor(m, 1, span=Span(0, 256, 48))),
    "group": (errors.GroupIncomplete, lambda m: replace_tensor(m, 5, group=None)),
    "group_unnumbered": (errors.GroupIncomplete, lambda m: replace_tensor(m, 2, group="lonely")),
    "group_lost": (errors.CountMismatch, lambda m: replace_tensor(replace_tensor(m, 5, group=None), 6, group=None)),
    "count": (errors.CountMismatch, lambda m: replace_counts(m, tensors=99)),
    "bytes": (errors.CountMismatch, lambda m: replace_counts(m, bytes=1)),
    "lost": (errors.CountMismatch, lambda m: dataclasses.replace(m, tensors=m.tensors[:4] + m.tensors[5:])),
    "part_too_large": (errors.ShardInvalid, lambda m: replace_tensor(m, 2, shard=WHOLE._replace(offsets=(3, 0)))),
    "part_of_nobody": (errors.ShardInvalid, lambda m: replace_tensor(m, 2, shard=WHOLE._replace(rank=2))),
    "part_cut_twice": (errors.ShardInvalid, lambda m: replace_tensor(m, 2, shard=WHOLE._replace(global_shape=(4, 3)))),
    "part_axis": (errors.ShardInvalid, lambda m: replace_tensor(m, 2, shard=WHOLE._replace(axis=2))),
    "ranks": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, consumers=(0, 0))),
    "nobody": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, consumers=())),
    "no_run": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, run_id="")),
    "version": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, version=-1)),
    "expired_before_made": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, expires_at=m.created_at - 1)),
    "kind": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, kind="partial")),
    "delta": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, kind="delta")),
    "delta_of_text": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, kind="delta", base_version="1")),
    "full_with_base": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, base_version=1)),
    "layout": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, format="kernel")),
    "fingerprint": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, layout_fingerprint="vllm")),
    "feature": (errors.DocumentInvalid, lambda m: dataclasses.replace(m, requirements=("time travel",))),
    "arena_number": (errors.DocumentInvalid, lambda m: replace_arena(m, arena_id=1)),
    "alignment": (errors.DocumentInvalid, lambda m: replace_arena(m, alignment=24)),
    "alignment_small": (errors.DocumentInvalid, lambda m: replace_arena(m, alignment=8)),
    "device": (errors.DocumentInvalid, lambda m: replace_arena(m, device="cuda:0")),
    "huge": (errors.TooLarge, lambda m: replace_arena(m, nbytes=1 << 60)),
}


def replace_arena(manifest, **changes):
    return dataclasses.replace(manifest, arenas=(dataclasses.replace(manifest.arenas[0], **changes),))


def replace_counts(manifest, **changes):
    return dataclasses.replace(manifest, counts=dataclasses.replace(manifest.counts, **changes))


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_rule_has_its_error(manifest, name):
    error, bend = BROKEN[name]
    bent = bend(manifest)
    with pytest.raises(error) as caught:
        validate(bent)
    assert type(caught.value) is error
    for chosen in CODECS.values():
        with using_codec(chosen), pytest.raises(error) as caught:
            Manifest.from_bytes(bent.canonical)
        assert type(caught.value) is error


def test_what_is_right_is_taken(manifest, codec):
    uuid = "0123abcd-0123-4567-89ab-0123456789ab"
    for right in (
        replace_tensor(manifest, 2, shard=WHOLE),
        replace_tensor(manifest, 2, digest="xxh3-128:full:00", transform="cast:f32"),
        dataclasses.replace(manifest, kind="delta", base_version=1, base_digest="ab"),
        dataclasses.replace(manifest, format="kernel", layout_fingerprint="engine 1"),
        replace_arena(manifest, device=f"mig:{uuid}"),
        dataclasses.replace(manifest, consumers=(3, 1)),
    ):
        assert Manifest.from_bytes(right.canonical) == right


def test_offsets_beyond_four_gibibytes(codec):
    big = 5 << 30
    spans = [Span(0, 0, big), Span(0, big, 8)]
    entries = (
        TensorEntry("big", "u8", (big,), (1,), spans[0]),
        TensorEntry("far", "f32", (2,), (1,), spans[1]),
    )
    made = dataclasses.replace(
        publish({"x": torch.ones(1)}), tensors=entries, counts=Counts(2, big + 8, 0),
        arenas=(ArenaEntry(0, big + 256, 256, "cpu", "host", 1),),
    )  # fmt: skip
    assert Manifest.from_bytes(made.canonical).tensors == entries
    arena = torch.empty(big + 256, dtype=torch.uint8)  # its pages are never touched
    arena[big : big + 8] = torch.tensor([1.5, -2.0]).view(torch.uint8)
    assert views(entries[1:], {0: arena})["far"].tolist() == [1.5, -2.0]
    with pytest.raises(errors.SpanInvalid):
        validate(dataclasses.replace(made, arenas=(ArenaEntry(0, big, 256, "cpu", "host", 1),)))


def test_ceilings(manifest, monkeypatch):
    monkeypatch.setattr(codecs, "MAX_DOCUMENT_BYTES", len(manifest.canonical) - 1)
    with pytest.raises(errors.TooLarge, match="a document of"):
        Manifest.from_bytes(manifest.canonical)
    monkeypatch.setattr("rlk_weightsync.validation.MAX_TENSORS", 6)
    with pytest.raises(errors.TooLarge, match="7 tensors"):
        validate(manifest)
    with pytest.raises(errors.TooLarge, match="a ticket of"):
        Ticket.from_bytes(b" " * (65 << 10))


def bend_document(manifest, **changes):
    document = json.loads(manifest.canonical)
    document.update(changes)
    return standard_encode(document)


def test_unknown_majors_are_refused_and_unknown_minors_kept_in_the_digest(manifest, codec):
    with pytest.raises(errors.SchemaUnsupported, match="update the reader"):
        Manifest.from_bytes(bend_document(manifest, schema="rlk-weightsync/manifest/2"))
    later = bend_document(manifest, schema_minor=7, novelty={"a": [1, None]})
    read = Manifest.from_bytes(later)
    assert read.canonical == later
    assert dataclasses.replace(read).canonical == later
    assert read.manifest_id == hashlib.sha256(later).hexdigest()
    with pytest.raises(errors.DocumentInvalid, match="novelty"):
        Manifest.from_bytes(bend_document(manifest, novelty=1))


@pytest.mark.parametrize("value", [1.0, 1e22, [2.5], {"a": 2**63}, -(2**63) - 1])
def test_numbers_that_codecs_write_differently_are_refused(manifest, codec, value):
    with pytest.raises(errors.DocumentInvalid):
        Manifest.from_bytes(bend_document(manifest, schema_minor=7, novelty=value))


STRANGE = [None, True, -1, 0, 1.5, 2**63, 2**70, "", "x", "\u0000", [], [None], [[]], {}, {"a": 1}, [1, 2, 3]]


def strange_documents(value, replaced=lambda new: new):
    """The document with one of its nodes, each in its turn, replaced by something strange or left out."""
    for strange in STRANGE:
        yield replaced(strange)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):

        def put(new, key=key):
            changed = copy.copy(value)
            changed[key] = new
            return replaced(changed)

        shorter = copy.copy(value)
        del shorter[key]
        yield replaced(shorter)
        yield from strange_documents(inner, put)


def test_documents_with_anything_anywhere_raise_only_typed_errors(codec):
    manifest = publish({"a": torch.ones(2, 2), "b": torch.empty(0)}, groups={"a": "g"})
    manifest = replace_tensor(manifest, 0, shard=WHOLE)
    taken = refused = 0
    for document in strange_documents(json.loads(manifest.canonical)):
        try:
            read = Manifest.from_bytes(standard_encode(document))
        except ManifestError:
            refused += 1
            continue
        taken += 1
        assert read.canonical == standard_encode(document)
    assert refused > 10 * taken > 0


def test_documents_that_are_not_canonical_are_refused(manifest):
    loose = json.dumps(json.loads(manifest.canonical)).encode()
    with pytest.raises(errors.DocumentInvalid, match="canonical"):
        Manifest.from_bytes(loose)


def test_mutated_documents_raise_only_typed_errors(manifest, codec):
    ticket = Ticket(manifest.manifest_id, 0, "ab" * 16, "local", 1, (("pid", "1"),))
    receipt = Receipt(manifest.manifest_id, 1, 0, (("a", "copied"),), 4, 0, (("import", 5),), "reset: nothing")
    draw = random.Random(0)
    for reader, data in ((Manifest, manifest.canonical), (Ticket, ticket.to_bytes()), (Receipt, receipt.to_bytes())):
        original = reader.from_bytes(data)
        for _ in range(700):
            bent = bytearray(data)
            for _ in range(draw.randint(1, 3)):
                at = draw.randrange(len(bent))
                bent[at : at + draw.randint(0, 2)] = bytes(draw.randrange(256) for _ in range(draw.randint(0, 2)))
            try:
                read = reader.from_bytes(bytes(bent[: draw.choice([None, draw.randrange(len(bent) + 1)])]))
            except ManifestError:
                continue
            assert read == original or bytes(bent) != data


def test_secrets_stay_out_of_a_tickets_repr():
    ticket = Ticket("m", 0, "the-nonce", "local", 1, (("path", "the-handle"),))
    assert "the-" not in repr(ticket)


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
    number = torch.randn(3, dtype=torch.complex64)
    tensors = {
        "scalar": torch.tensor(7.0), "empty": torch.empty(3, 0), "transposed": base.view(4, 6).t(), "tail": base[1:],
        "every_other": base[::2], "expanded": torch.tensor([1.0]).expand(5), "one": base.view(1, 24, 1),
        "alias": base[1:], "other_view": base[1:5], "number": number, "conjugate": number.conj(),
        "negative": number.conj().imag, "bits": base.view(torch.int32), "again": base.view(1, 24, 1),
        "nothing": torch.empty(3, 0), "windows": base.as_strided((4, 3), (2, 1)),
    }  # fmt: skip
    with Publisher(Local(), run_id="run") as publisher:
        update = publisher.publish(tensors, version=1)
        with Consumer(update.ticket()) as consumer:
            got = consumer.import_update()
    entries = update.manifest.by_name
    assert {name: entry.alias_of for name, entry in entries.items() if entry.alias_of} == {
        "alias": "tail", "again": "one",
    }  # fmt: skip
    assert entries["empty"].span is entries["nothing"].span is None
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].dtype == tensor.dtype
    assert got["alias"] is got["tail"]


def test_packed_and_scaled_dtypes_keep_theirs_under_a_cast():
    tensors = {"w": torch.ones(2), "q": torch.ones(2).to(torch.float8_e4m3fn), "n": torch.ones(2, dtype=torch.int32)}
    layout = plan_layout(tensors, cast=torch.bfloat16)
    assert [(entry.dtype, entry.transform) for entry in layout.entries] == [
        ("bf16", "cast:f32"), ("f8_e4m3fn", None), ("i32", None),
    ]  # fmt: skip


class Wrapped(torch.Tensor):
    """A tensor whose values are elsewhere, as a distributed one's are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def gathered_elsewhere():
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_numel = 12
    return parameter


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: 3.0, errors.ShapeInvalid, "expected a tensor, got float"),
        (lambda: torch.empty(2, device="meta"), errors.ShapeInvalid, "materialise"),
        (lambda: torch.eye(2).to_sparse(), errors.ShapeInvalid, "sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), errors.ShapeInvalid, "quantized"),
        (lambda: Wrapped(torch.ones(2)), errors.ShapeInvalid, "full_tensor"),
        (gathered_elsewhere, errors.ShapeInvalid, "gather it first"),
        (lambda: torch.empty(2, dtype=torch.bits8), errors.DtypeUnknown, "bits8"),
    ],
)
def test_what_bytes_would_not_reproduce_is_refused_by_name(make, error, message):
    with Publisher(Local(), run_id="run") as publisher:
        with pytest.raises(error, match=message):
            publisher.publish({"fine": torch.ones(1), "odd": make()}, version=1)
        assert publisher.counters["slots_in_use"] == 0
        publisher.publish({"fine": torch.ones(1)}, version=1)


def test_bad_names_are_refused_when_published():
    for name, error in (("", errors.NameInvalid), ("a\nb", errors.NameInvalid), ("\ud800", errors.NameInvalid)):
        with pytest.raises(error):
            publish({name: torch.ones(1)})
    with pytest.raises(errors.DocumentInvalid, match="canonical"):
        publish({"a": torch.ones(1)}, groups={"a": "\ud800"})
    assert publish({"层.0.größe": torch.ones(1), "x" * 1024: torch.ones(1)}).counts.tensors == 2


def test_device_labels():
    uuid = "0123abcd-0123-4567-89ab-0123456789ab"
    assert canonical_device(f"GPU-{uuid.upper()}") == f"gpu:{uuid}"
    assert canonical_device(f"MIG-{uuid}") == f"mig:{uuid}"
    for label in (uuid, "0", "GPU-1", ""):
        with pytest.raises(ValueError, match="device label"):
            canonical_device(label)


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


def test_digests_of_tensors_say_nothing_of_strides():
    tensor = torch.randn(3, 4)
    assert digest_of_all([tensor.t()]) == digest_of_all([tensor.t().contiguous()]) != digest_of_all([tensor])
    assert digest_of_all([torch.tensor(1.0)]) != digest_of_all([torch.tensor(1.0), torch.empty(0)])
    assert content_digest(torch.empty(0), "full") == content_digest(torch.empty(0, 3), "full")
    with pytest.raises(ValueError, match="contiguous"):
        content_digest(tensor.t(), "full")


def test_digests_need_no_numpy():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch; from rlk_weightsync.integrity import content_digest\n"
        "print(content_digest(torch.arange(4), 'full'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == content_digest(torch.arange(4), "full")


def test_entries_survive_their_list_form():
    entry = TensorEntry("a", "f32", (2, 3), (3, 1), Span(0, 256, 24), "g:1", None, "cast:f64", "xxh3-128:full:00",
                        Shard((4, 3), (2, 0), 0, 1, 2))  # fmt: skip
    assert TensorEntry.from_list(json.loads(json.dumps(entry))) == entry
    assert entry.logical_nbytes == 24
