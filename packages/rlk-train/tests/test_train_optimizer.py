import pytest
import torch

from rlk_train import TrainConfig
from rlk_train.optimizer import MasterAdamW


def by_hand(weight, gradients, *, lr, betas, eps, decay):
    """AdamW of Loshchilov & Hutter (2019), algorithm 2, in float64."""
    m = v = torch.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        weight = weight * (1 - lr * decay)
        weight = weight - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return weight


def test_steps_follow_the_algorithm_with_clipping_and_decay_of_matrices_only():
    torch.manual_seed(0)
    module = torch.nn.Linear(5, 3).double()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    config = TrainConfig(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    optimizer = MasterAdamW(module, config)
    history = {"weight": [], "bias": []}
    for _ in range(4):
        gradients = {name: torch.randn_like(p) for name, p in module.named_parameters()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for name, p in module.named_parameters():
            p.grad = gradients[name].clone()
            history[name].append(gradients[name] * min(1.0, 0.5 / float(norm)))
        assert float(optimizer.norm()) == pytest.approx(float(norm), rel=1e-12)
        optimizer.step(0.03, float(optimizer.norm()))
    for name, decay in (("weight", 0.1), ("bias", 0.0)):
        expected = by_hand(start[name], history[name], lr=0.03, betas=(0.8, 0.95), eps=1e-6, decay=decay)
        torch.testing.assert_close(module.get_parameter(name).detach(), expected, rtol=1e-10, atol=1e-12)
    assert all(p.grad is None for p in module.parameters())


def test_steps_too_small_for_bf16_add_up_in_the_master():
    module = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    optimizer = MasterAdamW(module, TrainConfig(max_grad_norm=None))
    for _ in range(100):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.collect()
        optimizer.step(1e-3, 1.0)
    assert float(module.weight.detach()) == pytest.approx(0.9, abs=4e-3)


def test_low_precision_gradients_add_up_in_fp32():
    module = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = MasterAdamW(module, TrainConfig())
    for _ in range(1000):
        module.weight.grad = torch.full_like(module.weight, 1.0)
        optimizer.collect()
    assert float(optimizer.gradients()["weight"]) == 1000.0


def test_float16_and_frozen_modules_are_refused():
    with pytest.raises(ValueError, match="float16"):
        MasterAdamW(torch.nn.Linear(2, 2).half(), TrainConfig())
    with pytest.raises(ValueError, match="nothing to train"):
        MasterAdamW(torch.nn.Linear(2, 2).requires_grad_(False), TrainConfig())


def test_frozen_parameters_stay():
    module = torch.nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    before = module.bias.clone()
    optimizer = MasterAdamW(module, TrainConfig(weight_decay=0.5))
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step(1.0, float(optimizer.norm()))
    assert torch.equal(module.bias, before)
    assert list(optimizer.masters) == ["weight"]
