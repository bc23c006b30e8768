import math
from dataclasses import replace

import pytest
import torch

from rlk_ops import Objective
from rlk_rollout.records import Scores
from rlk_train import CausalLMPolicy, LocalWorker, Policy, TooManySkippedSteps, TrainConfig, Worker
from rlk_train.samples import select_samples

BAD_TOKEN = 7


def with_tokens(rollout, change):
    """The rollout with every prompt and completion token passed through `change`."""
    groups = []
    for group in rollout.groups:
        prompt = tuple(map(change, group.prompt_ids))
        completions = tuple(
            replace(c, prompt_ids=prompt, token_ids=tuple(map(change, c.token_ids))) for c in group.completions
        )
        groups.append(replace(group, prompt_ids=prompt, completions=completions))
    return replace(rollout, groups=tuple(groups))


def with_completions(rollout, change):
    """The rollout with every completion passed through `change(place, completion)`."""
    place, groups = 0, []
    for group in rollout.groups:
        completions = tuple(change(place + i, c) for i, c in enumerate(group.completions))
        place += len(completions)
        groups.append(replace(group, completions=completions))
    return replace(rollout, groups=tuple(groups))


def bits(module):
    return {name: tensor.detach().clone().view(torch.int32) for name, tensor in module.state_dict().items()}


def same_bits(module, before):
    return all(torch.equal(now, before[name]) for name, now in bits(module).items())


def test_the_classes_fit_the_protocols(make_model):
    policy = CausalLMPolicy(make_model())
    assert isinstance(policy, Policy)
    assert isinstance(LocalWorker(policy), Worker)


def test_training_moves_probability_toward_what_was_rewarded(make_model, make_rollout, oracle_logps):
    model, rollout = make_model(), make_rollout(seed=2)
    worker = LocalWorker(CausalLMPolicy(model), TrainConfig(lr=3e-3))
    samples = select_samples(rollout, worker.config).samples

    def weighted():
        with torch.no_grad():
            return sum(s.advantage * float(oracle_logps(model, s.completion, 1.0).mean()) for s in samples)

    before = weighted()
    for _ in range(5):
        worker.train(rollout)
    assert weighted() > before + 1.0


def test_metrics_against_an_oracle(make_model, make_rollout, oracle_logps):
    model, rollout = make_model(torch.float64), make_rollout(seed=9, temperature=0.7)
    config = TrainConfig(report_entropy=True, objective=Objective("grpo", kl_coef=0.1), micro_batch_tokens=40)
    with torch.no_grad():
        own = torch.cat([oracle_logps(model, c, 0.7) for c in rollout.completions])
    engine = torch.cat([torch.tensor(c.logps, dtype=torch.float64) for c in rollout.completions])
    reference = torch.cat([torch.tensor(c.scores.ref_logps, dtype=torch.float64) for c in rollout.completions])
    entropy = mean_entropy(model, rollout)
    got = LocalWorker(CausalLMPolicy(model), config).train(rollout).metrics
    drift, rho = (own - engine).abs(), (own - engine).clamp(-20, 20).exp()
    gap = (reference - own).clamp(-20, 20)
    expected = {
        "drift/mean": drift.mean(),
        "drift/max": drift.max(),
        "drift/equal": 0.0,
        "rho/mean": rho.mean(),
        "rho/max": rho.max(),
        "ratio/min": 1.0,
        "ratio/mean": 1.0,
        "ratio/max": 1.0,
        "kl/k1": 0.0,
        "kl/k3": 0.0,
        "kl/ref": (gap.exp() - 1 - gap).mean(),
        "clip/low": 0.0,
        "clip/high": 0.0,
        "tokens": float(len(own)),
        "skipped": 0.0,
        "lr": config.lr,
        "entropy": entropy,
    }
    for name, value in expected.items():
        assert got[name] == pytest.approx(float(value), rel=1e-6, abs=1e-9), name


