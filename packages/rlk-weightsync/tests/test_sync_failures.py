"""Weight sync when somebody dies, lies, is slow, or does two things at once; and modules that are hard to write to."""

from __future__ import annotations

import dataclasses
import gc
import math
import threading
import time

import pytest
import torch
from torch import nn

from rlk_weightsync import (
    Consumer,
    DigestMismatch,
    Keep,
    Local,
    OutOfOrder,
    PeerLost,
    Poisoned,
    Publisher,
    Uncommitted,
    UpdateRejected,
    WeightSyncError,
)
from rlk_weightsync.adapters.torch import TorchAdapter
from rlk_weightsync.leases import SlotState
from rlk_weightsync.manifest import Shard
from rlk_weightsync.transports.local import open_leases


@pytest.fixture(autouse=True)
def nothing_leaks():
    yield
    assert open_leases() == 0


@pytest.fixture
def publisher():
    with Publisher(Local(), run_id="demo", reuse_timeout=0.2) as made:
        yield made


@pytest.fixture
def pair():
    """A publisher for two consumers."""
    with Publisher(Local(), run_id="demo", consumers=2) as made:
        yield made


def linear(value):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def values(module):
    return {float(x) for parameter in module.parameters() for x in parameter.detach().flatten()}


def install(update, adapter, rank=0, *, caches="reset", timeout=5.0, **options):
    with Consumer(update.ticket(rank), timeout=timeout) as consumer:
        consumer.import_update()
        receipt = consumer.install(adapter, caches=caches, **options)
        consumer.acknowledge(receipt)
    return receipt


def in_thread(function, *args, **options):
    """Run a function in a thread; what it returned or raised is in the list after `join`."""
    result = []

    def run():
        try:
            result.append(function(*args, **options))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


class Adapter(TorchAdapter):
    """One that runs something at a step of the installation."""

    def __init__(self, module, **steps):
        super().__init__(module)
        self.steps = steps

    def preflight(self, manifest, tensors):
        super().preflight(manifest, tensors)
        self.steps.get("preflight", lambda: None)()

    def install(self, manifest, tensors):
        outcomes = super().install(manifest, tensors)
        self.steps.get("install", lambda: None)()
        return outcomes

    def reset_caches(self):
        self.steps.get("caches", lambda: None)()
        return "reset"


def dies():
    raise OSError("the lights went out")


# The producer, at each arrow.


