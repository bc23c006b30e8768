"""The gradient of an optimizer window: however it is cut, and against a plain full-batch computation."""

import random
from dataclasses import replace

import pytest
import torch

from rlk_ops import Mismatch, Objective, Reduction
from rlk_train import CausalLMPolicy, LocalWorker, TrainConfig, rollout_advantages
from rlk_train.objective import loss_share, window_reduction
from rlk_train.samples import build_micro_batch, pack_micro_batches, select_samples

EVERYTHING = {"kl_coef": 0.05, "entropy_coef": 0.01}
OBJECTIVES = {
    "grpo": (Objective("grpo", **EVERYTHING), Reduction()),
    "grpo-k1-dual": (Objective("grpo", dual_clip=3.0, delta=1.5, kl="k1", kl_coef=0.1), Reduction()),
    "bnpo": (Objective("bnpo", **EVERYTHING), Reduction()),
    "dr_grpo": (Objective("dr_grpo", **EVERYTHING), Reduction(max_length=16)),
    "dapo": (Objective("dapo", **EVERYTHING), Reduction()),
    "dapo-mask": (Objective("dapo", mismatch=Mismatch("token", "mask", lower=0.7, upper=1.3)), Reduction()),
    "grpo-geometric": (Objective("grpo", mismatch=Mismatch("geometric", "truncate", upper=1.05)), Reduction()),
    "gspo": (Objective("gspo", **EVERYTHING), Reduction()),
    "cispo": (Objective("cispo", **EVERYTHING), Reduction()),
    "sapo": (Objective("sapo", **EVERYTHING), Reduction()),
    "gmpo": (Objective("gmpo", **EVERYTHING), Reduction()),
    "reinforce": (Objective("reinforce", **EVERYTHING), Reduction()),
    "token_sum": (Objective("grpo"), Reduction("token_sum")),
}
SPLITS = {"1x8": [8], "2x4": [4, 4], "8x1": [1] * 8, "ragged": [3, 1, 4]}
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}


def recorded_by(model, rollout, oracle_logps, noise):
    """Per sample, log-probs near the model's own, so that ratios spread around 1 without a blow-up."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        own = [oracle_logps(model, c, rollout.sampling.temperature) for c in rollout.completions]
    return [
        logps + noise * torch.randn(len(logps), generator=generator, dtype=torch.float64).to(logps) for logps in own
    ]


def drawn_near(rollout, old):
    """The rollout as an engine would record it whose log-probs are a little off the old policy's."""
    draw, rest = random.Random(1), iter(old)
    groups = []
    for group in rollout.groups:
        logps = [tuple(value + draw.gauss(0, 0.2) for value in next(rest).tolist()) for _ in group]
        groups.append(replace(group, completions=tuple(replace(c, logps=p) for c, p in zip(group, logps))))
    return replace(rollout, groups=tuple(groups))


def window_gradient(model, rollout, config, split, old):
    """Flat gradient of the window of all samples, cut into consecutive micro-batches of `split` sequences."""
    model.zero_grad()
    policy = CausalLMPolicy(model)
    selection = select_samples(rollout, config)
    reduction = window_reduction(config.objective, config.reduction, selection.completion_lengths)
    dtype = next(model.parameters()).dtype
    start, loss = 0, 0.0
    for size in split:
        rows = range(start, start + size)
        batch = build_micro_batch(selection, rows, dtype=dtype, device=torch.device("cpu"), old_logps=old)
        output = policy(batch.tokens, temperature=selection.temperature, entropy=config.objective.entropy_coef != 0)
        share = loss_share(output, batch, objective=config.objective, reduction=reduction)
        share.loss.backward()
        loss, start = loss + float(share.loss.detach()), start + size
    return torch.cat([p.grad.flatten() for p in model.parameters()]), loss


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_cut_into_micro_batches_changes_no_gradient(name, dtype, make_model, make_rollout, oracle_logps):
    objective, reduction = OBJECTIVES[name]
    config = TrainConfig(objective=objective, reduction=reduction)
    model = make_model(dtype)
    rollout = make_rollout(seed=3, temperature=0.8)
    old = recorded_by(model, rollout, oracle_logps, noise=0.3)
    rollout = drawn_near(rollout, old)
    whole, loss = window_gradient(model, rollout, config, SPLITS["1x8"], old)
    assert whole.norm() > 1e-3
    for split in SPLITS.values():
        gradient, split_loss = window_gradient(model, rollout, config, split, old)
        assert relative(gradient, whole) <= BOUND[dtype], split
        if dtype == torch.float64:
            assert split_loss == pytest.approx(loss, rel=1e-10, abs=1e-12), split