def mean_entropy(model, rollout):
    entropies = []
    for c in rollout.completions:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*c.prompt_ids, *c.token_ids]])).logits[
                0, len(c.prompt_ids) - 1 : -1
            ]
        entropies.append(torch.distributions.Categorical(logits=logits / rollout.sampling.temperature).entropy())
    return float(torch.cat(entropies).mean())


def test_log_probs_that_the_trainer_would_give_have_no_drift(make_model, make_rollout, oracle_logps):
    model, rollout = make_model(), make_rollout()
    config = TrainConfig(micro_batch_tokens=1)

    def own(_, completion):
        with torch.no_grad():
            return replace(completion, logps=tuple(oracle_logps(model, completion, 1.0).tolist()))

    got = LocalWorker(CausalLMPolicy(model), config).train(with_completions(rollout, own)).metrics
    assert got["drift/max"] <= 1e-5
    assert got["rho/mean"] == pytest.approx(1.0, abs=1e-5)


def test_windows_and_epochs(make_model, make_rollout):
    config = TrainConfig(lr=1e-2, minibatches=3, epochs=2)
    worker = LocalWorker(CausalLMPolicy(make_model()), config)
    result = worker.train(make_rollout())
    assert (result.steps, worker.step, result.weight_version) == (6, 6, 1)
    assert result.metrics["ratio/min"] < 0.99
    assert result.metrics["ratio/max"] > 1.01
    dealt = list(worker._deal(8))
    for epoch in (dealt[:3], dealt[3:]):
        assert sorted(i for window in epoch for i in window) == list(range(8))
    assert dealt[:3] != dealt[3:]
    assert [len(window) for window in worker._deal(2)] == [1] * 4


def test_one_window_of_old_log_probs_recomputed_equals_none(make_model, make_rollout):
    results = []
    for source in ("auto", "recompute"):
        model = make_model(torch.float64)
        worker = LocalWorker(CausalLMPolicy(model), TrainConfig(old_logps=source))
        results.append((worker.train(make_rollout()), model))
    (auto, a), (recomputed, b) = results
    assert auto.metrics["grad_norm"] == pytest.approx(recomputed.metrics["grad_norm"], rel=1e-10)
    assert recomputed.metrics["drift/mean"] == pytest.approx(auto.metrics["drift/mean"], rel=1e-10)
    assert len(list(a.parameters())) == len(list(b.parameters()))


def test_rollout_log_probs_as_old_ones_give_the_mismatch_ratio(make_model, make_rollout):
    got, expected = (
        LocalWorker(CausalLMPolicy(make_model()), TrainConfig(old_logps=source)).train(make_rollout()).metrics
        for source in ("rollout", "auto")
    )
    assert got["ratio/max"] == pytest.approx(expected["rho/max"], rel=1e-6)
    assert got["ratio/mean"] == pytest.approx(expected["rho/mean"], rel=1e-6)
    assert got["ratio/max"] > 1.5
    assert got["rho/max"] == 1.0
    assert got["drift/mean"] == pytest.approx(expected["drift/mean"], rel=1e-6)


