"""The embedded engine against the trainer's log-probs, against itself in other batches, and its limits."""

from __future__ import annotations

import copy

import pytest
import torch

from rlk_rollout import (
    EmptyPrompt,
    EngineBusy,
    PromptError,
    PromptTooLong,
    RolloutEngine,
    Sampling,
    TokenBatch,
    completion_logps,
    derive_seed,
)
from rlk_rollout.causal_lm import evaluation
from rlk_rollout.transformers import load_model
from rlk_weightsync import Keep, Local, Poisoned, Publisher, UpdateRejected, WeightSyncError

PROMPTS = [[1, 2, 3], [4], [7, 8, 9, 10, 11, 12, 13], [3, 3]]
SAMPLINGS = {
    "plain": Sampling(n=3, max_tokens=12, seed=1),
    "tempered": Sampling(n=3, temperature=0.6, max_tokens=12, seed=2),
    "truncated": Sampling(n=3, temperature=1.3, max_tokens=12, top_k=9, top_p=0.9, min_p=0.01, seed=3),
    "long": Sampling(n=2, temperature=1.4, min_p=0.02, max_tokens=60, seed=4),
}
MODELS = {
    "Qwen3": {},
    "Llama": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 5.0, "sliding_window": 4},
    "GPT2": {"attn_pdrop": 0.1},
    "GPTNeoX": {},
}


def worst_difference(model, rollout, *, use_support=True):
    batch = TokenBatch.from_completions(rollout.completions)
    logps, _ = completion_logps(model, batch, temperature=rollout.sampling.temperature, use_support=use_support)
    recorded = [c.logps if use_support else c.temperature_logps for c in rollout.completions]
    return max(abs(a - b) for row, told in zip(logps.tolist(), recorded, strict=True) for a, b in zip(row, told))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_recorded_log_probs_are_the_trainers_within_1e_5(model_of, kind, sampling):
    model = model_of(kind, **MODELS[kind])
    rollout = RolloutEngine.load(model).generate(PROMPTS, SAMPLINGS[sampling])
    assert worst_difference(model, rollout) <= 1e-5
    assert worst_difference(model, rollout, use_support=False) <= 1e-5
    truncated = any(c.support for c in rollout.completions)
    assert truncated == SAMPLINGS[sampling].truncates


def test_recorded_log_probs_against_a_plain_float64_forward(model_of):
    model = model_of()
    rollout = RolloutEngine.load(model).generate(PROMPTS, SAMPLINGS["truncated"])
    gold = copy.deepcopy(model).double()
    for c in rollout.completions:
        with torch.no_grad():
            logits = gold(torch.tensor([c.prompt_ids + c.token_ids])).logits[0, len(c.prompt_ids) - 1 : -1] / 1.3
        for t, token in enumerate(c.token_ids):
            whole = torch.log_softmax(logits[t], -1)
            assert c.temperature_logps[t] == pytest.approx(whole[token].item(), abs=1e-5)
            kept = list(c.support[t]) if c.support[t] is not None else list(range(len(whole)))
            assert token in kept
            assert c.logps[t] == pytest.approx((whole[token] - whole[kept].logsumexp(0)).item(), abs=1e-5)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_completions_do_not_depend_on_the_batch(model_of, most):
    model, sampling = model_of(), SAMPLINGS["truncated"]
    whole = RolloutEngine.load(model).generate(PROMPTS, sampling)
    cut = RolloutEngine.load(model, max_batch_sequences=most).generate(PROMPTS, sampling)
    for a, b in zip(whole.completions, cut.completions, strict=True):
        assert (a.token_ids, a.seed, a.support, a.finish_reason) == (b.token_ids, b.seed, b.support, b.finish_reason)
        assert a.logps == pytest.approx(b.logps, abs=1e-5)


def test_a_longer_group_begins_with_the_shorter_one(model_of):
    engine = RolloutEngine.load(model_of())
    two = engine.generate(PROMPTS, Sampling(n=2, max_tokens=6, seed=5))
    five = engine.generate(PROMPTS, Sampling(n=5, max_tokens=6, seed=5))
    for few, many in zip(two.groups, five.groups, strict=True):
        assert [c.token_ids for c in few] == [c.token_ids for c in many][:2]


