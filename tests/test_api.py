"""The public faces, package by package, as a user would write them, with tiny models on a CPU."""

from __future__ import annotations

import asyncio

import torch

from rlk import Loop
from rlk.task import make_model, make_task, make_tokenizer, spelled_right


def tiny():
    tokenizer = make_tokenizer()
    return make_model(0, len(tokenizer)), tokenizer


def test_ops_alone():
    from rlk_ops import Objective, linear_grpo_loss, linear_logp, use

    hidden, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    token_ids, mask = torch.randint(0, 11, (2, 5)), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    logps = linear_logp(hidden, weight, token_ids, temperature=0.7)
    assert linear_logp.explain(hidden, weight, token_ids) == {"chunked": None, "reference": None}
    with use(linear_logp="reference"):
        gold = linear_logp(hidden, weight, token_ids, temperature=0.7)
    assert torch.allclose(logps, gold, atol=1e-6)
    old = (gold + 0.1 * torch.randn(2, 5)).detach()
    out = linear_grpo_loss(
        hidden, weight, token_ids, torch.tensor([1.0, -1.0]), old_logps=old, mask=mask, temperature=0.7,
        objective=Objective("dapo", kl_coef=0.0),
    )  # fmt: skip
    out.loss.backward()
    ratio = torch.exp(gold - old)[mask.bool()]
    assert torch.isclose(out.metrics["ratio/max"], ratio.max())
    assert weight.grad.abs().sum() > 0


def test_rollout_score_and_train_by_hand():
    from rlk_ops import Objective
    from rlk_rollout import RolloutEngine, Sampling
    from rlk_score import ReferenceModel, StatelessExecutor, attach
    from rlk_train import CausalLMPolicy, LocalWorker, TrainConfig
    from rlk_weightsync import Local, Publisher

    async def half(text, example):
        await asyncio.sleep(0)
        return 0.5

    model, tokenizer = tiny()
    engine = RolloutEngine.load(make_model(0, len(tokenizer)), tokenizer=tokenizer)
    worker = LocalWorker(CausalLMPolicy(model), TrainConfig(lr=1e-3, objective=Objective("gspo", kl_coef=0.1)))
    executor = StatelessExecutor(ReferenceModel.frozen_copy(model), micro_batch_tokens=256)
    examples = list(make_task(0).train[:4])
    with Publisher(Local(), run_id="by hand") as publisher:
        for version in (1, 2):
            rollout = engine.generate(examples, Sampling(n=8, temperature=1.0, max_tokens=3, seed=version))
            scored = attach(rollout, reference=executor, rewards={spelled_right: 1.0, half: 0.2}, timeout=10)
            assert all(c.scores.rewards["half"] == 0.5 for c in scored.completions)
            result = worker.train(scored)
            assert result.weight_version == version
            assert result.metrics["kl/ref"] >= 0
            update = worker.publish(publisher)
            engine.install(update.ticket(0), caches="reset")
            update.wait(timeout=10)
    for ours, theirs in zip(model.state_dict().values(), engine.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_whole_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[loop]\nsteps = 2\nprompts_per_step = 2\n[sampling]\nn = 4\n")
    result = Loop.from_config("run.toml").run()
    assert result.steps == 2
    assert result.folder.parent.name == "runs"
    assert 0 <= result.eval_before <= 0.2
    assert (result.folder / "metrics.jsonl").exists()