def poisoned(make_model):
    """A model that gives NaN wherever BAD_TOKEN is read, and nowhere else."""
    model = make_model(tied=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = torch.nan
    return model


def test_a_step_that_is_not_finite_changes_no_bit_and_is_counted(make_model, make_rollout):
    model = poisoned(make_model)
    worker = LocalWorker(CausalLMPolicy(model), TrainConfig(lr=1e-2, warmup_steps=4, micro_batch_tokens=1))
    good = with_tokens(make_rollout(), lambda t: 8 if t == BAD_TOKEN else t)
    bad = with_tokens(make_rollout(), lambda t: BAD_TOKEN if t == 8 else t)
    assert any(BAD_TOKEN in c.prompt_ids + c.token_ids[:-1] for c in bad.completions)
    worker.train(good)
    moments = {name: t.clone() for name, t in worker._optimizer.state().items()}
    before = bits(model)
    result = worker.train(bad)
    assert (result.steps, result.skipped, result.metrics["skipped"], worker.step) == (0, 1, 1.0, 1)
    assert not math.isfinite(result.metrics["grad_norm"])
    assert same_bits(model, before)
    assert all(torch.equal(t, moments[name]) for name, t in worker._optimizer.state().items())
    again = worker.train(good)
    assert (again.steps, again.skipped, again.metrics["lr"]) == (1, 0, pytest.approx(1e-2 * 2 / 4))
    assert not same_bits(model, before)


def test_too_many_skipped_steps_in_a_row_raise(make_model, make_rollout):
    model = poisoned(make_model)
    bad = with_tokens(make_rollout(), lambda t: BAD_TOKEN)
    worker = LocalWorker(CausalLMPolicy(model), TrainConfig(skip_limit=3, minibatches=2))
    before = bits(model)
    assert worker.train(bad).skipped == 2
    with pytest.raises(TooManySkippedSteps, match="3 optimizer steps in a row"):
        worker.train(bad)
    assert same_bits(model, before)


def test_a_good_step_starts_the_count_of_skipped_ones_anew(make_model, make_rollout):
    worker = LocalWorker(CausalLMPolicy(poisoned(make_model)), TrainConfig(skip_limit=2))
    bad = with_tokens(make_rollout(), lambda t: BAD_TOKEN)
    good = with_tokens(make_rollout(), lambda t: 8 if t == BAD_TOKEN else t)
    assert [worker.train(rollout).skipped for rollout in (bad, good, bad, good, bad)] == [1, 0, 1, 0, 1]
    with pytest.raises(TooManySkippedSteps, match="2 optimizer steps"):
        worker.train(bad)


def failed(_, completion):
    return replace(completion, scores=Scores(reward=None, rewards={}, ref_logps=None, error="timed out"))


def test_a_rollout_with_nothing_left_takes_no_step(make_model, make_rollout):
    model = make_model()
    worker = LocalWorker(CausalLMPolicy(model), TrainConfig(minibatches=2))
    before = bits(model)
    result = worker.train(with_completions(make_rollout(), failed))
    assert (result.loss, result.steps, result.skipped, result.weight_version) == (0.0, 0, 0, 1)
    assert result.metrics["tokens"] == 0.0
    assert same_bits(model, before)


def test_the_published_snapshot_has_the_worker_s_bits_and_a_new_version(make_model, make_rollout):
    from rlk_weightsync import Consumer, Local, Publisher

    worker = LocalWorker(CausalLMPolicy(make_model()), TrainConfig(lr=1e-2))
    snapshots = {}
    with Publisher(Local(), run_id="test", consumers=1) as publisher:
        for version in (1, 2):
            worker.train(make_rollout(seed=version))
            update = worker.publish(publisher)
            assert update.manifest.version == worker.weight_version == version
            with Consumer(update.ticket(0)) as consumer:
                snapshots[version] = {name: tensor.clone() for name, tensor in consumer.import_update().items()}
    expected = worker.policy.state_dict()
    assert snapshots[2].keys() <= expected.keys()
    assert {t.data_ptr() for t in expected.values()} == {expected[name].data_ptr() for name in snapshots[2]}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in snapshots[2].items())
    assert any(not torch.equal(tensor, snapshots[1][name]) for name, tensor in snapshots[2].items())


def truncated(make_rollout, model, oracle_logps, *, record=True):
    """A rollout as top-k sampling gives it: the support, the processed and the temperature-only log-probs."""
    rollout = make_rollout(seed=4, top_k=20)

    def fill(_, completion):
        support = tuple(tuple(sorted({*range(0, 40, 2), token})) for token in completion.token_ids)
        support = (None, *support[1:])
        bare = replace(completion, support=None)
        with torch.no_grad():
            wide = oracle_logps(model, bare, 1.0)
            narrow = oracle_logps(model, replace(completion, support=support), 1.0)
        return replace(
            completion,
            support=support if record else None,
            logps=tuple(narrow.tolist()),
            temperature_logps=tuple(wide.tolist()),
        )

    return with_completions(rollout, fill)


