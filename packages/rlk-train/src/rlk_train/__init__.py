"""Training workers for RL post-training: contract, objective, advantages, local worker, checkpoints."""

from rlk_train.advantages import Advantages, rollout_advantages
from rlk_train.checkpoint import CheckpointError
from rlk_train.contract import (
    Policy,
    PolicyOutput,
    TooManySkippedSteps,
    TrainConfig,
    TrainResult,
    Worker,
)
from rlk_train.local import LocalWorker
from rlk_train.policy import CausalLMPolicy

__all__ = [
    "Advantages",
    "CausalLMPolicy",
    "CheckpointError",
    "LocalWorker",
    "Policy",
    "PolicyOutput",
    "TooManySkippedSteps",
    "TrainConfig",
    "TrainResult",
    "Worker",
    "rollout_advantages",
]
