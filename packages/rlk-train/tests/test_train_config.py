import math

import pytest

from rlk_ops import Mismatch, Objective, Reduction
from rlk_train import TrainConfig
from rlk_train.schedule import learning_rate


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", -1e-3),
        ("lr", math.nan),
        ("lr", "1e-3"),
        ("betas", (0.9,)),
        ("betas", (0.9, 1.0)),
        ("eps", -1.0),
        ("weight_decay", math.inf),
        ("warmup_steps", -1),
        ("warmup_steps", 1.5),
        ("schedule", "step"),
        ("max_grad_norm", 0.0),
        ("max_grad_norm", -1.0),
        ("micro_batch_tokens", 0),
        ("minibatches", 0),
        ("epochs", True),
        ("advantage_scale", "groups"),
        ("advantage_ddof", -1),
        ("old_logps", "rollouts"),
        ("truncated_policy", "replays"),
        ("skip_limit", 0),
        ("total_steps", 10),
    ],
)
def test_a_bad_value_is_refused_by_its_name(field, value):
    with pytest.raises(ValueError, match=field):
        TrainConfig(**{field: value})


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="total_steps"):
        TrainConfig(schedule="cosine")
    with pytest.raises(ValueError, match="warmup_steps=10"):
        TrainConfig(schedule="linear", warmup_steps=10, total_steps=10)
    with pytest.raises(ValueError, match="denominator"):
        TrainConfig(reduction=Reduction("token_mean", denominator=3))
    with pytest.raises(ValueError, match="mismatch"):
        TrainConfig(old_logps="rollout", objective=Objective(mismatch=Mismatch("token", "truncate")))
    with pytest.raises(ValueError, match="max_length"):
        TrainConfig(objective=Objective("dr_grpo"))
    with pytest.raises(TypeError, match="objective"):
        TrainConfig(objective="grpo")


def test_auto_recomputes_only_where_the_policy_moves_within_an_update():
    assert not TrainConfig().recomputes_old_logps
    assert TrainConfig(minibatches=2).recomputes_old_logps
    assert TrainConfig(epochs=2).recomputes_old_logps
    assert TrainConfig(old_logps="recompute").recomputes_old_logps
    assert not TrainConfig(old_logps="rollout", epochs=2).recomputes_old_logps


def test_the_schedule_follows_its_formula():
    constant = TrainConfig(lr=2.0, warmup_steps=4)
    assert [learning_rate(constant, s) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    linear = TrainConfig(lr=2.0, schedule="linear", total_steps=4)
    assert [learning_rate(linear, s) for s in (0, 1, 2, 3, 4, 9)] == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    cosine = TrainConfig(lr=2.0, schedule="cosine", warmup_steps=2, total_steps=6)
    expected = [1.0, 2.0, *(1 + math.cos(math.pi * k / 4) for k in range(5))]
    assert [learning_rate(cosine, s) for s in range(7)] == pytest.approx(expected, abs=1e-12)
