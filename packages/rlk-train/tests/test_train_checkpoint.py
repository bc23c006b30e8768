import multiprocessing
import os
import pickle
import random
import resource
import signal
import time
from dataclasses import replace

import numpy
import pytest
import torch

from rlk_ops import Objective
from rlk_train import CausalLMPolicy, CheckpointError, LocalWorker, TrainConfig
from rlk_train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint

CONFIG = TrainConfig(
    lr=1e-2,
    schedule="cosine",
    warmup_steps=3,
    total_steps=40,
    minibatches=2,
    epochs=2,
    micro_batch_tokens=40,
    objective=Objective("dapo", kl_coef=0.1),
    report_entropy=True,
)
TIMED = ("seconds", "tokens_per_s")


def comparable(result):
    metrics = {name: value for name, value in result.metrics.items() if name not in TIMED}
    return replace(result, metrics=metrics)


def bits(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(dtype, tmp_path, make_model, make_rollout):
    rollouts = [make_rollout(seed=seed) for seed in range(5)]
    worker = LocalWorker(CausalLMPolicy(make_model(dtype)), CONFIG)
    for rollout in rollouts[:2]:
        worker.train(rollout)
    worker.save(tmp_path / "checkpoint", extra={"data": [1, {"next": 2}]})
    expected = [comparable(worker.train(rollout)) for rollout in rollouts[2:]]

    resumed = LocalWorker(CausalLMPolicy(make_model(dtype, seed=99)), CONFIG)
    assert resumed.load(tmp_path / "checkpoint") == {"data": [1, {"next": 2}]}
    assert (resumed.step, resumed.weight_version) == (8, 2)
    assert [comparable(resumed.train(rollout)) for rollout in rollouts[2:]] == expected
    assert resumed.step == worker.step == 20
    for name, tensor in worker.policy.state_dict().items():
        assert torch.equal(resumed.policy.state_dict()[name], tensor), name


def test_the_random_generators_come_back(tmp_path, make_model):
    worker = LocalWorker(CausalLMPolicy(make_model()), CONFIG)
    worker.save(tmp_path / "c")
    draws = [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist(), random.gauss(0, 1)]
    worker.load(tmp_path / "c")
    assert [torch.rand(3).tolist(), random.random(), numpy.random.rand(3).tolist(), random.gauss(0, 1)] == draws


def test_another_model_is_refused_and_nothing_changes(tmp_path, make_model):
    LocalWorker(CausalLMPolicy(make_model()), CONFIG).save(tmp_path / "c")
    for other in (make_model(layers=1, seed=5), make_model(torch.bfloat16, seed=5)):
        worker = LocalWorker(CausalLMPolicy(other), CONFIG)
        before = bits(other)
        with pytest.raises(CheckpointError, match="another model"):
            worker.load(tmp_path / "c")
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_another_set_of_trained_parameters_is_refused(tmp_path, make_model):
    LocalWorker(CausalLMPolicy(make_model()), CONFIG).save(tmp_path / "c")
    model = make_model()
    model.model.norm.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"trained parameters: model\.norm\.weight: saved trained, here absent"):
        LocalWorker(CausalLMPolicy(model), CONFIG).load(tmp_path / "c")


def test_another_configuration_is_refused_unless_named(tmp_path, make_model):
    LocalWorker(CausalLMPolicy(make_model()), CONFIG).save(tmp_path / "c", extra={"at": 3})
    changed = replace(CONFIG, total_steps=80, objective=Objective("dapo", kl_coef=0.2))
    worker = LocalWorker(CausalLMPolicy(make_model()), changed)
    with pytest.raises(
        CheckpointError, match=r"objective\.kl_coef: saved 0\.1, here 0\.2.*total_steps: saved 40, here 80"
    ):
        worker.load(tmp_path / "c")
    with pytest.raises(CheckpointError, match="total_steps"):
        worker.load(tmp_path / "c", may_differ=["objective.kl_coef"])
    assert worker.load(tmp_path / "c", may_differ=["objective.kl_coef", "total_steps"]) == {"at": 3}
    assert worker.load(tmp_path / "c", may_differ=iter(["objective", "total_steps"])) == {"at": 3}
    with pytest.raises(ValueError, match="total_stepz"):
        worker.load(tmp_path / "c", may_differ=["total_stepz"])


def test_what_is_no_checkpoint_is_refused_and_never_unpickled(tmp_path, make_model):
    worker = LocalWorker(CausalLMPolicy(make_model()), CONFIG)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        worker.load(tmp_path / "absent")
    (tmp_path / "pickle").write_bytes(pickle.dumps(_Bomb(tmp_path / "ran")))
    torch.save({"a": torch.ones(2)}, tmp_path / "torch")
    whole = tmp_path / "whole"
    worker.save(whole)
    (tmp_path / "short").write_bytes(whole.read_bytes()[:-100])
    for name in ("pickle", "torch", "short"):
        with pytest.raises(CheckpointError):
            worker.load(tmp_path / name)
    assert not (tmp_path / "ran").exists()
    import safetensors.torch

    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(CheckpointError, match="not a checkpoint of rlk_train"):
        worker.load(tmp_path / "foreign")


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_an_extra_that_is_not_json_is_refused_before_anything_is_written(tmp_path, make_model):
    worker = LocalWorker(CausalLMPolicy(make_model()), CONFIG)
    with pytest.raises(TypeError, match="extra"):
        worker.save(tmp_path / "c", extra={"tensor": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []


def test_tied_and_viewed_tensors_keep_their_values(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "a": base,
        "tied": base,
        "column": base[:, 1],
        "transposed": base.T,
        "empty": torch.empty(0),
        "b": torch.tensor(2),
    }
    write_checkpoint(tmp_path / "c", Checkpoint(tensors, {"n": 1}))
    got = read_checkpoint(tmp_path / "c")
    assert got.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(got.tensors[name], tensor), name
    assert (tmp_path / "c").stat().st_size < 12 * 4 * 3 + 600


def in_a_child(function, *arguments):
    """Start `function` in a forked process of its own."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def _save_for_ever(path, started):
    torch.set_num_threads(1)  # a forked child has no OpenMP threads to wait for
    for version in range(1, 1_000_000):
        write_checkpoint(path, Checkpoint({"x": torch.full((500_000,), float(version))}, {"version": version}))
        started.set()


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    for delay in (0.0, 0.003, 0.011, 0.02, 0.037):
        started = multiprocessing.get_context("fork").Event()
        process = in_a_child(_save_for_ever, tmp_path / "c", started)
        assert started.wait(30)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        got = read_checkpoint(tmp_path / "c")
        assert (got.tensors["x"] == got.state["version"]).all()
    write_checkpoint(tmp_path / "c", Checkpoint({"x": torch.ones(1)}, {"version": 0}))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def _save_on_a_full_disk(path, outcome):
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write_checkpoint(path, Checkpoint({"x": torch.full((500_000,), 2.0)}, {"version": 2}))
    except OSError as error:
        outcome.put(str(error))
    else:
        outcome.put("written")


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    write_checkpoint(tmp_path / "c", Checkpoint({"x": torch.ones(500_000)}, {"version": 1}))
    outcome = multiprocessing.get_context("fork").Queue()
    process = in_a_child(_save_on_a_full_disk, tmp_path / "c", outcome)
    assert "cannot write checkpoint" in outcome.get(timeout=30)
    process.join()
    got = read_checkpoint(tmp_path / "c")
    assert got.state["version"] == 1
    assert (got.tensors["x"] == 1).all()
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