def test_n_samples_share_one_prefill(model_of):
    model, widths = model_of(), []
    model.model.register_forward_hook(
        lambda module, args, kwargs, output: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    RolloutEngine.load(model).generate(PROMPTS, Sampling(n=6, max_tokens=3, ignore_eos=True))
    assert widths == [(4, 7), (24, 1), (24, 1)]


def test_seeds_are_distinct_and_reproducible():
    seeds = {derive_seed(s, p, n) for s in range(5) for p in range(20) for n in range(20)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2, 3) == derive_seed(1, 2, 3)


def test_other_seeds_draw_other_tokens_and_greedy_ignores_them(model_of):
    engine = RolloutEngine.load(model_of())
    draws = [
        [c.token_ids for c in engine.generate(PROMPTS, Sampling(n=2, max_tokens=9, seed=s)).completions] for s in (0, 1)
    ]
    assert draws[0] != draws[1]
    greedy = [
        [c.token_ids for c in engine.generate(PROMPTS, Sampling(temperature=0, max_tokens=9, seed=s)).completions]
        for s in (0, 1)
    ]
    assert greedy[0] == greedy[1]


def test_greedy_takes_the_argmax_of_a_plain_forward(model_of):
    model = model_of()
    rollout = RolloutEngine.load(model).generate(PROMPTS, Sampling(temperature=0, max_tokens=5, ignore_eos=True))
    for c in rollout.completions:
        ids = list(c.prompt_ids)
        for token in c.token_ids:
            with torch.no_grad():
                assert model(torch.tensor([ids])).logits[0, -1].argmax().item() == token
            ids.append(token)


def test_end_tokens_stop_and_are_kept(model_of):
    engine = RolloutEngine.load(model_of())
    rollout = engine.generate([[9]] * 40, Sampling(n=4, temperature=1.5, max_tokens=40, seed=8))
    stopped = [c for c in rollout.completions if c.finish_reason == "stop"]
    assert stopped
    assert all(c.token_ids[-1] == 5 and 5 not in c.token_ids[:-1] for c in stopped)
    assert all(5 not in c.token_ids and len(c.token_ids) == 40 for c in rollout.completions if c not in stopped)
    on = engine.generate([[9]] * 40, Sampling(n=4, temperature=1.5, max_tokens=40, seed=8, ignore_eos=True))
    assert {len(c.token_ids) for c in on.completions} == {40}
    own = engine.generate([[9]], Sampling(n=30, temperature=1.5, max_tokens=30, stop_token_ids=(11, 12)))
    assert any(c.token_ids[-1] in (11, 12) for c in own.completions)
    assert rollout.metrics["truncated"] == pytest.approx(1 - len(stopped) / 160)


def test_an_end_token_at_once_is_an_empty_completion(model_of, tokenizer):
    model = model_of(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[5] = 50 * torch.sign(model.model.norm.weight)
        model.lm_head.weight[5, 16:] *= -1
    engine = RolloutEngine.load(model, tokenizer=tokenizer)
    both = engine.generate(["one", "two"], Sampling(n=8, max_tokens=4))
    ended = [c for c in both.completions if c.token_ids == (5,)]
    assert ended
    assert all(c.text == "" and c.finish_reason == "stop" and len(c.logps) == 1 for c in ended)


def test_stop_strings_cut_the_text_and_keep_the_tokens(model_of, tokenizer):
    engine = RolloutEngine.load(model_of(), tokenizer=tokenizer)
    rollout = engine.generate(["one two"], Sampling(n=60, max_tokens=30, stop=("w7", "w3 ")))
    cut = [c for c in rollout.completions if "w7" in tokenizer.decode(c.token_ids)]
    assert cut
    for c in cut:
        assert "w7" not in c.text
        assert c.finish_reason == "stop"
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        RolloutEngine.load(model_of()).generate([[1]], Sampling(stop="x"))


def test_prompts_in_every_form(model_of, tokenizer):
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}four{% endif %}"
    )
    engine = RolloutEngine.load(model_of(), tokenizer=chatty)
    chat = [{"role": "user", "content": "one two"}]
    rollout = engine.generate(["one two", [1, 2], chat, {"prompt": "three", "answer": 7}], Sampling(max_tokens=1))
    assert [g.prompt_ids for g in rollout.groups] == [(1, 2), (1, 2), (1, 2, 4), (3,)]
    assert rollout.groups[3].example["answer"] == 7
    assert rollout.groups[0].example == {"prompt": "one two"}
    assert rollout.groups[2].prompt_text == "one two four"


