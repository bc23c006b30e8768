"""Configuration: one to one with TOML, unknown keys named, values checked, flags over files."""

from __future__ import annotations

import pytest

from rlk.config import load_config
from rlk.errors import InputError

REAL = {"model.path": "m", "data.prompts": "p.jsonl"}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        REAL,
        {**REAL, "train.max_grad_norm": "none", "train.objective.name": "dapo", "sampling.top_p": 0.9},
        {"train.objective.mismatch.level": "sequence", "train.objective.mismatch.upper": 3, "train.schedule": "cosine",
         "train.total_steps": 50, "train.warmup_steps": 3, "reward.names": ["a:b", "c:d"], "reward.weights": [1, 0.5]},
    ],
)  # fmt: skip
def test_toml_round_trip(tmp_path, overrides):
    config = load_config(None, overrides)
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "c.toml", {}) == config


def test_flags_override_files_and_files_override_defaults(tmp_path):
    (tmp_path / "c.toml").write_text("[train]\nlr = 1\n[loop]\nsteps = 7\n")
    config = load_config(tmp_path / "c.toml", {"loop.steps": 9, "loop.seed": None})
    assert (config.train.lr, config.loop.steps, config.loop.seed) == (1.0, 9, 0)
    assert config.train.objective.entropy_coef == 0.03  # the embedded task's default still holds


def test_the_embedded_tasks_defaults_do_not_reach_a_real_model():
    config = load_config(None, REAL)
    assert (config.train.objective.entropy_coef, config.sampling.n, config.reward.names) == (0.0, 8, ("exact_answer",))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.lrr": 1.0}, "unknown key train.lrr; did you mean train.lr?"),
        ({"trian.lr": 1.0}, "unknown key trian; did you mean train?"),
        (
            {"train.objective.clip_hi": 0.3},
            "did you mean train.objective.clip_high?",
        ),
        ({"train.objective.name": "grpoo"}, "did you mean 'grpo'"),
        ({"train.lr": "fast"}, "train.lr='fast': expected float"),
        ({"loop.steps": True}, "loop.steps=True: expected int"),
        ({"loop.steps": 0}, "steps=0: expected at least 1"),
        ({"sampling.n": 0}, "n=0: expected at least 1"),
        ({"sampling.n": 1}, "sampling.n=1: an advantage compares"),
        ({"sampling.seed": 5}, "sampling.seed=5 has no effect"),
        ({"data.held_out": 0.5}, "held_out=0.5 has no effect: the embedded task"),
        ({**REAL, "data.eval_prompts": "e.jsonl", "data.held_out": 0.5}, "has no effect: eval_prompts names"),
        ({"sampling.temperature": 0}, "greedy samples have nothing to learn from"),
        ({"model.dtype": "int8"}, "dtype='int8': expected one of float32"),
        ({"model.engine": "vllm"}, "vLLM is not in this version"),
        ({"model.trainer": "deepspeed"}, "DeepSpeed is not in this version"),
        ({"model.path": "m"}, "go together"),
        ({"data.eval_prompts": "e.jsonl"}, "eval_prompts needs prompts"),
        ({"data.held_out": 1.0}, "held_out=1.0"),
        ({"reward.names": []}, "at least one reward"),
        ({"reward.weights": [1.0, 2.0]}, "expected one for each of"),
        ({"train": 3}, "train must be a table"),
        ({"train.reduction.denominator": 5}, "denominator"),
    ],
)
def test_what_cannot_be_used_is_named(overrides, message):
    with pytest.raises(InputError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load_config(tmp_path / "absent.toml", {})
    (tmp_path / "bad.toml").write_text("[train\n")
    with pytest.raises(InputError, match=r"bad\.toml: not TOML"):
        load_config(tmp_path / "bad.toml", {})
