"""Rewards: plain functions of (completion text, example), found by name, time-limited, isolated from each other.

A reward returns a finite number, or None where it does not apply to the example. A reward that raises, returns NaN or
anything that is no number, or outlasts its time limit fails *that sample only*; the others go on.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import math
import queue
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Reward = Callable[[str, Mapping[str, Any]], "float | Awaitable[float | None] | None"]
Item = tuple[str, Mapping[str, Any]]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Outcome:
    """What one reward said of one sample: a value, or None with `error` None (not applicable), or an error."""

    value: float | None = None
    error: str | None = None


def _answer(example: Mapping[str, Any], reward: str) -> str:
    if "answer" not in example:
        raise ValueError(f"{reward} needs the example's 'answer'; this example has the keys {sorted(example)}")
    return str(example["answer"]).strip()


def exact_answer(text: str, example: Mapping[str, Any]) -> float:
    """1.0 where the completion, stripped of surrounding white space, is the example's `answer`, else 0.0."""
    return float(text.strip() == _answer(example, "exact_answer"))


def numeric_answer(text: str, example: Mapping[str, Any]) -> float:
    """1.0 where the last number in the completion equals the example's `answer`, else 0.0 (thousands commas allowed).

    Raises:
        ValueError: the example's answer is no number.
    """
    wanted = float(_answer(example, "numeric_answer").replace(",", ""))
    found = _NUMBER.findall(text)
    return float(bool(found) and math.isclose(float(found[-1].replace(",", "")), wanted, rel_tol=1e-9))


BUILT_IN: Mapping[str, Reward] = {"exact_answer": exact_answer, "numeric_answer": numeric_answer}


def resolve_reward(reward: str | Reward) -> Reward:
    """The function behind a built-in name, a `module:function`, or the callable itself.

    Raises:
        ValueError: the name is unknown (the nearest built-in is named), or the module or its function is not found.
        TypeError: what was found cannot be called.
    """
    if not isinstance(reward, str):
        found: Any = reward
    elif ":" in reward:
        found = _import_reward(reward)
    elif reward in BUILT_IN:
        found = BUILT_IN[reward]
    else:
        near = difflib.get_close_matches(reward, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"reward {reward!r}: {hint}expected one of {', '.join(BUILT_IN)}, or 'module:function' of your own"
        )
    if not callable(found):
        raise TypeError(f"reward {reward!r} is a {type(found).__name__}, expected a function of (text, example)")
    return found


def _import_reward(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward {path!r}: cannot import module {module_name!r}: {error}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"reward {path!r}: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


def reward_name(reward: str | Reward) -> str:
    """The name under which a reward is reported."""
    if isinstance(reward, str):
        return reward.rpartition(":")[2]
    return getattr(reward, "__name__", type(reward).__name__)


def run_reward(reward: Reward, items: Sequence[Item], *, timeout: float, concurrency: int = 32) -> list[Outcome]:
    """One outcome per item, in order.

    Asynchronous rewards run together on an event loop of their own, `concurrency` at a time. Synchronous ones run one
    after another on a thread: Python cannot stop a function that hangs, so it is left behind on its thread, its sample
    fails, and the rest go on on a new thread.

    Args:
        reward: the function.
        items: (completion text, example) pairs.
        timeout: seconds allowed for one sample.
        concurrency: how many asynchronous samples may wait at once.
    """
    if timeout <= 0 or concurrency < 1:
        raise ValueError(f"timeout must be > 0 and concurrency >= 1, got {timeout} and {concurrency}")
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        return _run_async(reward, items, timeout, concurrency)
    return _run_sync(reward, items, timeout)


def _read(value: Any) -> Outcome:
    if value is None:
        return Outcome()
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return Outcome(error=f"returned {value!r:.80} ({type(value).__name__}), expected a number or None")
    number = float(value)
    return Outcome(number) if math.isfinite(number) else Outcome(error=f"returned {number}, expected a finite number")


def _failure(error: BaseException) -> Outcome:
    return Outcome(error=f"raised {type(error).__name__}: {error}"[:300])


def _late(timeout: float) -> Outcome:
    return Outcome(error=f"took longer than {timeout:g} s")


def _call(reward: Reward, item: Item) -> Outcome:
    try:
        value: Any = reward(*item)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        return _read(value)
    except Exception as error:
        return _failure(error)


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _run_sync(reward: Reward, items: Sequence[Item], timeout: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < len(items):
        abandoned = threading.Event()
        results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        rest = items[len(outcomes) :]

        def work(rest: Iterable[Item] = rest, gone: threading.Event = abandoned, out: Any = results) -> None:
            for item in rest:
                if gone.is_set():
                    return
                out.put(_call(reward, item))

        threading.Thread(target=work, daemon=True, name=f"reward {reward_name(reward)}").start()
        try:
            outcomes.extend(results.get(timeout=timeout) for _ in rest)
        except queue.Empty:
            outcomes.append(_late(timeout))
        finally:
            abandoned.set()
    return outcomes


def _run_async(reward: Reward, items: Sequence[Item], timeout: float, concurrency: int) -> list[Outcome]:
    outcomes = [_late(timeout)] * len(items)
    # A verifier that blocks its event loop, or swallows its cancellation, must not hold the run: the loop has a thread
    # of its own and a deadline over all.
    thread = threading.Thread(
        target=lambda: asyncio.run(_gather(reward, items, outcomes, timeout, concurrency)),
        daemon=True,
        name=f"reward {reward_name(reward)}",
    )
    thread.start()
    thread.join(timeout * math.ceil(len(items) / concurrency) + 1.0)
    return list(outcomes)


async def _gather(
    reward: Reward, items: Sequence[Item], outcomes: list[Outcome], timeout: float, concurrency: int
) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, item: Item) -> None:
        async with gate:
            try:
                value: Any = reward(*item)
                outcomes[index] = _read(await asyncio.wait_for(value, timeout))
            except TimeoutError:
                outcomes[index] = _late(timeout)
            except Exception as error:
                outcomes[index] = _failure(error)

    await asyncio.gather(*(one(index, item) for index, item in enumerate(items)))
