"""Operators for RL post-training of language models: references, kernels, the dispatcher, the gold path."""

from rlk_ops import registry
from rlk_ops.batch import SyntheticBatch
from rlk_ops.device import Device, current_device
from rlk_ops.ops.advantages import group_advantages
from rlk_ops.ops.attention import attention
from rlk_ops.ops.embedding import embedding
from rlk_ops.ops.grpo_loss import grpo_loss
from rlk_ops.ops.kv_attention import kv_attention
from rlk_ops.ops.linear_grpo_loss import linear_grpo_loss
from rlk_ops.ops.linear_logp import linear_logp
from rlk_ops.ops.lm_head import lm_head
from rlk_ops.ops.logp import logp
from rlk_ops.ops.matmul import matmul
from rlk_ops.ops.objective import Mismatch, Objective, Reduction
from rlk_ops.ops.policy_loss import METRIC_KINDS, PolicyLoss, merge_metrics, policy_loss
from rlk_ops.ops.ratio_kl import ratio_kl
from rlk_ops.ops.rms_norm import rms_norm
from rlk_ops.ops.rope import rope
from rlk_ops.ops.sample import sample, sampling_support
from rlk_ops.ops.silu import silu
from rlk_ops.ops.swiglu import swiglu
from rlk_ops.registry import Op, Unsupported, dispatch, find_op, op, use

__all__ = [
    "METRIC_KINDS",
    "Device",
    "Mismatch",
    "Objective",
    "Op",
    "PolicyLoss",
    "Reduction",
    "SyntheticBatch",
    "Unsupported",
    "attention",
    "current_device",
    "dispatch",
    "embedding",
    "find_op",
    "group_advantages",
    "grpo_loss",
    "kv_attention",
    "linear_grpo_loss",
    "linear_logp",
    "lm_head",
    "logp",
    "matmul",
    "merge_metrics",
    "op",
    "policy_loss",
    "ratio_kl",
    "registry",
    "rms_norm",
    "rope",
    "sample",
    "sampling_support",
    "silu",
    "swiglu",
    "use",
]
