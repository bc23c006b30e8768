"""Rewards: values, lookup by name, time limits, and that one bad sample harms no other."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from rlk_score import exact_answer, numeric_answer, resolve_reward, run_reward
from rlk_score.rewards import Outcome


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [("12", 12, 1.0), (" 12\n", "12", 1.0), ("12.", 12, 0.0), ("The answer is 12", 12, 0.0), ("", 12, 0.0)],
)
def test_exact_answer(text, answer, expected):
    assert exact_answer(text, {"answer": answer}) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("3 + 4 = 7", 7, 1.0),
        ("It is 1,234.50!", "1234.5", 1.0),
        ("-5", -5, 1.0),
        ("7 or 8", 7, 0.0),
        ("none", 7, 0.0),
        ("7.0", 7, 1.0),
    ],
)
def test_numeric_answer_takes_the_last_number(text, answer, expected):
    assert numeric_answer(text, {"answer": answer}) == expected


def test_a_missing_answer_is_named():
    with pytest.raises(ValueError, match="needs the example's 'answer'.*'prompt'"):
        exact_answer("x", {"prompt": "p"})


def test_lookup_by_name_by_path_and_its_errors():
    assert resolve_reward("exact_answer") is exact_answer
    assert resolve_reward("rlk_score.rewards:numeric_answer") is numeric_answer
    assert resolve_reward(len) is len
    with pytest.raises(ValueError, match="did you mean 'exact_answer'"):
        resolve_reward("exact_anwser")
    with pytest.raises(ValueError, match="cannot import module 'no_such_module'"):
        resolve_reward("no_such_module:f")
    with pytest.raises(ValueError, match="has no 'nothing'"):
        resolve_reward("math:nothing")
    with pytest.raises(TypeError, match="expected a function"):
        resolve_reward("math:pi")


def answers(reward, texts, **options):
    return run_reward(reward, [(text, {}) for text in texts], timeout=options.pop("timeout", 5.0), **options)


def test_bad_samples_fail_alone_and_order_is_kept():
    def reward(text, example):
        return {"nan": float("nan"), "inf": float("inf"), "word": "high", "none": None, "true": True}.get(
            text, len(text)
        )

    outcomes = answers(reward, ["abc", "nan", "inf", "word", "none", "true", "ab"])
    assert [outcome.value for outcome in outcomes] == [3.0, None, None, None, None, 1.0, 2.0]
    assert outcomes[4] == Outcome()  # not applicable: no value and no error
    assert ["finite" in (outcomes[1].error or ""), "finite" in (outcomes[2].error or "")] == [True, True]
    assert "returned 'high' (str)" in (outcomes[3].error or "")


def test_an_exception_names_itself():
    outcomes = answers(lambda text, example: {"a": 1.0}[text], ["a", "b"])
    assert outcomes == [Outcome(1.0), Outcome(error="raised KeyError: 'b'")]


def test_a_hanging_function_fails_its_sample_and_the_rest_go_on():
    release = threading.Event()

    def reward(text, example):
        if text == "hang":
            release.wait(30)
        return 1.0

    started = time.monotonic()
    outcomes = answers(reward, ["a", "hang", "b", "hang", "c"], timeout=0.2)
    release.set()
    assert [outcome.value for outcome in outcomes] == [1.0, None, 1.0, None, 1.0]
    assert outcomes[1].error == "took longer than 0.2 s"
    assert time.monotonic() - started < 15


def test_asynchronous_rewards_share_the_wait_and_are_cut_off():
    under_way = most = 0

    async def reward(text, example):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.sleep(30 if text == "slow" else 0.01)
        finally:
            under_way -= 1
        if text == "boom":
            raise RuntimeError("verifier down")
        return float(len(text))

    texts = ["a", "slow", "boom"] + ["bb"] * 9
    outcomes = answers(reward, texts, timeout=0.3, concurrency=4)
    assert [outcome.value for outcome in outcomes] == [1.0, None, None] + [2.0] * 9
    assert outcomes[1].error == "took longer than 0.3 s"
    assert outcomes[2].error == "raised RuntimeError: verifier down"
    assert most == 4


def test_an_asynchronous_reward_that_blocks_its_loop_cannot_hold_the_run():
    release = threading.Event()

    async def reward(text, example):
        if text == "block":
            release.wait(30)
        return 1.0

    outcomes = answers(reward, ["a", "block", "b"], timeout=0.2, concurrency=1)
    release.set()
    assert outcomes[0].value == 1.0
    assert outcomes[1].error == "took longer than 0.2 s"


def test_rewards_run_inside_a_running_event_loop():
    async def reward(text, example):
        await asyncio.sleep(0)
        return 2.0

    async def caller():
        return answers(reward, ["a", "b"])

    assert [outcome.value for outcome in asyncio.run(caller())] == [2.0, 2.0]


def test_a_plain_function_may_return_an_awaitable():
    async def inner():
        return 4.0

    assert answers(lambda text, example: inner(), ["a"]) == [Outcome(4.0)]


def test_limits_are_checked():
    with pytest.raises(ValueError, match="timeout must be > 0"):
        answers(exact_answer, ["a"], timeout=0)
