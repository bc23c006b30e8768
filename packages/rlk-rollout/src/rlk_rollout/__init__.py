"""Rollout for RL post-training: records, sampling, weight versions, an embedded engine."""

from rlk_rollout.causal_lm import completion_logps
from rlk_rollout.engine import (
    EmptyPrompt,
    Engine,
    EngineBusy,
    Prompt,
    PromptError,
    PromptTooLong,
    Request,
    RolloutEngine,
    derive_seed,
)
from rlk_rollout.records import Completion, Group, Rollout, Scores, VersionSpan
from rlk_rollout.sampling import Sampling
from rlk_rollout.tokens import TokenBatch, plan_micro_batches

__all__ = [
    "Completion",
    "EmptyPrompt",
    "Engine",
    "EngineBusy",
    "Group",
    "Prompt",
    "PromptError",
    "PromptTooLong",
    "Request",
    "Rollout",
    "RolloutEngine",
    "Sampling",
    "Scores",
    "TokenBatch",
    "VersionSpan",
    "completion_logps",
    "derive_seed",
    "plan_micro_batches",
]
