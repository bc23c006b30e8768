"""Stateless scoring of rollouts: reference log-probs, rule rewards, asynchronous verifiers, reward models."""

from rlk_score.attach import RewardFailures, attach
from rlk_score.executor import ScoreConfig, ScoreResult, StatelessExecutor
from rlk_score.models import ModelOutput, ReferenceModel, ScoringModel, SequenceRewardModel
from rlk_score.rewards import BUILT_IN, Outcome, Reward, exact_answer, numeric_answer, resolve_reward, run_reward

__all__ = [
    "BUILT_IN",
    "ModelOutput",
    "Outcome",
    "ReferenceModel",
    "Reward",
    "RewardFailures",
    "ScoreConfig",
    "ScoreResult",
    "ScoringModel",
    "SequenceRewardModel",
    "StatelessExecutor",
    "attach",
    "exact_answer",
    "numeric_answer",
    "resolve_reward",
    "run_reward",
]