def test_prompts_that_cannot_be_used_are_named(model_of, tokenizer):
    engine = RolloutEngine.load(model_of(), tokenizer=tokenizer)
    with pytest.raises(EmptyPrompt, match="prompt 1: has no token"):
        engine.generate(["one", ""])
    with pytest.raises(PromptTooLong, match="prompt 0: 64 tokens leave no room in a context of 64"):
        engine.generate([[1] * 64])
    with pytest.raises(PromptError, match="prompt 0: is a chat, and the tokenizer has no chat template"):
        engine.generate([[{"role": "user", "content": "one"}]])
    with pytest.raises(PromptError, match="needs the key 'prompt'"):
        engine.generate([{"question": "one"}])
    with pytest.raises(PromptError, match="expected text, token ids, or messages"):
        engine.generate([[{"rolle": "user"}]])
    with pytest.raises(PromptError, match="no tokenizer; give token ids"):
        RolloutEngine.load(model_of()).generate(["one"])


def test_the_context_ends_a_completion(model_of):
    rollout = RolloutEngine.load(model_of("GPT2")).generate(
        [[1] * 60, [2]], Sampling(n=2, max_tokens=50, ignore_eos=True)
    )
    assert [len(c.token_ids) for c in rollout.completions] == [4, 4, 50, 50]
    assert {c.finish_reason for c in rollout.completions} == {"length"}


def test_broken_weights_are_named_and_not_sampled_from(model_of):
    model = model_of()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="prompt 0: the model's logits at token 0 are not usable"):
        RolloutEngine.load(model).generate([[1]])


def test_updates_change_the_weights_the_version_and_nothing_else(model_of):
    trainer, engine = model_of(), RolloutEngine.load(copy.deepcopy(model_of()))
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    sampling = SAMPLINGS["truncated"]
    before = engine.generate(PROMPTS, sampling)
    with Publisher(Local(), run_id="run") as publisher:
        update = publisher.publish(trainer.state_dict(), version=6)
        receipt = engine.install(update.ticket(0), caches="reset")
        assert update.wait(timeout=5)[0] == receipt
    after = engine.generate(PROMPTS, sampling)
    assert (before.weight_version, after.weight_version, engine.weight_version) == (0, 6, 6)
    assert {c.weight_version for c in after.completions} == {6}
    assert worst_difference(trainer, after) <= 1e-5
    assert [c.token_ids for c in before.completions] != [c.token_ids for c in after.completions]


def test_refused_updates_leave_the_engine_as_it_was(model_of):
    engine = RolloutEngine.load(model_of())
    before = engine.generate(PROMPTS, SAMPLINGS["plain"])
    with Publisher(Local(), run_id="run") as publisher:
        update = publisher.publish({"nothing": torch.ones(1)}, version=1)
        with pytest.raises(UpdateRejected, match="names do not fit"):
            engine.install(update.ticket(0), caches=Keep("testing"))
    assert engine.weight_version == 0
    assert engine.generate(PROMPTS, SAMPLINGS["plain"]).completions == before.completions


