"""Operators for RL post-training of language models: references, kernels, the dispatcher, the gold path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "op": "registry", "ops": "registry", "find_op": "registry", "use": "registry", "dispatch": "registry",
    "Unsupported": "registry", "Op": "registry",
    "Device": "device", "current_device": "device",
    "SyntheticBatch": "batch",
    "logp": "ops.logp", "linear_logp": "ops.linear_logp", "ratio_kl": "ops.ratio_kl",
    "Objective": "ops.objective", "Mismatch": "ops.objective", "Reduction": "ops.objective",
    "PolicyLoss": "ops.policy_loss", "policy_loss": "ops.policy_loss", "grpo_loss": "ops.grpo_loss",
    "linear_grpo_loss": "ops.linear_grpo_loss", "group_advantages": "ops.advantages",
    "attention": "ops.attention", "kv_attention": "ops.kv_attention",
    "rms_norm": "ops.rms_norm", "rope": "ops.rope", "silu": "ops.silu", "swiglu": "ops.swiglu",
    "embedding": "ops.embedding", "lm_head": "ops.lm_head", "matmul": "ops.matmul", "sample": "ops.sample",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(import_module(f"rlk_ops.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'rlk_ops' has no attribute {name!r}")


def load_all() -> None:
    """Import every operator's module."""
    for module in {m for m in _PUBLIC.values() if m.startswith("ops.")}:
        import_module(f"rlk_ops.{module}")
