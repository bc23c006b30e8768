"""Records, sampling parameters, token batches and the micro-batch plan."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk_rollout import Completion, Group, Rollout, Sampling, Scores, TokenBatch, VersionSpan, plan_micro_batches


def completion(prompt=(1, 2), tokens=(3, 4, 5), **changes):
    n = len(tokens)
    values = {
        "prompt_ids": tuple(prompt), "token_ids": tuple(tokens), "text": "t", "logps": (-1.0,) * n,
        "temperature_logps": (-1.5,) * n, "support": None, "finish_reason": "stop",
        "spans": (VersionSpan(0, n, 4),), "seed": 9,
    }  # fmt: skip
    return Completion(**{**values, **changes})


def test_json_lines_round_trip_with_everything_set():
    scored = completion(
        support=((3, 9), None, (5,)), spans=(VersionSpan(0, 1, 3), VersionSpan(1, 3, 4)),
        scores=Scores(0.5, {"a": 0.5, "b": None}, (-1.0, -2.0, -3.0), None),
    )  # fmt: skip
    failed = completion(scores=Scores(None, {}, None, "judge raised ValueError: ß\nline"))
    rollout = Rollout(
        (Group({"prompt": "ü", "answer": 3}, "ü", (1, 2), (scored, failed)),),
        Sampling(n=2, top_k=3, stop=("\n",), stop_token_ids=(7,)), 4, {"generate": 0.5}, {"tokens": 6.0},
    )  # fmt: skip
    text = rollout.to_json_lines()
    assert Rollout.from_json_lines(text) == rollout
    assert text.count("\n") == 2
    assert scored.weight_version == 4
    with pytest.raises(ValueError, match="line 2: no record of a rollout"):
        Rollout.from_json_lines(text.splitlines()[0] + '\n{"prompt": 1}\n')
    with pytest.raises(ValueError, match="no line"):
        Rollout.from_json_lines("")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logps": (-1.0,)}, "logps has 1 entries for 3 tokens"),
        ({"support": ((1,),)}, "support has 1 entries"),
        ({"finish_reason": "tired"}, "finish_reason='tired'"),
        ({"spans": ()}, "spans without gaps"),
        ({"spans": (VersionSpan(0, 2, 1),)}, "spans without gaps"),
        ({"spans": (VersionSpan(0, 1, 1), VersionSpan(2, 3, 1))}, "spans without gaps"),
    ],
)
def test_records_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        completion(**changes)


def test_replacing_scores_leaves_the_rollout_alone():
    rollout = Rollout((Group({}, "", (1,), (completion(), completion())),), Sampling(n=2), 0)
    scored = rollout.replace_scores([Scores(1.0), None])
    assert [c.scores for c in scored.completions] == [Scores(1.0), None]
    assert [c.scores for c in rollout.completions] == [None, None]
    with pytest.raises(ValueError, match="1 entries for 2 completions"):
        rollout.replace_scores([None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0"), ({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"), ({"top_p": 0.0}, "top_p"), ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"), ({"stop": ("",)}, "stop"),
    ],
)  # fmt: skip
def test_sampling_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_sampling_knows_when_it_truncates():
    assert not Sampling(top_p=1.0, min_p=0.0).truncates
    assert Sampling(top_k=5).truncates
    assert Sampling(top_p=0.9).truncates
    assert Sampling(min_p=0.1).truncates
    assert Sampling(stop="x").stop == ("x",)


def test_token_batch_values():
    batch = TokenBatch.from_completions(
        [completion((1, 2), (3, 4, 5), support=((3, 9), None, (5,))), completion((7,), (8,))], pad_id=60
    )
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [7, 8, 60, 60, 60]]
    assert batch.attention_mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert batch.completion_ids.tolist() == [[3, 4, 5], [8, 60, 60]]
    assert batch.completion_mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.predict_at.tolist() == [[1, 2, 3], [0, 0, 0]]
    assert batch.support.tolist() == [[[3, 9], [-1, -1], [5, -1]], [[-1, -1]] * 3]
    assert TokenBatch.from_completions([completion()]).support is None
    moved = batch.to("cpu")
    assert torch.equal(moved.input_ids, batch.input_ids)
    assert TokenBatch.from_completions([completion()]).to("cpu").support is None


def test_empty_completions_are_legal_and_empty_prompts_are_not():
    batch = TokenBatch.from_completions([completion((1,), (), spans=(VersionSpan(0, 0, 1),))])
    assert batch.completion_mask.sum() == 0
    with pytest.raises(ValueError, match="completion 0 has an empty prompt"):
        TokenBatch.from_completions(
            [
                completion(
                    (),
                    (1,),
                )
            ]
        )
    with pytest.raises(ValueError, match="at least one"):
        TokenBatch.from_completions([])


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_micro_batches_keep_their_budget_and_every_sequence_once(lengths, budget):
    plan = plan_micro_batches(lengths, budget)
    assert sorted(i for batch in plan for i in batch) == list(range(len(lengths)))
    for batch in plan:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= budget or len(batch) == 1
    assert plan == plan_micro_batches(list(lengths), budget)


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="token_budget=0"):
        plan_micro_batches([1], 0)


def test_importing_is_light():
    heavy = "('transformers', 'vllm', 'ray', 'deepspeed')"
    code = f"import rlk_rollout, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
