"""The learning rate as a pure function of the number of applied optimizer steps."""

from __future__ import annotations

import math

from rlk_train.contract import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of the next optimizer step after `step` applied ones.

    Step s of a warm-up of w steps gets (s + 1) / w of `config.lr`. After it, `linear` and `cosine` fall from
    `config.lr` to 0 at `config.total_steps` and stay there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.lr * (1.0 - done)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))
