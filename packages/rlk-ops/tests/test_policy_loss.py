"""The policy losses against scalar loops in plain Python, written from the formulas and sharing no code with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_ops import Mismatch, Objective, Reduction, policy_loss
from rlk_ops.ops.objective import OBJECTIVES
from rlk_ops.ops.policy_loss import METRIC_KINDS, merge_metrics

CLIPS = {
    "grpo": (0.2, 0.2), "bnpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4), "cispo": (0.2, 0.2), "gmpo": (0.4, 0.4),
}  # fmt: skip
MODES = {
    "grpo": "sequence_mean", "bnpo": "token_mean", "dr_grpo": "length_normalized", "dapo": "token_mean",
    "gspo": "sequence_mean", "cispo": "token_mean", "sapo": "sequence_mean", "gmpo": "sequence_mean",
    "reinforce": "token_mean",
}  # fmt: skip
MAX_LENGTH = 11
Rows = list[list[float]]


def clamp(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def sign(x: float) -> float:
    return (x > 0) - (x < 0)


class Oracle:
    """One loss as a function of the log-probs and entropies; `frozen` are the log-probs behind a stop-gradient."""

    def __init__(self, call: dict[str, Any]) -> None:
        self.objective: Objective = call.get("objective", Objective())
        self.reduction: Reduction = call.get("reduction", Reduction())
        self.mask = call["mask"].tolist()
        batch, width = call["mask"].shape
        advantages = call["advantages"]
        self.advantages = (advantages if advantages.ndim == 2 else advantages[:, None].expand(batch, width)).tolist()
        self.frozen = call["logps"].detach().tolist()
        old = call.get("old_logps")
        self.old = self.frozen if old is None else old.tolist()
        self.ref = None if call.get("ref_logps") is None else call["ref_logps"].tolist()
        self.rollout = None if call.get("rollout_logps") is None else call["rollout_logps"].tolist()
        self.cap = self.objective.log_ratio_clamp
        low, high = CLIPS.get(self.objective.name, (0.0, 0.0))
        self.low = low if self.objective.clip_low is None else self.objective.clip_low
        self.high = high if self.objective.clip_high is None else self.objective.clip_high

    def exp(self, x: float) -> float:
        return math.exp(clamp(x, -self.cap, self.cap))

    def clip_loss(self, r: float, a: float) -> float:
        unclipped = r if self.objective.delta is None else min(r, self.objective.delta)
        loss = -min(unclipped * a, clamp(r, 1 - self.low, 1 + self.high) * a)
        return self.dual(loss, a)

    def dual(self, loss: float, a: float) -> float:
        c = self.objective.dual_clip
        return min(loss, -c * a) if c is not None and a < 0 else loss

    def token_loss(self, lp: Rows, i: int, t: int) -> float:
        o, a = self.objective, self.advantages[i][t]
        counted = [u for u, m in enumerate(self.mask[i]) if m]
        d = lp[i][t] - self.old[i][t]
        if o.name in ("grpo", "bnpo", "dr_grpo", "dapo"):
            return self.clip_loss(self.exp(d), a)
        if o.name == "gspo":
            return self.clip_loss(self.exp(sum(lp[i][u] - self.old[i][u] for u in counted) / len(counted)), a)
        if o.name == "cispo":
            r = self.exp(self.frozen[i][t] - self.old[i][t])
            upper = min(r, o.cispo_upper)
            return -(upper if o.cispo_bound == "upper" else clamp(r, 1 - self.low, 1 + self.high)) * a * lp[i][t]
        if o.name == "sapo":
            tau = o.sapo_tau[0] if a > 0 else o.sapo_tau[1]
            return -(4 / tau) / (1 + math.exp(-tau * (self.exp(d) - 1))) * a
        if o.name == "gmpo":
            return self.dual(-a * self.exp(sum(self.gmpo_exponent(lp, i, u, a) for u in counted) / len(counted)), a)
        return -a * lp[i][t]

    def gmpo_exponent(self, lp: Rows, i: int, t: int, a: float) -> float:
        d = lp[i][t] - self.old[i][t]
        unclipped = d if self.objective.delta is None else min(d, math.log(self.objective.delta))
        return sign(a) * min(sign(a) * unclipped, sign(a) * clamp(d, -self.low, self.high))

    def weight(self, i: int, t: int) -> float:
        m = self.objective.mismatch
        if m is None:
            return 1.0
        log_rho = [self.old[i][u] - self.rollout[i][u] for u in range(len(self.mask[i])) if self.mask[i][u]]
        total = {
            "token": self.old[i][t] - self.rollout[i][t],
            "sequence": sum(log_rho),
            "geometric": sum(log_rho) / len(log_rho),
        }[m.level]
        rho = self.exp(total)
        low, high = m.lower or 0.0, math.inf if m.upper is None else m.upper
        return clamp(rho, low, high) if m.action == "truncate" else rho * (low <= rho <= high)

    def kl(self, lp: Rows, i: int, t: int) -> float:
        o, k = self.objective, lp[i][t] - self.ref[i][t]
        c = clamp(k, -self.cap, self.cap)
        k3 = math.exp(-c) - 1 + c
        if o.kl_bias_corrected:
            current = lp if abs(k) <= self.cap else self.frozen
            return self.exp(current[i][t] - self.old[i][t]) * k3
        return {"k1": k, "abs": abs(k), "k2": c * c / 2, "k3": k3}[o.kl]

    def loss(self, lp: Rows, entropy: Rows | None) -> float:
        o, per_row = self.objective, []
        for i, row in enumerate(self.mask):
            tokens = []
            for t, m in enumerate(row):
                if m:
                    term = self.weight(i, t) * self.token_loss(lp, i, t)
                    term += o.kl_coef * self.kl(lp, i, t) if o.kl_coef else 0.0
                    term -= o.entropy_coef * entropy[i][t] if o.entropy_coef else 0.0
                    tokens.append(term)
            per_row.append(tokens)
        return self.reduce([tokens for tokens in per_row if tokens])

    def reduce(self, rows: list[list[float]]) -> float:
        mode = MODES[self.objective.name] if self.reduction.mode == "default" else self.reduction.mode
        total = sum(sum(r) / len(r) if mode == "sequence_mean" else sum(r) for r in rows)
        own = {
            "sequence_mean": len(rows),
            "token_mean": sum(map(len, rows)),
            "token_sum": 1,
            "length_normalized": len(rows) * MAX_LENGTH,
        }[mode]
        return total / (self.reduction.denominator or own or 1)

    def gradient(self, values: Rows, entropy: Rows | None, *, of_entropy: bool = False, step: float = 1e-6) -> Rows:
        """Central differences, one slot at a time; 0 where masked."""
        target = entropy if of_entropy else values
        result = [[0.0] * len(row) for row in target]
        for i, row in enumerate(self.mask):
            for t, m in enumerate(row):
                if m:
                    kept = target[i][t]
                    target[i][t] = kept + step
                    up = self.loss(values, entropy)
                    target[i][t] = kept - step
                    down = self.loss(values, entropy)
                    target[i][t] = kept
                    result[i][t] = (up - down) / (2 * step)
        return result


def draw(seed: int, batch: int = 4, width: int = 7, spread: float = 0.4, **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = -noise(batch, width).abs()
    lengths = torch.randint(1, width + 1, (batch, 1), generator=generator)
    lengths[-1] = 0
    return {
        "logps": logps,
        "advantages": noise(batch),
        "old_logps": logps + spread * noise(batch, width),
        "ref_logps": logps + spread * noise(batch, width),
        "rollout_logps": logps + spread * noise(batch, width),
        "entropy": noise(batch, width).abs(),
        "mask": (torch.arange(width) < lengths) & (torch.rand(batch, width, generator=generator) < 0.9),
        **options,
    }


def reduction_for(name: str) -> Reduction:
    return Reduction(max_length=MAX_LENGTH) if name == "dr_grpo" else Reduction()


def evaluate(call: dict[str, Any]) -> tuple[float, torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    leaves = {k: call[k].detach().clone().requires_grad_() for k in ("logps", "entropy") if call.get(k) is not None}
    out = policy_loss(**{**call, **leaves})
    out.loss.backward()
    entropy = leaves.get("entropy")
    return float(out.loss.detach()), leaves["logps"].grad, None if entropy is None else entropy.grad, out.metrics


def assert_matches_oracle(call: dict[str, Any]) -> None:
    oracle = Oracle(call)
    values, entropy = call["logps"].tolist(), None if call.get("entropy") is None else call["entropy"].tolist()
    loss, gradient, entropy_gradient, _ = evaluate(call)
    assert loss == pytest.approx(oracle.loss(values, entropy), rel=1e-12, abs=1e-12)
    expected = torch.tensor(oracle.gradient(values, entropy), dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=2e-8)
    if entropy is not None and call.get("objective", Objective()).entropy_coef:
        slope = torch.tensor(oracle.gradient(values, entropy, of_entropy=True), dtype=torch.float64)
        torch.testing.assert_close(entropy_gradient, slope, rtol=1e-6, atol=1e-8)


OPTIONS = [
    *[Objective(name) for name in OBJECTIVES],
    Objective("cispo", cispo_upper=1.1),
    Objective("cispo", cispo_bound="two_sided", clip_low=0.05, clip_high=0.3),
    Objective("grpo", clip_low=0.05, clip_high=0.6),
    Objective("gspo", clip_low=0.02, clip_high=0.05, dual_clip=1.1),
    Objective("gspo", clip_low=0.02, clip_high=0.05, delta=1.1),
    Objective("dapo", dual_clip=1.2),
    Objective("dapo", dual_clip=1.8, delta=1.5),
    Objective("gmpo", clip_low=0.1, clip_high=0.2),
    Objective("gmpo", clip_low=0.1, clip_high=0.2, dual_clip=1.1, delta=1.3),
    Objective("sapo", sapo_tau=(0.5, 2.0)),
    *[Objective("grpo", kl_coef=0.3, kl=kl) for kl in ("k1", "k2", "k3", "abs")],
    *[Objective(name, kl_coef=0.3, kl_bias_corrected=True) for name in ("dapo", "gspo", "reinforce")],
    *[Objective(name, entropy_coef=0.07) for name in ("grpo", "gmpo", "cispo")],
    *[Objective(name, log_ratio_clamp=0.2, kl_coef=0.1) for name in OBJECTIVES],
    Objective("grpo", log_ratio_clamp=0.2, kl_coef=0.1, kl_bias_corrected=True),
    Objective("grpo", log_ratio_clamp=0.2, kl_coef=0.1, kl="k2"),
    *[
        Objective(name, kl_coef=0.1, entropy_coef=0.01, mismatch=Mismatch(level, action, lower=0.8, upper=1.3))
        for name in ("dapo", "gmpo", "reinforce")
        for level in ("token", "sequence", "geometric")
        for action in ("truncate", "mask")
    ],
    Objective("grpo", mismatch=Mismatch("token", "truncate", lower=0.9, upper=None)),
]


@pytest.mark.parametrize("objective", OPTIONS, ids=lambda o: f"{o.name}-{OPTIONS.index(o)}")
def test_value_and_gradient_equal_the_scalar_loops(objective: Objective) -> None:
    assert_matches_oracle(draw(0, objective=objective, reduction=reduction_for(objective.name)))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    "reduction",
    [
        Reduction("sequence_mean"),
        Reduction("token_mean"),
        Reduction("token_sum"),
        Reduction("length_normalized", max_length=MAX_LENGTH),
        Reduction("token_mean", denominator=5.5),
        Reduction("sequence_mean", denominator=9),
    ],
    ids=lambda r: f"{r.mode}-{r.denominator}",
)
def test_every_reduction_of_every_objective(name: str, reduction: Reduction) -> None:
    assert_matches_oracle(draw(3, objective=Objective(name), reduction=reduction))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_old_log_probs_the_ratio_is_one_with_a_live_gradient(name: str) -> None:
    call = draw(4, objective=Objective(name, kl_coef=0.1), reduction=reduction_for(name), old_logps=None)
    assert_matches_oracle(call)
    _, gradient, _, metrics = evaluate(call)
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1
    assert (gradient != 0).any()


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n not in ("gspo", "gmpo")])
def test_one_advantage_a_token(name: str) -> None:
    advantages = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_matches_oracle(draw(5, advantages=advantages, objective=Objective(name), reduction=reduction_for(name)))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_mask(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
    name = data.draw(st.sampled_from(OBJECTIVES))
    call = draw(data.draw(st.integers(0, 99)), len(rows), 5, objective=Objective(name, kl_coef=0.2, entropy_coef=0.1))
    assert_matches_oracle({**call, "mask": torch.tensor(rows), "reduction": reduction_for(name)})


@pytest.mark.parametrize("objective", OPTIONS, ids=lambda o: f"{o.name}-{OPTIONS.index(o)}")
@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_masked_slots_may_hold_anything(objective: Objective, poison: float) -> None:
    call = draw(6, objective=objective, reduction=reduction_for(objective.name))
    dirty = {k: v.masked_fill(~call["mask"], poison) for k, v in call.items() if k.endswith("logps") or k == "entropy"}
    dirty["advantages"] = call["advantages"].masked_fill(~call["mask"].any(1), poison)
    clean_result, dirty_result = evaluate(call), evaluate({**call, **dirty})
    assert clean_result[0] == dirty_result[0]
    for clean, other in zip(clean_result[1:3], dirty_result[1:3]):
        if clean is not None:
            torch.testing.assert_close(clean, other, rtol=0, atol=0)
            assert (other[~call["mask"]] == 0).all()
    assert clean_result[3] == dirty_result[3]


def test_masked_per_token_advantages_may_be_nan() -> None:
    call = draw(6)
    advantages = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = evaluate({**call, "advantages": advantages})
    dirty = evaluate({**call, "advantages": advantages.masked_fill(~call["mask"], math.nan)})
    assert expected[0] == dirty[0]
    assert torch.equal(expected[1], dirty[1])


@pytest.mark.parametrize("shape", [(3, 5), (2, 0), (0, 4)])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_counted_token_gives_zero_with_a_live_graph(name: str, shape: tuple[int, int]) -> None:
    objective = Objective(name, kl_coef=0.1, entropy_coef=0.1, mismatch=Mismatch())
    call = draw(7, objective=objective, reduction=reduction_for(name))
    nothing = {k: torch.full(shape, math.nan, dtype=torch.float64) for k, v in call.items()
               if isinstance(v, torch.Tensor) and v.ndim == 2}  # fmt: skip
    nothing |= {"advantages": torch.full(shape[:1], math.nan, dtype=torch.float64), "mask": torch.zeros(shape)}
    loss, gradient, entropy_gradient, metrics = evaluate({**call, **nothing})
    assert loss == 0
    assert (gradient == 0).all()
    assert (entropy_gradient == 0).all()
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize(("kl", "bias_corrected"), [("k2", False), ("k3", False), ("k3", True)])
@pytest.mark.parametrize("gap", [-1e4, -200.0, 200.0, 1e4, -math.inf, math.inf])
def test_kl_of_a_far_reference_is_finite_with_zero_gradient(kl: str, bias_corrected: bool, gap: float) -> None:
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    objective = Objective("grpo", kl_coef=0.5, kl=kl, kl_bias_corrected=bias_corrected)
    reference = torch.tensor([[-1.0 - gap, -2.0]])
    out = policy_loss(logps, torch.zeros(1), ref_logps=reference, objective=objective)
    out.loss.backward()
    assert out.loss.isfinite()
    assert torch.equal(logps.grad, torch.zeros(1, 2))
    assert out.metrics["log_ratio_clamped"] == 0.5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_far_log_ratios_stay_finite(name: str) -> None:
    logps = torch.tensor([[-1.0, -500.0], [-500.0, -1.0]], requires_grad=True)
    out = policy_loss(
        logps, torch.tensor([1.0, -1.0]), old_logps=-501 - logps.detach(), objective=Objective(name),
        reduction=reduction_for(name),
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.isfinite()
    assert logps.grad.isfinite().all()


def test_a_sequence_ratio_clamps_the_mean_and_not_the_tokens() -> None:
    logps = torch.tensor([[-1.0, -101.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-61.0, -41.0]], dtype=torch.float64)
    out = policy_loss(logps, torch.ones(1).double(), old_logps=old, objective=Objective("gspo"))
    assert out.metrics["ratio/max"] == 1  # the mean of +60 and -60; clamped token by token it would be 1 too
    assert out.metrics["log_ratio_clamped"] == 0
    other = policy_loss(logps, torch.ones(1).double(), old_logps=old - 5, objective=Objective("gspo"))
    assert float(other.metrics["ratio/max"]) == pytest.approx(math.exp(5), rel=1e-12)


def test_the_bias_corrected_gradient_is_ratio_times_k() -> None:
    call = draw(8, objective=Objective("reinforce", kl_coef=1.0, kl_bias_corrected=True), entropy=None)
    call |= {"advantages": torch.zeros(4).double(), "reduction": Reduction("token_sum")}
    _, gradient, _, _ = evaluate(call)
    ratio, k = (call["logps"] - call["old_logps"]).exp(), call["logps"] - call["ref_logps"]
    torch.testing.assert_close(gradient, (ratio * k).masked_fill(~call["mask"], 0), rtol=1e-12, atol=1e-13)


def test_the_policy_term_alone_is_corrected_and_masked_tokens_stay_in_the_denominator() -> None:
    call = draw(9, entropy=None, objective=Objective("dapo", kl_coef=0.5))
    rollout = call["old_logps"] + 10.0
    masked = Objective("dapo", kl_coef=0.5, mismatch=Mismatch("token", "mask", lower=0.9, upper=1.1))
    all_masked = evaluate({**call, "rollout_logps": rollout, "objective": masked})
    without_policy = evaluate({**call, "advantages": torch.zeros(4).double()})
    assert all_masked[0] == pytest.approx(without_policy[0], rel=1e-12)
    assert all_masked[3]["rho/corrected"] == 1


@pytest.mark.parametrize("objective", OPTIONS, ids=lambda o: f"{o.name}-{OPTIONS.index(o)}")
def test_shares_of_a_window_add_up(objective: Objective) -> None:
    call = draw(10, batch=8, width=9, objective=objective)
    call["mask"][3] = False
    reduction = reduction_for(objective.name)
    whole_loss, whole_gradient, _, whole_metrics = evaluate({**call, "reduction": reduction})
    denominator = reduction.window_denominator(objective, call["mask"].sum(1).tolist())
    share = replace(reduction, denominator=denominator)
    for size in (1, 2, 4, 8):
        parts = [
            evaluate({k: v[i : i + size] if isinstance(v, torch.Tensor) else v for k, v in call.items()}
                     | {"reduction": share})
            for i in range(0, 8, size)
        ]  # fmt: skip
        assert sum(part[0] for part in parts) == pytest.approx(whole_loss, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(torch.cat([p[1] for p in parts]), whole_gradient, rtol=1e-12, atol=1e-14)
        merged = merge_metrics([part[3] for part in parts])
        assert merged.keys() == whole_metrics.keys() <= METRIC_KINDS.keys()
        for metric, value in whole_metrics.items():
            torch.testing.assert_close(merged[metric], value, rtol=1e-12, atol=1e-13, msg=metric)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_padded_and_single_rows_give_the_same_bits(name: str) -> None:
    call = draw(11, batch=5, width=9, objective=Objective(name, kl_coef=0.1, mismatch=Mismatch("sequence")))
    call["reduction"] = replace(reduction_for(name), denominator=7.0)
    lengths = [9, 4, 0, 1, 6]
    call["mask"] = torch.arange(9) < torch.tensor(lengths)[:, None]
    padded = evaluate(call)
    keep = call["mask"]
    row = {k: v[keep][None] for k, v in call.items() if isinstance(v, torch.Tensor) and v.ndim == 2}
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    packed = evaluate({**call, **row, "cu_seqlens": bounds})
    assert packed[0] == padded[0]
    assert torch.equal(packed[1][0], padded[1][keep])
    assert packed[3].keys() == padded[3].keys()
    for i, length in enumerate(lengths):
        alone = evaluate({k: v[i : i + 1] if isinstance(v, torch.Tensor) else v for k, v in call.items()} | {
            k: v[i : i + 1, :length] for k, v in call.items() if isinstance(v, torch.Tensor) and v.ndim == 2
        })  # fmt: skip
        assert torch.equal(alone[1][0], padded[1][i, :length])


def test_packed_per_token_advantages() -> None:
    call = draw(12, batch=2, width=6, mask=torch.ones(2, 6, dtype=torch.bool))
    advantages = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    padded = evaluate({**call, "advantages": advantages})
    row = {k: v.reshape(1, -1) for k, v in {**call, "advantages": advantages}.items()}
    packed = evaluate({**row, "cu_seqlens": torch.tensor([0, 6, 12])})
    assert padded[0] == packed[0]
    assert torch.equal(padded[1].reshape(1, -1), packed[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_low_precision_inputs_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    call = draw(13, objective=Objective(name, kl_coef=0.1), reduction=reduction_for(name))
    low = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in call.items()}
    same = {k: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in low.items()}
    out, expected = policy_loss(**low), policy_loss(**same)
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(out.metrics["ratio/mean"], expected.metrics["ratio/mean"])


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(mask_dtype: torch.dtype) -> None:
    call = draw(14)
    expected = evaluate(call)
    given_mask = evaluate({**call, "mask": call["mask"].to(mask_dtype)})
    assert expected[0] == given_mask[0]
    assert torch.equal(expected[1], given_mask[1])


def test_metrics_equal_the_scalar_loops() -> None:
    objective = Objective("grpo", dual_clip=1.3, log_ratio_clamp=0.5, mismatch=Mismatch(lower=0.7, upper=1.2))
    call = draw(15, batch=9, width=9, objective=objective)
    metrics = {name: float(value) for name, value in evaluate(call)[3].items()}
    slots = [(i, t) for i, row in enumerate(call["mask"].tolist()) for t, m in enumerate(row) if m]
    count = len(slots)
    d = [float(call["logps"][s] - call["old_logps"][s]) for s in slots]
    a = [float(call["advantages"][i]) for i, _ in slots]
    k = [float(call["logps"][s] - call["ref_logps"][s]) for s in slots]
    log_rho = [float(call["old_logps"][s] - call["rollout_logps"][s]) for s in slots]
    cut = [clamp(x, -0.5, 0.5) for x in d]
    r, rho = [math.exp(x) for x in cut], [math.exp(clamp(x, -0.5, 0.5)) for x in log_rho]
    kl = [math.exp(-clamp(x, -0.5, 0.5)) - 1 + clamp(x, -0.5, 0.5) for x in k]
    expected = {
        "ratio/min": min(r), "ratio/mean": sum(r) / count, "ratio/max": max(r),
        "clip/low": sum(x < 0.8 and y < 0 for x, y in zip(r, a)) / count,
        "clip/high": sum(x > 1.2 and y > 0 for x, y in zip(r, a)) / count,
        "clip/dual": sum(x > 1.3 and y < 0 for x, y in zip(r, a)) / count,
        "kl/k1": -sum(cut) / count, "kl/k3": sum(x - 1 - y for x, y in zip(r, cut)) / count,
        "kl/ref": sum(kl) / count, "entropy": sum(float(call["entropy"][s]) for s in slots) / count,
        "rho/min": min(rho), "rho/mean": sum(rho) / count, "rho/max": max(rho),
        "rho/corrected": sum(not 0.7 <= x <= 1.2 for x in rho) / count,
        "log_ratio_clamped": sum(max(map(abs, x)) > 0.5 for x in zip(d, k, log_rho)) / count,
        "tokens": count, "sequences": int(call["mask"].any(1).sum()),
    }  # fmt: skip
    assert metrics == pytest.approx(expected, rel=1e-12)
    assert all(0 < expected[name] < 1 for name in ("clip/low", "clip/high", "clip/dual", "log_ratio_clamped"))


def test_constants_get_no_gradient() -> None:
    names = ("advantages", "old_logps", "ref_logps", "rollout_logps")
    call = draw(16, objective=Objective(kl_coef=0.1, mismatch=Mismatch()))
    leaves = {name: call[name].requires_grad_() for name in (*names, "logps")}
    policy_loss(**{**call, **leaves}).loss.backward()
    assert all(leaves[name].grad is None for name in names)
    assert (leaves["logps"].grad != 0).any()


SMOOTH = [c for c in policy_loss.list_cases() if "gradcheck" in c.tags]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda c: c.name)
def test_gradcheck(case: Any) -> None:
    call = dict(case.build(torch.Generator().manual_seed(0)))

    def loss(logps: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return policy_loss(**{**call, "logps": logps, "entropy": entropy}).loss

    assert torch.autograd.gradcheck(loss, (call["logps"].requires_grad_(), call["entropy"].requires_grad_()))


@pytest.mark.parametrize("case", policy_loss.list_errors(), ids=lambda c: c.name)
def test_wrong_calls_raise(case: Any) -> None:
    with pytest.raises(case.raises, match=case.match):
        policy_loss(**case.build(torch.Generator().manual_seed(0)))