@pytest.mark.parametrize("name", ["grpo", "dapo", "bnpo", "dr_grpo", "token_sum"])
def test_two_ranks_sum_to_one(name, make_model, make_rollout, oracle_logps):
    objective, reduction = OBJECTIVES[name]
    config = TrainConfig(objective=objective, reduction=reduction)
    model = make_model(torch.float64)
    rollout = make_rollout(seed=4)
    old = recorded_by(model, rollout, oracle_logps, noise=0.3)
    selection = select_samples(rollout, config)
    lengths = selection.completion_lengths
    whole, _ = window_gradient(model, rollout, config, [8], old)
    halves = (lengths[:3], lengths[3:])
    denominators = [
        window_reduction(objective, reduction, half, reduce_sum=summing(objective, reduction, halves)).denominator
        for half in halves
    ]
    policy, total = CausalLMPolicy(model), torch.zeros_like(whole)
    for rows, denominator in zip((range(3), range(3, 8)), denominators):
        model.zero_grad()
        batch = build_micro_batch(selection, rows, dtype=torch.float64, device=torch.device("cpu"), old_logps=old)
        output = policy(batch.tokens, temperature=1.0, entropy=objective.entropy_coef != 0)
        rank = Reduction(reduction.mode, denominator=denominator, max_length=reduction.max_length)
        loss_share(output, batch, objective=objective, reduction=rank).loss.backward()
        total += torch.cat([p.grad.flatten() for p in model.parameters()])
    if name == "bnpo":
        assert denominators == [2.0 * sum(half) for half in halves]
        assert relative(total, whole) > 1e-6
    else:
        assert denominators[0] == denominators[1]
        assert relative(total, whole) <= 1e-10


def summing(objective, reduction, halves):
    """The cross-rank sum as two ranks see it: of ones the number of ranks, else of both ranks' own denominators."""
    own = [window_reduction(objective, reduction, half).denominator for half in halves]
    return lambda value: 2.0 if value == 1.0 else sum(own)


def plain_loss(model, rollout, advantages, old, *, mode, low, high, kl_coef):
    """GRPO or DAPO with k3 from full logits, one unpadded sequence at a time, in the formulas of the papers."""
    temperature, terms = rollout.sampling.temperature, []
    for completion, advantage, old_logps in zip(rollout.completions, advantages, old):
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
        start = len(completion.prompt_ids) - 1
        logps = torch.log_softmax(model(input_ids=ids).logits[0, start:-1] / temperature, -1)
        logps = logps.gather(-1, ids[0, start + 1 :, None])[:, 0]
        ratio = torch.exp(logps - old_logps)
        policy = -torch.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage)
        gap = torch.tensor(completion.scores.ref_logps, dtype=logps.dtype) - logps
        terms.append(policy + kl_coef * (gap.exp() - 1 - gap))
    if mode == "token_mean":
        return torch.cat(terms).mean()
    return torch.stack([term.mean() for term in terms]).mean()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("name", "mode", "low", "high"), [("grpo", "sequence_mean", 0.2, 0.2), ("dapo", "token_mean", 0.2, 0.28)]
)
def test_against_a_plain_full_batch_loss(name, mode, low, high, temperature, make_model, make_rollout, oracle_logps):
    model = make_model(torch.float64, seed=1, tied=False)
    rollout = make_rollout(groups=3, n=3, seed=8, temperature=temperature)
    old = recorded_by(model, rollout, oracle_logps, noise=0.4)
    config = TrainConfig(objective=Objective(name, kl_coef=0.1))
    gradient, loss = window_gradient(model, rollout, config, [4, 5], old)
    model.zero_grad()
    advantages = rollout_advantages(rollout).values
    expected = plain_loss(model, rollout, advantages, old, mode=mode, low=low, high=high, kl_coef=0.1)
    expected.backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert relative(gradient, plain) <= 1e-6


def test_a_worker_s_gradient_depends_on_no_micro_batch_size(make_model, make_rollout):
    rollout = make_rollout(seed=6)
    gradients = []
    for budget in (1, 40, 100_000):
        config = TrainConfig(micro_batch_tokens=budget, objective=Objective("dapo", kl_coef=0.1), max_grad_norm=None)
        worker = LocalWorker(CausalLMPolicy(make_model(torch.float64)), config)
        gradients.append(captured(worker, rollout))
    selection = select_samples(rollout, config)
    assert [len(pack_micro_batches(selection, range(8), budget)) for budget in (1, 100_000)] == [8, 1]
    whole, _ = window_gradient(make_model(torch.float64), rollout, config, [8], None)
    assert all(relative(gradient, whole) <= 1e-10 for gradient in gradients)


def test_bf16_parameters_accumulate_in_fp32(make_model, make_rollout):
    rollout = make_rollout(seed=6)
    wide = LocalWorker(
        CausalLMPolicy(make_model(torch.bfloat16)), TrainConfig(micro_batch_tokens=1, max_grad_norm=None)
    )
    gradient = captured(wide, rollout)
    naive = CausalLMPolicy(make_model(torch.bfloat16))
    selection = select_samples(rollout, wide.config)
    reduction = window_reduction(wide.config.objective, wide.config.reduction, selection.completion_lengths)
    exact = [torch.zeros_like(p, dtype=torch.float32) for p in naive.parameters()]
    for row in range(8):
        naive.module.zero_grad()
        batch = build_micro_batch(selection, [row], dtype=torch.float32, device=torch.device("cpu"))
        output = naive(batch.tokens, temperature=1.0, entropy=False)
        loss_share(output, batch, objective=wide.config.objective, reduction=reduction).loss.backward()
        for total, parameter in zip(exact, naive.parameters()):
            total += parameter.grad.float()
    assert gradient.dtype == torch.float32
    assert relative(gradient, torch.cat([g.flatten() for g in exact])) <= 1e-6


def captured(worker, rollout):
    """The flat gradient with which the worker takes its one step."""
    seen, step = [], worker._optimizer.step

    def record(lr, norm):
        seen.append(torch.cat([g.flatten().clone() for g in worker._optimizer.gradients().values()]))
        step(lr, norm)

    worker._optimizer.step = record
    worker.train(rollout)
    return seen[0]
