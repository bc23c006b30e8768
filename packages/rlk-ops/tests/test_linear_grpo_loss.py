"""The losses from logits and hidden states against dense float64 log-probs and `policy_loss`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlk_ops import Objective, Reduction, SyntheticBatch, grpo_loss, linear_grpo_loss, policy_loss
from rlk_ops.ops.objective import OBJECTIVES

OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}


def dense(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, *, temperature: Any = 1.0,
    logit_scale: float = 1.0, softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probs and entropies, all logits at once, from the definition."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table.gather(-1, ids.clamp_min(0)[..., None])[..., 0], -(table.exp() * table).sum(-1)


def draw(seed: int = 0, **options: Any) -> tuple[SyntheticBatch, Tensor]:
    batch = SyntheticBatch.draw(
        2, 3, max_length=9, vocabulary=23, hidden_size=6, seed=seed, dtype=torch.float64, min_length=0, **options
    )
    bias = 0.3 * torch.randn(23, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return batch, bias


def reduction_for(name: str) -> Reduction:
    return Reduction(max_length=16) if name == "dr_grpo" else Reduction()


@pytest.mark.parametrize("impl", ["reference", "composed"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "transforms"])
def test_loss_gradients_and_metrics_equal_the_dense_form(impl: str, name: str, options: dict[str, Any]) -> None:
    batch, bias = draw()
    objective = Objective(name, kl_coef=0.1, entropy_coef=0.02)
    arguments = batch.policy_arguments() | {"objective": objective, "reduction": reduction_for(name)}
    leaves = [batch.hidden.clone().requires_grad_(), batch.weight.clone().requires_grad_(), bias.requires_grad_()]
    out = linear_grpo_loss(
        leaves[0], leaves[1], batch.token_ids, bias=leaves[2], impl=impl, memory_budget=2048, **arguments, **options
    )
    gradients = torch.autograd.grad(3.0 * out.loss, leaves)

    clean = [torch.where(batch.mask[..., None], batch.hidden, 0.0).requires_grad_(), leaves[1], leaves[2]]
    logps, entropy = dense(*clean, batch.token_ids, **options)
    expected = policy_loss(logps, entropy=entropy, **arguments)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients, torch.autograd.grad(3.0 * expected.loss, clean)):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mine.norm(), theirs.norm(), rtol=1e-10, atol=0)
    assert out.metrics.keys() == expected.metrics.keys()
    for metric, value in expected.metrics.items():
        torch.testing.assert_close(out.metrics[metric], value, rtol=1e-10, atol=1e-12)
    assert (gradients[0][~batch.mask] == 0).all()


@pytest.mark.parametrize("impl", ["reference", "composed"])
@pytest.mark.parametrize("name", ["dapo", "gspo"])
@pytest.mark.parametrize("inplace", [False, True])
def test_from_logits(impl: str, name: str, inplace: bool) -> None:
    batch, _ = draw(1, with_logits=True)
    arguments = batch.policy_arguments() | {"objective": Objective(name, entropy_coef=0.01)}
    logits = batch.logits.clone().requires_grad_()
    out = grpo_loss(logits * 1, batch.token_ids, impl=impl, inplace_backward=inplace, temperature=0.8, **arguments)
    (gradient,) = torch.autograd.grad(out.loss, [logits])
    clean = torch.where(batch.mask[..., None], batch.logits, 0.0).requires_grad_()
    logps, entropy = dense(clean, torch.eye(23, dtype=torch.float64), None, batch.token_ids, temperature=0.8)
    expected = policy_loss(logps, entropy=entropy, **arguments)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected.loss, [clean]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)])
def test_every_combination_of_gradients(needs: tuple[int, int, int]) -> None:
    batch, bias = draw(2)
    full = [t.clone().requires_grad_() for t in (batch.hidden, batch.weight, bias)]
    some = [t.detach().clone().requires_grad_(bool(need)) for t, need in zip(full, needs)]
    for leaves in (full, some):
        linear_grpo_loss(*leaves[:2], batch.token_ids, bias=leaves[2], **batch.policy_arguments()).loss.backward()
    for leaf, other, need in zip(some, full, needs):
        if need:
            torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-14)
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_equals_padded(name: str) -> None:
    batch, _ = draw(3)
    packed = batch.packed()
    losses = []
    for b in (batch, packed):
        hidden = b.hidden.clone().requires_grad_()
        out = linear_grpo_loss(
            hidden, b.weight, b.token_ids, objective=Objective(name, kl_coef=0.1), reduction=reduction_for(name),
            **b.policy_arguments(),
        )  # fmt: skip
        out.loss.backward()
        losses.append((out.loss.detach(), hidden.grad))
    torch.testing.assert_close(losses[0][0], losses[1][0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(losses[0][1][batch.mask], losses[1][1][0], rtol=1e-10, atol=1e-13)


def test_ignored_tokens_are_masked_everywhere() -> None:
    batch, _ = draw(4)
    arguments = batch.policy_arguments()
    dropped = batch.mask.clone()
    dropped[0, 3] = False
    expected = linear_grpo_loss(batch.hidden, batch.weight, batch.token_ids, **{**arguments, "mask": dropped})
    ignored = batch.token_ids.clone()
    ignored[0, 3] = -100
    out = linear_grpo_loss(batch.hidden, batch.weight, ignored, **arguments)
    assert torch.equal(out.loss, expected.loss)
    assert out.metrics["tokens"] == expected.metrics["tokens"] == batch.mask.sum() - 1


def test_entropy_is_reported_on_request_only() -> None:
    batch, _ = draw(5)
    call = (batch.hidden, batch.weight, batch.token_ids)
    assert "entropy" not in linear_grpo_loss(*call, **batch.policy_arguments()).metrics
    out = linear_grpo_loss(*call, report_entropy=True, **batch.policy_arguments())
    torch.testing.assert_close(out.metrics["entropy"], batch.entropy[batch.mask].mean(), rtol=1e-12, atol=0)


def test_memory_budget_bounds_what_is_kept_and_made() -> None:
    batch = SyntheticBatch.draw(4, 8, max_length=64, vocabulary=4096, hidden_size=8)
    budget = 1 << 20
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(t.untyped_storage().nbytes() for t in torch.utils._pytree.tree_leaves(result)
                         if isinstance(t, Tensor))  # fmt: skip
            return result

    hidden, weight = batch.hidden.requires_grad_(), batch.weight.requires_grad_()
    with Watch():
        out = linear_grpo_loss(hidden, weight, batch.token_ids, memory_budget=budget, **batch.policy_arguments())
        out.loss.backward()
    logits = int(batch.mask.sum()) * 4096 * 4
    assert max(sizes) <= budget < logits / 8
    assert linear_grpo_loss.selected(hidden, weight, batch.token_ids, batch.advantages, mask=batch.mask) == "composed"


@pytest.mark.parametrize("op", [grpo_loss, linear_grpo_loss], ids=lambda o: o.name)
@pytest.mark.parametrize("impl", ["reference", "composed"])
def test_cases_agree_with_finite_differences(op: Any, impl: str) -> None:
    cases = [c for c in op.list_cases() if "gradcheck" in c.tags]
    assert len(cases) == len(OBJECTIVES) - 1
    for case in cases:
        call = dict(case.build(torch.Generator().manual_seed(0)))
        names = [n for n in op.differentiable if call.get(n) is not None]

        def loss(*leaves: Tensor, call: dict[str, Any] = call, names: list[str] = names) -> Tensor:
            return op(**{**call, **dict(zip(names, leaves))}, impl=impl).loss

        assert torch.autograd.gradcheck(loss, [call[n].requires_grad_() for n in names]), case.name


WRONG = [(op, case) for op in (grpo_loss, linear_grpo_loss) for case in op.list_errors()]


@pytest.mark.parametrize(("op", "case"), WRONG, ids=lambda x: x.name)
def test_wrong_calls_raise(op: Any, case: Any) -> None:
    with pytest.raises(case.raises, match=case.match):
        op(**case.build(torch.Generator().manual_seed(0)))