def test_a_producer_that_dies_filling_shows_nothing(publisher, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("rlk_weightsync.publisher.copy_all", lambda *_: dies())
        with pytest.raises(OSError, match="lights"):
            publisher.publish({"w": torch.ones(2)}, version=1)
    assert open_leases() == 0
    assert publisher.counters["slots_in_use"] == 0
    update = publisher.publish({"w": torch.ones(2)}, version=1)  # the version was not used up
    with Consumer(update.ticket()) as consumer:
        assert consumer.import_update()["w"].tolist() == [1, 1]


def test_a_producer_that_closes_after_sealing_leaves_the_engine_as_it_was():
    engine = linear(0.0)
    with Publisher(Local(), run_id="demo") as publisher:
        consumer = Consumer(publisher.publish(linear(1.0).state_dict(), version=1).ticket())
        consumer.import_update()
    with pytest.raises(UpdateRejected, match="closed"):
        consumer.install(TorchAdapter(engine), caches="reset")
    assert values(engine) == {0.0}
    consumer.release()


def test_a_producer_that_closes_amid_the_preflight_leaves_the_engine_as_it_was():
    publisher, engine = Publisher(Local(), run_id="demo"), linear(0.0)
    update = publisher.publish(linear(1.0).state_dict(), version=1)
    adapter = Adapter(engine, preflight=publisher.close)
    with pytest.raises(UpdateRejected, match="closed"):
        install(update, adapter)
    assert values(engine) == {0.0}
    adapter.require_usable()


def test_a_producer_that_closes_while_an_engine_is_written():
    publisher, engine = Publisher(Local(), run_id="demo"), linear(0.0)
    update = publisher.publish(linear(1.0).state_dict(), version=1)
    adapter = Adapter(engine, install=publisher.close)
    with pytest.raises(Uncommitted, match="version 1 is installed and uncommitted"):
        install(update, adapter)
    assert values(engine) == {1.0}
    assert not update.committed
    with pytest.raises(Poisoned, match="uncommitted"):
        adapter.require_usable()


# A consumer, at each arrow.


@pytest.mark.parametrize("step", ["preflight", "install", "caches"])
def test_a_consumer_that_dies_is_told_and_frees_the_slot(publisher, step):
    engine = linear(0.0)
    adapter = Adapter(engine, **{step: dies})
    update = publisher.publish(linear(1.0).state_dict(), version=1)
    with pytest.raises((OSError, WeightSyncError), match="lights went out"):
        install(update, adapter)
    with pytest.raises(UpdateRejected, match="rank 0: .*lights went out"):
        update.wait(timeout=1)
    assert publisher.counters["slots_in_use"] == 0
    if step == "preflight":
        adapter.require_usable()
        assert values(engine) == {0.0}
    else:  # new weights under old caches are no more usable than half of them
        with pytest.raises(Poisoned, match="lights went out"):
            adapter.require_usable()
    adapter.steps.clear()
    install(publisher.publish(linear(2.0).state_dict(), version=2), adapter)
    adapter.require_usable()
    assert values(engine) == {2.0}


@pytest.mark.parametrize("step", ["ticket", "connected", "imported", "installed"])
def test_a_consumer_that_vanishes_is_named(publisher, step):
    update = publisher.publish(linear(1.0).state_dict(), version=1)
    ticket = update.ticket()
    consumer = None if step == "ticket" else Consumer(ticket)
    if step in ("imported", "installed"):
        consumer.import_update()
    if step == "installed":
        consumer.install(TorchAdapter(linear(0.0)), caches="reset")
    del consumer
    gc.collect()
    with pytest.raises(PeerLost, match="no acknowledgement" if step == "ticket" else "dropped without release") as lost:
        update.wait(timeout=0.2 if step == "ticket" else 5)
    assert lost.value.ranks == (0,)
    assert publisher.counters["slots_in_use"] == 0


def test_a_vanished_consumer_does_not_hold_up_the_next_publication():
    with Publisher(Local(), run_id="demo", slots=1, reuse_timeout=5) as publisher:
        Consumer(publisher.publish({"w": torch.ones(2)}, version=1).ticket())
        gc.collect()
        publisher.publish({"w": torch.ones(2)}, version=2)


def test_a_death_in_one_engine_keeps_all_out_of_use(pair):
    engines = [linear(0.0), linear(0.0)]
    written = threading.Event()

    def dies_late():
        assert written.wait(5)
        dies()

    adapters = [Adapter(engines[0], install=dies_late), Adapter(engines[1], install=written.set)]
    update = pair.publish(linear(1.0).state_dict(), version=1)
    runs = [in_thread(install, update, adapter, rank) for rank, adapter in enumerate(adapters)]
    with pytest.raises(UpdateRejected, match="rank 0: .*lights"):
        update.wait(timeout=5)
    for thread, _ in runs:
        thread.join()
    assert isinstance(runs[1][1][0], Uncommitted)
    assert not update.committed
    for adapter in adapters:
        with pytest.raises(Poisoned):
            adapter.require_usable()
    adapters[0].steps.clear()
    update = pair.publish(linear(2.0).state_dict(), version=2)
    runs = [in_thread(install, update, adapter, rank) for rank, adapter in enumerate(adapters)]
    assert set(update.wait(timeout=5)) == {0, 1}
    for thread, _ in runs:
        thread.join()
    assert update.committed
    assert [values(engine) for engine in engines] == [{2.0}, {2.0}]
    for adapter in adapters:
        adapter.require_usable()


def test_a_refusal_by_one_engine_comes_before_the_others_first_write(pair):
    engines = [linear(0.0), nn.Linear(5, 5)]
    update = pair.publish(linear(1.0).state_dict(), version=1)
    thread, result = in_thread(install, update, TorchAdapter(engines[0]), 0)
    time.sleep(0.05)
    with pytest.raises(UpdateRejected, match="shape"):
        install(update, TorchAdapter(engines[1]), 1)
    thread.join()
    assert "another consumer gave up" in str(result[0])
    assert values(engines[0]) == {0.0}


def test_caches_are_reset_after_all_have_installed(pair):
    seen, update = [], pair.publish(linear(1.0).state_dict(), version=1)
    adapters = [
        Adapter(linear(0.0), caches=lambda: seen.append(update.committed)),
        Adapter(linear(0.0), install=lambda: time.sleep(0.1), caches=lambda: seen.append(update.committed)),
    ]
    runs = [in_thread(install, update, adapter, rank) for rank, adapter in enumerate(adapters)]
    update.wait(timeout=5)
    for thread, _ in runs:
        thread.join()
    assert seen == [True, True]


def test_four_consumers_one_slow_and_one_that_never_comes():
    with Publisher(Local(), run_id="demo", consumers=4) as publisher:
        engines = [linear(0.0) for _ in range(3)]
        update = publisher.publish(linear(1.0).state_dict(), version=1)
        slow = Adapter(engines[2], preflight=lambda: time.sleep(0.2))
        adapters = [TorchAdapter(engines[0]), TorchAdapter(engines[1]), slow]
        runs = [in_thread(install, update, adapter, rank, timeout=0.3) for rank, adapter in enumerate(adapters)]
        with pytest.raises((PeerLost, UpdateRejected)):
            update.wait(timeout=5)
        for thread, result in runs:
            thread.join()
            assert isinstance(result[0], PeerLost | UpdateRejected)
        assert any(isinstance(r[0], PeerLost) and 3 in r[0].ranks for _, r in runs)
        assert [values(engine) for engine in engines] == [{0.0}] * 3
        assert publisher.counters["slots_in_use"] == 0


# Liars.


def test_what_a_consumer_says_must_be_of_this_update(publisher):
    update = publisher.publish(linear(1.0).state_dict(), version=1)
    with Consumer(update.ticket()) as consumer:
        lease = update._leases[0]
        with pytest.raises(OutOfOrder, match="cannot be installed: it is offered"):
            lease.installed(update.manifest.manifest_id)
        consumer.import_update()
        with pytest.raises(UpdateRejected, match="installed abc, not"):
            lease.installed("abc")
        receipt = consumer.install(TorchAdapter(linear(0.0)), caches="reset")
        for lie in ({"version": 2}, {"rank": 1}, {"manifest_id": "ab" * 32}, {"outcomes": receipt.outcomes[1:]}):
            with pytest.raises(UpdateRejected, match="receipt"):
                lease.acknowledged(dataclasses.replace(receipt, **lie))
        assert update.pending() == (0,)
        consumer.acknowledge(receipt)
        with pytest.raises(UpdateRejected, match="another receipt"):
            lease.acknowledged(dataclasses.replace(receipt, caches="kept: a lie"))
        lease.imported()  # late duplicates change nothing
        lease.installed(update.manifest.manifest_id)
        lease.acknowledged(receipt)
        assert update.wait(timeout=0) == {0: receipt}


def test_an_adapter_that_forgets_a_tensor_or_makes_up_an_outcome(publisher):
    class Forgetful(TorchAdapter):
        def install(self, manifest, tensors):
            super().install(manifest, tensors)
            return self.outcomes

    adapter = Forgetful(linear(0.0))
    for version, outcomes in enumerate(({"weight": "copied"}, {"weight": "copied", "bias": "guessed"})):
        adapter.outcomes = outcomes
        with pytest.raises(WeightSyncError, match="reports outcomes"):
            install(publisher.publish(linear(1.0).state_dict(), version=version), adapter)
        with pytest.raises(Poisoned):
            adapter.require_usable()


def test_an_older_update_does_not_follow_a_newer_one(publisher):
    engine = linear(0.0)
    adapter = TorchAdapter(engine)
    old, new = (publisher.publish(linear(float(v)).state_dict(), version=v) for v in (1, 2))
    install(new, adapter)
    with pytest.raises(UpdateRejected, match="rank 0 has version 2; version 1 is stale"):
        install(old, adapter)
    assert values(engine) == {2.0}


def test_updates_of_another_model_and_expired_ones_are_refused(publisher):
    update = publisher.publish({"w": torch.ones(1)}, version=1, model_config_digest="ab")
    for expected in ({"run_id": "other"}, {"model_id": "other"}, {"model_config_digest": "cd"}):
        update = publisher.publish({"w": torch.ones(1)}, version=update.manifest.version + 1, model_config_digest="ab")
        refused = pytest.raises(UpdateRejected, match=f"of {next(iter(expected))} .* this engine takes")
        with Consumer(update.ticket(), **expected) as consumer, refused:
            consumer.import_update()
    with Publisher(Local(), run_id="demo", lifetime=0.01) as brief:
        update = brief.publish({"w": torch.ones(1)}, version=1)
        time.sleep(0.02)
        with Consumer(update.ticket()) as consumer, pytest.raises(UpdateRejected, match="expired"):
            consumer.import_update()


def test_an_expired_update_makes_room_while_a_publication_waits():
    with Publisher(Local(), run_id="demo", slots=1, lifetime=0.1, reuse_timeout=5) as publisher:
        update = publisher.publish({"w": torch.ones(1)}, version=1)
        consumer = Consumer(update.ticket())
        publisher.publish({"w": torch.ones(1)}, version=2)
        with pytest.raises(UpdateRejected, match="expired"):
            consumer.import_update()


# Many at once.


def test_a_revoked_slot_is_not_filled_while_it_is_read():
    with Publisher(Local(), run_id="demo", slots=1, reuse_timeout=0.1) as publisher:
        update = publisher.publish({"w": torch.full((4,), 1.0)}, version=1)
        update.ticket()
        lease = update._leases[0]
        with lease.pinned(0) as arena:
            update.revoke()
            assert publisher._slots[0].state is SlotState.REVOKED
            with pytest.raises(PeerLost, match="every slot is held"):
                publisher.publish({"w": torch.full((4,), 2.0)}, version=2)
            assert arena[:16].view(torch.float32).tolist() == [1.0] * 4
            with pytest.raises(UpdateRejected, match="revoked"):
                lease.imported()
        assert publisher._slots[0].state is SlotState.FREE
        publisher.publish({"w": torch.full((4,), 2.0)}, version=2)


def test_a_reader_does_not_keep_others_waiting(pair):
    update = pair.publish({"w": torch.ones(4)}, version=1)
    tickets = [update.ticket(rank) for rank in range(2)]
    with update._leases[0].pinned(0):
        thread, result = in_thread(lambda: Consumer(tickets[1]).import_update()["w"].tolist())
        thread.join(timeout=5)
        assert result == [[1.0] * 4]


def test_a_publisher_that_is_closed_waits_for_readers_and_says_so_if_in_vain():
    publisher = Publisher(Local(), run_id="demo", reuse_timeout=0.05)
    update = publisher.publish({"w": torch.ones(4)}, version=1)
    with update._leases[0].pinned(0), pytest.raises(PeerLost, match="still reads a slot"):
        publisher.close()
    publisher.close()
    assert publisher.counters["arena_bytes"] == 0


def test_two_installations_into_one_engine_at_once():
    began, go_on, engine = threading.Event(), threading.Event(), linear(0.0)
    adapter = Adapter(engine, install=lambda: (began.set(), go_on.wait(5)))
    with Publisher(Local(), run_id="a") as one, Publisher(Local(), run_id="b") as other:
        thread, result = in_thread(install, one.publish(linear(1.0).state_dict(), version=1), adapter)
        assert began.wait(5)
        with pytest.raises(UpdateRejected, match="another installation into this engine is under way"):
            install(other.publish(linear(2.0).state_dict(), version=1), adapter)
        with pytest.raises(Poisoned, match="under way"):
            adapter.require_usable()
        go_on.set()
        thread.join()
    assert result[0].version == 1
    assert values(engine) == {1.0}
    adapter.require_usable()


def test_many_consumers_in_threads_get_the_same_bytes():
    tensors = {f"w{i}": torch.randn(50, 7) for i in range(20)}
    with Publisher(Local(), run_id="demo", consumers=4) as publisher:
        for version in range(20):
            for tensor in tensors.values():
                tensor.add_(1)
            update = publisher.publish(tensors, version=version)
            engines = [nn.Module() for _ in range(4)]
            for engine in engines:
                for name, tensor in tensors.items():
                    engine.register_buffer(name, torch.zeros_like(tensor))
            runs = [in_thread(install, update, TorchAdapter(engine), rank) for rank, engine in enumerate(engines)]
            receipts = update.wait(timeout=10)
            for thread, _ in runs:
                thread.join()
            assert {receipt.manifest_id for receipt in receipts.values()} == {update.manifest.manifest_id}
            assert all(torch.equal(engine.get_buffer(n), t) for engine in engines for n, t in tensors.items())
        assert publisher.counters["slots_in_use"] == 0


@pytest.mark.parametrize("timeout", [math.inf, math.nan, -1, None])
def test_every_wait_has_a_deadline(publisher, timeout):
    update = publisher.publish({"w": torch.ones(1)}, version=1)
    with pytest.raises(ValueError, match="every wait has a deadline"):
        update.wait(timeout=timeout)


# Memory.


def test_what_a_consumer_keeps_is_not_written_over(publisher):
    kept = []
    for version in range(6):
        with Consumer(publisher.publish({"w": torch.full((8,), float(version))}, version=version).ticket()) as consumer:
            kept.append(consumer.import_update()["w"][2:5])
    assert [part.tolist() for part in kept] == [[float(v)] * 3 for v in range(6)]
    assert publisher.transport.spare_bytes == 0
    del kept
    gc.collect()
    assert publisher.transport.spare_bytes == 6 * 256


def test_memory_of_imports_is_used_again_and_given_back():
    transport = Local()
    with Publisher(transport, run_id="demo") as publisher:
        for version in range(10):
            install(publisher.publish({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, version=version),
                    TorchAdapter(linear(0.0)))  # fmt: skip
        assert transport.spare_bytes == 512
        with Consumer(publisher.publish({"w": torch.ones(100)}, version=10).ticket()) as consumer:
            consumer.import_update()
        assert transport.spare_bytes == 512  # pages of the old layout are gone
    assert transport.spare_bytes == 0


def test_an_update_without_elements(publisher):
    engine = nn.Module()
    engine.register_buffer("nothing", torch.empty(0, 3))
    receipt = install(publisher.publish(engine.state_dict(), version=1), TorchAdapter(engine))
    assert dict(receipt.outcomes) == {"nothing": "copied"}
    assert receipt.bytes_copied == 0


# Reading back.


def test_what_was_installed_can_be_read_back(publisher):
    engine = linear(0.0)
    receipt = install(publisher.publish(linear(1.0).state_dict(), version=1), TorchAdapter(engine), read_back=True)
    assert receipt.read_back.startswith("xxh3-128:full:")
    assert "read_back" in receipt.seconds

    def flip():
        engine.weight.data.view(torch.int32)[1, 2] ^= 1

    adapter = Adapter(engine, install=flip)
    with pytest.raises(WeightSyncError, match="the engine's tensors are not the update's"):
        install(publisher.publish(linear(2.0).state_dict(), version=2), adapter, read_back=True)
    with pytest.raises(Poisoned):
        adapter.require_usable()


def test_a_flipped_bit_in_every_region_is_refused():
    tensors = {"a": torch.randn(5), "b": torch.randn(300), "c": torch.tensor(1.0), "d": torch.ones(3).bool()}
    with Publisher(Local(), run_id="demo") as publisher:
        regions = publisher.publish(tensors, version=0).manifest.tensors
        places = [at for entry in regions for at in (entry.span.offset, entry.span.offset + entry.span.nbytes - 1)]
        for version, at in enumerate([*places, -1], start=1):
            update = publisher.publish(tensors, version=version)
            update._slot.arena[at] ^= 16
            with Consumer(update.ticket()) as consumer, pytest.raises(DigestMismatch, match=f"version {version}"):
                consumer.import_update()


# Modules that are hard to write to.


def module_of(**buffers):
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


class Hooked(nn.Linear):
    """Its state dict holds a tensor that is made for the occasion."""

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        state["weight"] = state["weight"] * 1
        return state


class Extra(nn.Linear):
    """Its state dict holds something that is no tensor."""

    def get_extra_state(self):
        return {"scale": 1.0}

    def set_extra_state(self, state):
        pass


FLAT = torch.zeros(8)
UNWRITABLE = {
    "hook": (Hooked(3, 2), "weight: a state-dict hook makes it"),
    "extra": (Extra(3, 2), "'_extra_state': expected a tensor, got dict"),
    "meta": (nn.Linear(3, 2, device="meta"), "materialise the module first"),
    "expanded": (module_of(a=torch.zeros(2, 1).expand(2, 3)), "a: several of the module's elements are one in memory"),
    "windows": (module_of(a=torch.zeros(8).as_strided((3, 3), (2, 1))), "a: several of the module's elements"),
    "overlap": (module_of(a=FLAT[:5], b=FLAT[4:]), "a and b share a part of their memory"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_modules_that_cannot_be_written_are_refused_before_the_first_write(publisher, name):
    module, message = UNWRITABLE[name]
    state = {key: torch.ones(t.shape) for key, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    adapter = TorchAdapter(module)
    with pytest.raises(UpdateRejected, match=message):
        install(publisher.publish(state, version=1), adapter)
    adapter.require_usable()


def test_parts_of_tensors_are_refused_by_a_whole_module(publisher):
    update = publisher.publish(linear(1.0).state_dict(), version=1, shards={"weight": Shard((4, 3), (2, 0), 0, 1, 2)})
    assert update.manifest.by_name["weight"].shard.world == 2
    with pytest.raises(UpdateRejected, match="weight: part 1 of 2"):
        install(update, TorchAdapter(linear(0.0)))


def test_views_of_one_storage_side_by_side_and_strided_ones_are_written(publisher):
    flat = torch.zeros(12)
    module = module_of(a=flat[:4], b=flat[4:8].view(2, 2).t(), c=flat[8:12:3])
    state = {"a": torch.arange(4.0), "b": torch.tensor([[4.0, 5], [6, 7]]), "c": torch.tensor([8.0, 9])}
    install(publisher.publish(state, version=1), TorchAdapter(module))
    assert flat.tolist() == [0, 1, 2, 3, 4, 6, 5, 7, 8, 0, 0, 9]


def test_tied_scalars_and_a_module_made_in_inference_mode(publisher):
    scalar = torch.tensor(0.0)
    adapter = TorchAdapter(module_of(a=scalar, b=scalar))
    with pytest.raises(UpdateRejected, match="a and b are tied in the module and differ"):
        install(publisher.publish({"a": torch.tensor(1.0), "b": torch.tensor(2.0)}, version=1), adapter)
    receipt = install(publisher.publish({"a": torch.tensor(3.0), "b": torch.tensor(3.0)}, version=2), adapter)
    assert dict(receipt.outcomes) == {"a": "copied", "b": "aliased"}
    assert scalar.item() == 3.0
    with torch.inference_mode():
        engine = linear(0.0)
    install(publisher.publish(linear(1.0).state_dict(), version=3), TorchAdapter(engine))
    assert values(engine) == {1.0}


def test_a_module_that_moves_is_planned_anew(publisher):
    engine = linear(0.0)
    adapter = TorchAdapter(engine)
    for version in range(4):
        if version == 2:
            engine.weight = nn.Parameter(torch.zeros(2, 3))
        if version == 3:
            engine.bias = None
        state = linear(float(version)).state_dict()
        if version == 3:
            with pytest.raises(UpdateRejected, match="unknown to the module: bias"):
                install(publisher.publish(state, version=version), adapter)
            del state["bias"]
            version = 4
        install(publisher.publish(state, version=version), adapter)
    assert values(engine) == {3.0}


def test_a_tie_made_later_is_seen(publisher):
    engine = module_of(a=torch.zeros(2), b=torch.zeros(2))
    adapter = TorchAdapter(engine)
    state = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
    install(publisher.publish(state, version=1), adapter)
    engine.b = engine.a
    with pytest.raises(UpdateRejected, match="a and b are tied in the module and differ"):
        install(publisher.publish(state, version=2), adapter)


def test_a_change_of_what_the_update_does_not_name_is_seen(publisher):
    engine = linear(0.0)
    engine.register_buffer("table", torch.tensor([1.0, math.nan]), persistent=False)
    adapter = TorchAdapter(engine)
    install(publisher.publish(linear(1.0).state_dict(), version=1), adapter)
    assert engine.table[0] == 1

    original = torch._foreach_copy_

    def careless(destinations, sources):
        original(destinations, sources)
        engine.table.add_(1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", careless)
        with pytest.raises(WeightSyncError, match="does not name has changed"):
            install(publisher.publish(linear(2.0).state_dict(), version=2), adapter, caches=Keep("a test"))
    with pytest.raises(Poisoned):
        adapter.require_usable()
