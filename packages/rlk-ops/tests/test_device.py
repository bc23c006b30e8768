"""The hardware-aware context: what it reports, what it sets, and that it restores everything."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from rlk_ops import Device, current_device
from rlk_ops.device import DeviceUnavailable, gpu_backend

REPOSITORY = Path(__file__).parents[3]
GPU = gpu_backend()
DEVICES = ["cpu", *([GPU] if GPU else [])]


def test_parse_accepts_every_spelling():
    cpu = Device("cpu")
    assert Device.parse("cpu") == Device.parse(torch.device("cpu")) == Device.parse(cpu) == cpu
    assert Device.parse("cpu", seed=3).seed == 3
    assert Device.parse(Device("cpu", seed=5)).seed == 5
    assert str(cpu) == "cpu"
    assert cpu.torch_device == torch.device("cpu")


@pytest.mark.parametrize("spec", ["cud", "cpu:x", "cuda:-1", "mps", "meta"])
def test_parse_refuses_what_is_no_device(spec):
    with pytest.raises(ValueError, match=r"backend|device"):
        Device.parse(spec)


def test_parse_names_the_nearest_backend():
    with pytest.raises(ValueError, match="did you mean 'cuda'"):
        Device.parse("cud")
    with pytest.raises(TypeError, match="got int"):
        Device.parse(0)


def test_the_cpu_refuses_what_it_does_not_have():
    with pytest.raises(ValueError, match="index"):
        Device("cpu", 1)
    with pytest.raises(ValueError, match="stream"):
        Device("cpu", stream=object())


@pytest.mark.parametrize("backend", [b for b in ("cuda", "rocm") if b != GPU])
def test_an_absent_backend_raises_with_the_remedy(backend):
    with pytest.raises(DeviceUnavailable, match=f"'{backend}'.*visible.*install.*'cpu'"):
        Device.parse(f"{backend}:0")


@pytest.mark.parametrize("spec", DEVICES)
def test_facts_of_the_machine(spec):
    device = Device.parse(spec)
    assert device.name
    assert re.fullmatch(r"cpu|sm_\d+|gfx\w+", device.arch)
    assert 0 < device.free_memory <= device.total_memory
    assert device.multiprocessors >= 1
    assert (device.uuid is None) == (spec == "cpu")


@pytest.mark.parametrize("spec", DEVICES)
def test_peak_memory_sees_an_allocation_and_forgets_it_after_a_reset(spec):
    device = Device.parse(spec)
    device.reset_peak_memory()
    before = device.peak_memory()
    block = torch.ones(64 << 20, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    assert device.peak_memory() - before > 48 << 20
    del block
    device.reset_peak_memory()
    assert device.peak_memory() - before < 48 << 20


@pytest.mark.parametrize("spec", DEVICES)
def test_events_measure_the_work_between_them(spec):
    device = Device.parse(spec)
    start, middle, end = device.event(), device.event(), device.event()
    work = torch.randn(400, 400, device=device.torch_device)
    start.record()
    work = work @ work
    middle.record()
    for _ in range(20):
        work = work @ work
    end.record()
    end.synchronize()
    whole, parts = end.milliseconds_since(start), [middle.milliseconds_since(start), end.milliseconds_since(middle)]
    assert min(parts) > 0
    assert whole == pytest.approx(sum(parts), rel=1e-2, abs=1e-2)


def test_an_event_that_was_not_recorded_says_so():
    device = Device("cpu")
    with pytest.raises(ValueError, match="record"):
        device.event().milliseconds_since(device.event())


@pytest.mark.parametrize("spec", DEVICES)
def test_the_seed_holds_inside_and_the_generators_are_restored_outside(spec):
    device = Device.parse(spec, seed=11)

    def draw():
        return torch.rand(4), torch.rand(4, device=device.torch_device)

    outer = Device.parse(spec, seed=1)
    with outer:
        expected = [draw(), draw()]
    with outer:
        first = draw()
        with device:
            inside = draw()
        second = draw()
    with device:
        again = draw()
    for got, want in zip((first, second, again), (*expected, inside), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.equal(inside[0], expected[0][0])


def test_everything_is_restored_when_the_block_raises():
    state = torch.get_rng_state()
    with pytest.raises(IndexError), Device("cpu", seed=3):
        torch.rand(5)[9]
    assert torch.equal(torch.get_rng_state(), state)
    assert current_device() == Device.parse(GPU or "cpu")


def test_without_a_seed_draws_inside_advance_the_generator():
    state = torch.get_rng_state()
    with Device("cpu"):
        torch.rand(5)
    assert not torch.equal(torch.get_rng_state(), state)


def test_current_device_is_the_innermost_of_this_thread():
    outer, inner, seen = Device("cpu", seed=1), Device("cpu", seed=2), []
    with outer:
        with inner:
            assert current_device() is inner
            with inner:
                assert current_device() is inner
            thread = threading.Thread(target=lambda: seen.append(current_device()))
            thread.start()
            thread.join()
        assert current_device() is outer
    assert seen[0].seed is None


@pytest.mark.skipif(GPU is None, reason="needs a GPU")
def test_the_stream_is_current_inside_and_restored_outside():
    plain = Device.parse(GPU)
    stream = plain.new_stream()
    before = plain.current_stream()
    with Device(GPU, stream=stream):
        assert plain.current_stream() == stream
    assert plain.current_stream() == before


def test_no_other_module_asks_torch_which_gpu_it_drives():
    sources = [REPOSITORY / "src", *(REPOSITORY / "packages").glob("*/src")]
    allowed = {Path("rlk_ops/device.py"), Path("rlk_weightsync/device.py")}
    pattern = re.compile(r"torch\.cuda\b|torch\.version\.(hip|cuda)|from torch import .*\bcuda\b")
    offenders = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for source in sources
        for path in source.rglob("*.py")
        if path.relative_to(source) not in allowed
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert sources[0].exists()
    assert not offenders, f"ask rlk_ops.Device instead: {offenders}"