def test_truncated_sampling_replays_the_support(make_model, make_rollout, oracle_logps):
    model = make_model()
    rollout = truncated(make_rollout, model, oracle_logps)
    got = LocalWorker(CausalLMPolicy(model), TrainConfig()).train(rollout).metrics
    assert got["drift/max"] <= 1e-5
    assert "truncation/bias_mean" not in got


@pytest.mark.parametrize("record", [True, False])
def test_temperature_only_reports_its_bias(record, make_model, make_rollout, oracle_logps):
    model = make_model()
    rollout = truncated(make_rollout, model, oracle_logps, record=record)
    got = LocalWorker(CausalLMPolicy(model), TrainConfig(truncated_policy="temperature_only")).train(rollout).metrics
    gaps = [p - t for c in rollout.completions for p, t in zip(c.logps, c.temperature_logps)]
    assert got["drift/max"] <= 1e-5
    assert got["truncation/bias_mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-6)
    assert got["truncation/bias_max"] == pytest.approx(max(gaps), rel=1e-6)
    assert got["truncation/bias_mean"] > 0.1


def test_truncated_sampling_without_what_it_needs_is_refused(make_model, make_rollout, oracle_logps):
    model = make_model()
    bare = truncated(make_rollout, model, oracle_logps, record=False)
    with pytest.raises(ValueError, match="records no support to replay"):
        LocalWorker(CausalLMPolicy(model)).train(bare)
    with pytest.raises(ValueError, match="truncated_policy='refuse'"):
        LocalWorker(CausalLMPolicy(model), TrainConfig(truncated_policy="refuse")).train(bare)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, logps=(math.nan, *c.logps[1:])), "completion 3: logps holds a value that is not finite"),
        (lambda c: replace(c, scores=replace(c.scores, ref_logps=None)), "1 of 8 completions have none"),
        (lambda c: replace(c, scores=replace(c.scores, ref_logps=())), "completion 3: . tokens but 0 scores.ref_logps"),
        (lambda c: replace(c, scores=replace(c.scores, reward=math.nan)), "completion 3 of group 0: reward nan"),
    ],
)
def test_a_rollout_that_lacks_something_is_refused_whole(change, message, make_model, make_rollout):
    model = make_model()
    worker = LocalWorker(CausalLMPolicy(model), TrainConfig(objective=Objective("grpo", kl_coef=0.1)))
    before = bits(model)
    with pytest.raises(ValueError, match=message):
        worker.train(with_completions(make_rollout(longest=5), lambda i, c: change(c) if i == 3 else c))
    assert same_bits(model, before)
    assert worker.weight_version == 0


def test_a_greedy_rollout_is_refused(make_model, make_rollout):
    with pytest.raises(ValueError, match="greedy"):
        LocalWorker(CausalLMPolicy(make_model())).train(make_rollout(temperature=0.0))


def test_a_model_whose_router_loss_would_be_dropped_is_refused(make_model):
    model = make_model()
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="output_router_logits"):
        CausalLMPolicy(model)


def test_gradient_checkpointing_trains_and_refuses_dropout(make_model, make_rollout):
    plain = LocalWorker(CausalLMPolicy(make_model(torch.float64))).train(make_rollout())
    model = make_model(torch.float64)
    model.gradient_checkpointing_enable()
    checkpointed = LocalWorker(CausalLMPolicy(model)).train(make_rollout())
    assert model.training
    assert checkpointed.metrics["grad_norm"] == pytest.approx(plain.metrics["grad_norm"], rel=1e-10)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        CausalLMPolicy(model)