def test_a_poisoned_engine_refuses_to_generate_until_a_full_update(model_of, monkeypatch):
    engine, trainer = RolloutEngine.load(copy.deepcopy(model_of())), model_of()
    with Publisher(Local(), run_id="run") as publisher:
        with monkeypatch.context() as patched:

            def dies(*_):
                raise OSError("bus error")

            patched.setattr("rlk_weightsync.adapters.torch.copy_all", dies)
            update = publisher.publish(trainer.state_dict(), version=1)
            with pytest.raises(WeightSyncError, match="bus error"):
                engine.install(update.ticket(0))
        with pytest.raises(Poisoned):
            engine.generate(PROMPTS)
        engine.install(publisher.publish(trainer.state_dict(), version=2).ticket(0))
    engine.generate(PROMPTS)


def test_one_thing_at_a_time(model_of):
    engine = RolloutEngine.load(model_of())
    engine.pause()
    with pytest.raises(EngineBusy, match="paused"):
        engine.generate(PROMPTS)
    engine.resume()

    def meddle(done, total):
        with pytest.raises(EngineBusy, match="generating"):
            engine.generate([[1]])

    engine.generate(PROMPTS, Sampling(max_tokens=2), progress=meddle)


def test_progress_counts_every_completion_once(model_of):
    seen = []
    sampling = Sampling(n=5, max_tokens=20, temperature=1.5)
    RolloutEngine.load(model_of(), max_batch_sequences=7).generate(
        PROMPTS, sampling, progress=lambda d, t: seen.append((d, t))
    )
    assert seen[-1] == (20, 20)
    assert seen == sorted(set(seen))


def test_modes_and_gradients_are_restored(model_of):
    model = model_of("GPT2", attn_pdrop=0.5, resid_pdrop=0.5)
    model.train()
    model.transformer.h[1].eval()
    before = {name: m.training for name, m in model.named_modules()}
    engine = RolloutEngine.load(model)
    first, second = (engine.generate(PROMPTS, SAMPLINGS["plain"]).completions for _ in range(2))
    assert first == second  # dropout is off
    assert {name: m.training for name, m in model.named_modules()} == before
    with pytest.raises(RuntimeError), evaluation(model):
        raise RuntimeError
    assert {name: m.training for name, m in model.named_modules()} == before


@pytest.mark.parametrize(
    # Transformers' RMSNorm computes in fp32 whatever the model's dtype; GPT-2's LayerNorm keeps float64.
    ("kind", "options", "rtol"),
    [("GPT2", {}, 1e-9), ("Gemma2", {"final_logit_softcapping": 5.0}, 1e-4)],
)
def test_completion_logps_gradients_match_a_plain_loss(model_of, kind, options, rtol):
    model = model_of(kind, **options).double()
    rollout = RolloutEngine.load(model).generate(PROMPTS, Sampling(n=2, max_tokens=5, temperature=0.8))
    batch = TokenBatch.from_completions(rollout.completions)
    logps, entropy = completion_logps(model, batch, temperature=0.8, entropy=True)
    (logps.sum() + 0.3 * entropy.sum()).backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for c in rollout.completions:
        logits = model(torch.tensor([c.prompt_ids + c.token_ids])).logits[0, len(c.prompt_ids) - 1 : -1] / 0.8
        table = torch.log_softmax(logits, -1)
        total = total + table.gather(1, torch.tensor(c.token_ids)[:, None]).sum() - 0.3 * (table.exp() * table).sum()
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=rtol, atol=rtol / 100)


def test_loading_and_its_errors(model_of, tokenizer, tmp_path):
    model_of().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model, loaded = load_model(tmp_path / "model")
    assert torch.equal(model.lm_head.weight, model_of().lm_head.weight)
    assert loaded("one two")["input_ids"] == [1, 2]
    engine = RolloutEngine.load(tmp_path / "model", dtype=torch.float64)
    assert engine.model.lm_head.weight.dtype == torch.float64
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"neither config.json nor a .gguf file"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no such file or folder"):
        load_model(tmp_path / "absent")
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_model(tmp_path / "bad.gguf")
    with pytest.raises(ValueError, match="backend='vllm' is not in this version"):
        RolloutEngine.load(model, backend="vllm")


def test_models_of_another_form_are_refused(model_of):
    with pytest.raises(TypeError, match="expected a causal LM of Transformers"):
        RolloutEngine.load(torch.nn.Linear(2, 2))
