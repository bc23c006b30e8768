"""The executor against a plain float64 oracle, and attach."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rlk_rollout.records import Completion, Group, Rollout, VersionSpan
from rlk_rollout.sampling import Sampling
from rlk_score import (
    ReferenceModel,
    RewardFailures,
    ScoreConfig,
    SequenceRewardModel,
    StatelessExecutor,
    attach,
    exact_answer,
)

VOCABULARY = 37


def tiny(kind="Qwen3ForCausalLM", **options):
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attention_dropout=0.3, **options,
    )  # fmt: skip
    torch.manual_seed(3)
    return getattr(transformers, kind)(config)


def completion(prompt, tokens, text="", support=None):
    return Completion(
        prompt_ids=tuple(prompt),
        token_ids=tuple(tokens),
        text=text,
        logps=(0.0,) * len(tokens),
        temperature_logps=(0.0,) * len(tokens),
        support=support,
        finish_reason="stop",
        spans=(VersionSpan(0, len(tokens), 0),),
        seed=0,
    )


def make_rollout(seed=0, temperature=0.7, texts=None, **example):
    generator = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()

    groups, number = [], 0
    for prompt_length in (3, 9, 1, 5):
        prompt = ids(prompt_length)
        rows = []
        for completion_length in (4, 1, 7):
            rows.append(completion(prompt, ids(completion_length), text=texts[number] if texts else "t"))
            number += 1
        groups.append(Group(example={"prompt": "p", **example}, prompt_text="p", prompt_ids=tuple(prompt),
                            completions=tuple(rows)))  # fmt: skip
    return Rollout(groups=tuple(groups), sampling=Sampling(n=3, temperature=temperature), weight_version=0,
                   seconds={}, metrics={})  # fmt: skip


def oracle(model, row, temperature, dtype=torch.float64):
    """Unpadded, one row at a time, logits materialised, float64."""
    model = model.to(dtype).eval()
    with torch.no_grad():
        logits = model(torch.tensor([row.prompt_ids + row.token_ids])).logits[0].double() / temperature
    table = torch.log_softmax(logits, -1)
    start = len(row.prompt_ids) - 1
    logps = [table[start + t, token].item() for t, token in enumerate(row.token_ids)]
    entropy = [-(table[start + t].exp() * table[start + t]).sum().item() for t in range(len(row.token_ids))]
    return logps, entropy


@pytest.mark.parametrize("micro_batch_tokens", [1, 24, 10_000])
def test_log_probs_and_entropy_equal_the_unpadded_float64_oracle(micro_batch_tokens):
    model, rollout = tiny(), make_rollout()
    executor = StatelessExecutor(ReferenceModel(model), micro_batch_tokens=micro_batch_tokens, entropy=True)
    result = executor.score(rollout)
    for row, logps, entropy in zip(rollout.completions, result.logps, result.entropy, strict=True):
        expected_logps, expected_entropy = oracle(tiny(), row, 0.7)
        assert logps.tolist() == pytest.approx(expected_logps, abs=1e-5)
        assert entropy.tolist() == pytest.approx(expected_entropy, abs=1e-5)
    assert result.metrics["tokens"] == sum(len(c.prompt_ids) + len(c.token_ids) for c in rollout.completions)


def test_scoring_leaves_modes_dropout_and_gradients_alone():
    model = tiny()
    model.train()
    model.model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    executor = StatelessExecutor(ReferenceModel(model))
    first, second = executor.score(make_rollout()), executor.score(make_rollout())
    assert all(torch.equal(a, b) for a, b in zip(first.logps, second.logps, strict=True))  # dropout 0.3 is off
    assert not any(row.requires_grad for row in first.logps)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_a_frozen_copy_does_not_move_with_the_policy():
    model, rollout = tiny(), make_rollout()
    reference = StatelessExecutor(ReferenceModel.frozen_copy(model))
    before = reference.score(rollout)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    after, moved = reference.score(rollout), StatelessExecutor(ReferenceModel(model)).score(rollout)
    assert all(torch.equal(a, b) for a, b in zip(before.logps, after.logps, strict=True))
    assert not torch.allclose(before.logps[0], moved.logps[0], atol=1e-3)
    assert not any(parameter.requires_grad for parameter in reference.model.module.parameters())


def test_no_cache_is_made():
    model, seen = tiny(), []
    model.model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((kwargs.get("use_cache"), output.past_key_values)),
        with_kwargs=True,
    )
    StatelessExecutor(ReferenceModel(model)).score(make_rollout())
    assert seen == [(False, None)]


def test_greedy_rollouts_need_a_stated_temperature():
    rollout = make_rollout(temperature=0.0)
    with pytest.raises(ValueError, match="temperature 0"):
        StatelessExecutor(ReferenceModel(tiny())).score(rollout)
    stated = StatelessExecutor(ReferenceModel(tiny()), temperature=1.3).score(rollout)
    row = next(iter(rollout.completions))
    assert stated.logps[0].tolist() == pytest.approx(oracle(tiny(), row, 1.3)[0], abs=1e-5)


def test_configuration_errors():
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        StatelessExecutor(ReferenceModel(tiny()), micro_batch_tokens=0)
    with pytest.raises(TypeError, match="not both"):
        StatelessExecutor(ReferenceModel(tiny()), ScoreConfig(), entropy=True)
    with pytest.raises(TypeError, match="ReferenceModel or a policy"):
        StatelessExecutor(tiny())
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        ReferenceModel("gpt2")


def test_reward_model_reads_the_last_real_token():
    model = tiny("Qwen3ForSequenceClassification", num_labels=1, pad_token_id=0)
    rollout = make_rollout()
    scored = attach(rollout, rewards={SequenceRewardModel(model): 2.0}, micro_batch_tokens=24)
    gold = tiny("Qwen3ForSequenceClassification", num_labels=1, pad_token_id=0).double().eval()
    for row in scored.completions:
        with torch.no_grad():
            hidden = gold.model(torch.tensor([row.prompt_ids + row.token_ids]))[0]
            expected = 2.0 * gold.score(hidden[0, -1]).item()
        assert row.scores.reward == pytest.approx(expected, abs=1e-5)


def test_reward_models_of_another_form_are_refused():
    with pytest.raises(ValueError, match="3 labels"):
        SequenceRewardModel(tiny("Qwen3ForSequenceClassification", num_labels=3))
    with pytest.raises(TypeError, match="no `score` head"):
        SequenceRewardModel(tiny())


def test_attach_weights_rewards_and_reference_log_probs():
    def length(text, example):
        return len(text)

    def only_even(text, example):
        return 1.0 if len(text) % 2 == 0 else None

    texts = ["yes", "no", "four"] * 4
    rollout = make_rollout(texts=texts, answer="no")
    reference = StatelessExecutor(ReferenceModel(tiny()))
    done = attach(rollout, reference=reference, rewards={exact_answer: 1.0, length: 0.5, only_even: 10.0})
    rows = list(done.completions)
    assert [row.scores.reward for row in rows[:3]] == [1.5, 1.0 + 1.0 + 10.0, 2.0 + 10.0]
    assert rows[0].scores.rewards == {"exact_answer": 0.0, "length": 3.0, "only_even": None}
    assert rows[4].scores.ref_logps == tuple(reference.score(rollout).logps[4].tolist())
    assert all(row.scores is None for row in rollout.completions)  # records are immutable
    assert done.metrics["reward/exact_answer"] == pytest.approx(1 / 3)


def test_failed_samples_are_counted_and_named_and_too_many_stop():
    def fragile(text, example):
        if text == "bad":
            raise ConnectionError("verifier down")
        return 1.0 if text == "good" else None

    texts = ["good", "bad", "skip"] * 4
    done = attach(make_rollout(texts=texts), rewards={fragile: 1.0}, max_failed_fraction=0.67)
    rows = list(done.completions)
    assert rows[1].scores.reward is None
    assert "fragile raised ConnectionError: verifier down" in rows[1].scores.error
    assert rows[2].scores.error == "no reward applies to this sample"
    assert done.metrics["reward/failed"] == 8
    with pytest.raises(RewardFailures, match="8 of 12 samples failed") as caught:
        attach(make_rollout(texts=texts), rewards={fragile: 1.0}, max_failed_fraction=0.5)
    assert caught.value.rollout.metrics["reward/failed"] == 8
    assert next(iter(caught.value.rollout.completions)).scores.reward == 1.0


def test_attach_errors():
    with pytest.raises(ValueError, match="at least one reward"):
        attach(make_rollout(), rewards={})
    with pytest.raises(ValueError, match="max_failed_fraction"):
        attach(make_rollout(), rewards={exact_answer: 1.0}, max_failed_fraction=1.5)
    with pytest.raises(ValueError, match="two rewards are both named"):
        attach(make_rollout(answer="t"), rewards={exact_answer: 1.0, "rlk_score.rewards:exact_answer": 1.0})


def test_importing_is_light():
    code = "import rlk_score, sys; print([m for m in ('transformers', 'vllm', 'ray', 'deepspeed') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
