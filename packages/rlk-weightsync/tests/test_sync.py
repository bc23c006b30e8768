"""Publish, import, install, acknowledge, release: the order, the deadlines, and what each failure leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
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
    Ticket,
    TransportUnsupported,
    UpdateRejected,
    WeightSyncError,
)
from rlk_weightsync.adapters.torch import TorchAdapter
from rlk_weightsync.transports.local import open_leases


class Net(nn.Module):
    """Two layers, a tied head, a buffer that is saved and one that is not."""

    def __init__(self, seed=0, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("inverse", torch.rand(4) + seed, persistent=False)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture(autouse=True)
def nothing_leaks():
    yield
    assert open_leases() == 0


def install(update, adapter, rank=0, **options):
    with Consumer(update.ticket(rank), **options) as consumer:
        consumer.import_update()
        receipt = consumer.install(adapter, caches="reset")
        consumer.acknowledge(receipt)
    return receipt


def test_the_whole_way_round_bit_for_bit():
    trainer, engine = Net(1), Net(2)
    inverse = engine.inverse.clone()
    addresses = [p.data_ptr() for p in engine.parameters()]
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish(trainer.state_dict(), version=7)
        receipt = install(update, TorchAdapter(engine), run_id="demo")
        assert update.wait(timeout=5) == {0: receipt}
        assert update.committed
    assert same(trainer, engine)
    assert [p.data_ptr() for p in engine.parameters()] == addresses
    assert torch.equal(engine.inverse, inverse)  # what is not in the update keeps its bits
    assert engine.head.weight is engine.embed.weight
    outcomes = dict(receipt.outcomes)
    assert outcomes["head.weight"] == "aliased"
    assert outcomes["embed.weight"] == "copied"
    assert receipt.version == 7
    assert receipt.bytes_copied == sum(t.numel() * t.element_size() for t in trainer.state_dict().values()) - 11 * 8 * 4
    assert set(receipt.seconds) == {"import", "barrier", "preflight", "install", "commit", "caches"}
    assert receipt.caches == "reset: a plain module has none"


def test_a_snapshot_does_not_follow_its_source():
    trainer, engine = Net(1), Net(2)
    with Publisher(Local(), run_id="demo") as publisher:
        frozen = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        update = publisher.publish(trainer.state_dict(), version=1)
        with torch.no_grad():
            trainer.body.weight.fill_(9.0)
        install(update, TorchAdapter(engine))
    assert torch.equal(engine.body.weight, frozen["body.weight"])


def test_an_import_is_the_consumers_own():
    with Publisher(Local(), run_id="demo", consumers=2) as publisher:
        update = publisher.publish({"w": torch.ones(3)}, version=1)
        with Consumer(update.ticket(0)) as first, Consumer(update.ticket(1)) as second:
            first.import_update()["w"].zero_()
            assert first.import_update()["w"].tolist() == [0, 0, 0]  # called again, the same object
            assert second.import_update()["w"].tolist() == [1, 1, 1]


def test_declared_casts():
    trainer, engine = Net(1), Net(2).bfloat16()
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish(trainer.state_dict(), version=1)
        with pytest.raises(UpdateRejected, match=r"cast=torch\.bfloat16"):
            install(update, TorchAdapter(engine))
        update = publisher.publish(trainer.state_dict(), version=2, cast=torch.bfloat16)
        install(update, TorchAdapter(engine))
        assert update.manifest.by_name["body.weight"].transform == "cast:f32"
    assert torch.equal(engine.body.weight, trainer.body.weight.bfloat16())


def test_versions_increase_strictly():
    with Publisher(Local(), run_id="demo") as publisher:
        publisher.publish({"w": torch.ones(1)}, version=3)
        for version in (3, 2):
            with pytest.raises(UpdateRejected, match="increase strictly"):
                publisher.publish({"w": torch.ones(1)}, version=version)


@pytest.mark.parametrize(
    ("bend", "message"),
    [
        (lambda s: s.pop("body.bias"), "1 missing from the update: body.bias"),
        (lambda s: s.update(extra=torch.ones(1)), "1 unknown to the module: extra"),
        (lambda s: s.update({"body.bias": torch.ones(9)}), r"body.bias: shape \(9,\)"),
        (lambda s: s.update({"body.bias": torch.ones(8, dtype=torch.float64)}), "body.bias: f64 published"),
        (lambda s: s.update({"head.weight": torch.ones(11, 8)}), "tied in the module and differ"),
    ],
)
def test_preflight_refuses_before_the_first_write(bend, message):
    trainer, engine, untouched = Net(1), Net(2), Net(2)
    state = dict(trainer.state_dict())
    bend(state)
    adapter = TorchAdapter(engine)
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish(state, version=1)
        with pytest.raises(UpdateRejected, match=message):
            install(update, adapter)
        with pytest.raises(UpdateRejected, match="rank 0: UpdateRejected"):
            update.wait(timeout=1)
        assert publisher.counters["slots_in_use"] == 0
    assert same(engine, untouched)
    adapter.require_usable()


def test_an_untied_module_takes_both_copies_of_a_tied_update():
    trainer, engine = Net(1, tied=True), Net(2, tied=False)
    with Publisher(Local(), run_id="demo") as publisher:
        receipt = install(publisher.publish(trainer.state_dict(), version=1), TorchAdapter(engine))
    assert dict(receipt.outcomes)["head.weight"] == "copied"
    assert same(trainer, engine)


class DiesHalfWay(TorchAdapter):
    """Writes one tensor and dies, as a device fault would."""

    def __init__(self, module):
        super().__init__(module)
        self.dies = True

    def install(self, manifest, tensors):
        if not self.dies:
            return super().install(manifest, tensors)
        next(self._module.parameters()).data.fill_(float("nan"))
        raise OSError("the device fell off the bus")


def test_a_death_half_way_poisons_until_a_full_install():
    trainer, engine = Net(1), Net(2)
    adapter = DiesHalfWay(engine)
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish(trainer.state_dict(), version=1)
        with pytest.raises(WeightSyncError, match="fell off the bus"):
            install(update, adapter)
        with pytest.raises(UpdateRejected, match="fell off the bus"):
            update.wait(timeout=1)
        with pytest.raises(Poisoned, match="install a full update first"):
            adapter.require_usable()
        adapter.dies = False
        install(publisher.publish(trainer.state_dict(), version=2), adapter)
    adapter.require_usable()
    assert same(trainer, engine)


def test_steps_out_of_order_are_typed_errors_and_repeats_are_harmless():
    trainer, engine = Net(1), Net(2)
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish(trainer.state_dict(), version=1)
        consumer = Consumer(update.ticket())
        with pytest.raises(OutOfOrder, match="cannot install: this consumer is offered"):
            consumer.install(TorchAdapter(engine), caches="reset")
        with pytest.raises(OutOfOrder, match="import_update"):
            _ = consumer.manifest
        consumer.import_update()
        consumer.import_update()
        receipt = consumer.install(TorchAdapter(engine), caches=Keep("nothing was cached yet"))
        assert receipt.caches == "kept: nothing was cached yet"
        with pytest.raises(OutOfOrder, match="cannot install"):
            consumer.install(TorchAdapter(engine), caches="reset")
        consumer.acknowledge(receipt)
        consumer.acknowledge(receipt)
        consumer.release()
        consumer.release()
        with pytest.raises(OutOfOrder, match="released"):
            consumer.import_update()


def test_the_cache_policy_is_required_and_checked():
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish({"w": torch.ones(1)}, version=1)
        with Consumer(update.ticket()) as consumer:
            consumer.import_update()
            with pytest.raises(TypeError, match="caches"):
                consumer.install(TorchAdapter(nn.Linear(1, 1)))
            with pytest.raises(ValueError, match="'reset' or Keep"):
                consumer.install(TorchAdapter(nn.Linear(1, 1)), caches="keep")
    with pytest.raises(ValueError, match="why the caches stay valid"):
        Keep("  ")


def test_another_runs_update_is_refused():
    with Publisher(Local(), run_id="theirs") as publisher:
        update = publisher.publish({"w": torch.ones(1)}, version=1)
        with Consumer(update.ticket(), run_id="ours") as consumer, pytest.raises(UpdateRejected, match="'theirs'"):
            consumer.import_update()


def test_all_consumers_commit_together():
    trainer, engines = Net(1), [Net(2), Net(3)]
    with Publisher(Local(), run_id="demo", consumers=2) as publisher:
        update = publisher.publish(trainer.state_dict(), version=1)
        first = Consumer(update.ticket(0), timeout=0.1)
        first.import_update()
        with pytest.raises(PeerLost, match=r"consumers \(1,\) did not import"):
            first.install(TorchAdapter(engines[0]), caches="reset")
        first.release()
        assert same(engines[0], Net(2))
        update = publisher.publish(trainer.state_dict(), version=2)
        threads = [threading.Thread(target=install, args=(update, TorchAdapter(e), r)) for r, e in enumerate(engines)]
        for thread in threads:
            thread.start()
        receipts = update.wait(timeout=10)
        for thread in threads:
            thread.join()
        assert {r.manifest_id for r in receipts.values()} == {update.manifest.manifest_id}
    assert all(same(trainer, engine) for engine in engines)


def test_one_consumers_failure_reaches_the_other():
    trainer = Net(1)
    with Publisher(Local(), run_id="demo", consumers=2) as publisher:
        update = publisher.publish(trainer.state_dict(), version=1)
        with Consumer(update.ticket(0)) as bad, Consumer(update.ticket(1)) as good:
            bad.import_update()
            good.import_update()
            with pytest.raises(UpdateRejected, match="names do not fit"):
                bad.install(TorchAdapter(nn.Linear(1, 1)), caches="reset")
            engine = Net(2)
            with pytest.raises(UpdateRejected, match="another consumer gave up"):
                good.install(TorchAdapter(engine), caches="reset")
            assert same(engine, Net(2))


def test_a_slow_consumer_is_named_and_its_slot_reclaimed():
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish({"w": torch.ones(2)}, version=1)
        ticket = update.ticket()
        consumer = Consumer(ticket)
        with pytest.raises(PeerLost, match=r"version 1: no acknowledgement of \(0,\) in 0.05 s") as caught:
            update.wait(timeout=0.05)
        assert caught.value.ranks == (0,)
        with pytest.raises(UpdateRejected, match="its deadline passed"):
            consumer.import_update()
        with pytest.raises(UpdateRejected, match="released or revoked"):
            Consumer(ticket)
        assert publisher.counters == {"arena_bytes": 256, "slots_in_use": 0, "leases": 0}
        consumer.release()


def test_released_without_acknowledging_is_no_success():
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish({"w": torch.ones(2)}, version=1)
        with Consumer(update.ticket()) as consumer:
            consumer.import_update()
        with pytest.raises(UpdateRejected, match="released without acknowledging"):
            update.wait(timeout=1)


def test_a_lying_receipt_is_refused():
    import dataclasses

    trainer, engine = Net(1), Net(2)
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish(trainer.state_dict(), version=1)
        with Consumer(update.ticket()) as consumer:
            consumer.import_update()
            receipt = consumer.install(TorchAdapter(engine), caches="reset")
            with pytest.raises(UpdateRejected, match="not the one of this installation"):
                consumer.acknowledge(dataclasses.replace(receipt, version=2))
            lease = update._leases[0]
            with pytest.raises(UpdateRejected, match="a receipt of version 2"):
                lease.acknowledged(dataclasses.replace(receipt, version=2))


def test_slots_are_reused_only_when_free():
    with Publisher(Local(), run_id="demo", reuse_timeout=0.05) as publisher:
        held = [publisher.publish({"w": torch.full((2,), float(v))}, version=v) for v in (1, 2)]
        consumers = [Consumer(update.ticket()) for update in held]
        with pytest.raises(PeerLost, match=r"every slot is held \(versions 1, 2, ranks \(0,\)\)"):
            publisher.publish({"w": torch.zeros(2)}, version=3)
        assert consumers[0].import_update()["w"].tolist() == [1, 1]
        consumers[0].release()
        third = publisher.publish({"w": torch.full((2,), 3.0)}, version=3)
        assert consumers[1].import_update()["w"].tolist() == [2, 2]
        consumers[1].release()
        with Consumer(third.ticket()) as last:
            assert last.import_update()["w"].tolist() == [3, 3]


def test_a_publication_waits_for_a_slot():
    with Publisher(Local(), run_id="demo", slots=1, reuse_timeout=5) as publisher:
        consumer = Consumer(publisher.publish({"w": torch.ones(2)}, version=1).ticket())
        consumer.import_update()
        timer = threading.Timer(0.1, consumer.release)
        started = time.monotonic()
        timer.start()
        publisher.publish({"w": torch.ones(2)}, version=2)
        assert time.monotonic() - started < 4
        timer.join()


def test_a_ticket_to_a_slot_filled_anew_is_refused():
    with Publisher(Local(), run_id="demo", slots=1) as publisher:
        update = publisher.publish({"w": torch.ones(2)}, version=1)
        ticket = Ticket.from_bytes(update.ticket())
        import dataclasses

        stale = dataclasses.replace(ticket, generation=ticket.generation + 1)
        with Consumer(stale.to_bytes()) as consumer, pytest.raises(UpdateRejected, match="filled anew"):
            consumer.import_update()


def test_corrupted_bytes_are_refused_and_nothing_is_installed():
    trainer = Net(1)
    for level, caught in (("full", True), ("off", False)):
        with Publisher(Local(), run_id="demo", integrity=level) as publisher:
            update = publisher.publish(trainer.state_dict(), version=1)
            slot = publisher._slots[0]
            for at in (0, slot.arena.numel() - 1, slot.arena.numel() // 2):
                slot.arena[at] ^= 1
            with Consumer(update.ticket()) as consumer:
                if caught:
                    with pytest.raises(DigestMismatch, match="arena 0 of version 1"):
                        consumer.import_update()
                else:
                    consumer.import_update()


def test_a_ticket_of_another_process_is_refused_with_the_remedy():
    with Publisher(Local(), run_id="demo") as publisher:
        ticket = publisher.publish({"w": torch.ones(2)}, version=1).ticket()
        code = (
            "import sys; from rlk_weightsync import Consumer, TransportUnsupported\n"
            "try: Consumer(bytes.fromhex(sys.argv[1]))\n"
            "except TransportUnsupported as error: print(error.remedy)"
        )
        done = subprocess.run([sys.executable, "-c", code, ticket.hex()], capture_output=True, text=True)
        assert "transport between processes" in done.stdout, done.stderr
        with pytest.raises(TransportUnsupported, match="publish through: local"):
            Consumer(Ticket.from_bytes(ticket).to_bytes().replace(b'"local"', b'"carrier-pigeon"'))


def test_a_publisher_is_refused_after_a_fork():
    with Publisher(Local(), run_id="demo") as publisher:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                publisher.publish({"w": torch.ones(1)}, version=1)
                os.write(write, b"published")
            except WeightSyncError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert b"made in another process" in os.read(read, 1000)


def test_a_thousand_rounds_leak_nothing():
    trainer, engine = Net(1), Net(2)
    adapter = TorchAdapter(engine)

    def held():
        return len(os.listdir("/proc/self/fd")), sum(1 for _ in open("/proc/self/maps"))

    with Publisher(Local(), run_id="demo") as publisher:
        for version in range(1, 1101):
            install(publisher.publish(trainer.state_dict(), version=version), adapter)
            if version == 100:
                before = held(), publisher.counters
        after = held(), publisher.counters
    assert after[0][0] == before[0][0]
    assert after[0][1] <= before[0][1] + 8  # the allocator may map a few arenas of its own
    assert after[1] == before[1]


def test_a_closed_publisher_takes_back_what_is_held():
    publisher = Publisher(Local(), run_id="demo")
    consumer = Consumer(publisher.publish({"w": torch.ones(1)}, version=1).ticket())
    publisher.close()
    publisher.close()
    with pytest.raises(UpdateRejected, match="closed"):
        consumer.import_update()
    with pytest.raises(WeightSyncError, match="closed"):
        publisher.publish({"w": torch.ones(1)}, version=2)


def test_fuse_groups_and_wrong_options():
    with Publisher(Local(), run_id="demo") as publisher:
        update = publisher.publish({"q": torch.ones(1), "k": torch.ones(1)}, version=1, groups={"q": "qk", "k": "qk"})
        assert update.manifest.by_name["q"].group == "qk:2"
        with pytest.raises(ValueError, match="no such tensors: v"):
            publisher.publish({"q": torch.ones(1)}, version=2, groups={"v": "qk"})
    for options in ({"integrity": "some"}, {"slots": 0}, {"consumers": (1, 1)}, {"consumers": 0}):
        with pytest.raises(ValueError, match="expected"):
            Publisher(Local(), run_id="demo", **options)


def test_importing_is_light():
    heavy = "('transformers', 'vllm', 'ray', 'triton', 'rlk_ops')"
    code = f"import rlk_weightsync, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
