"""Fixtures of rlk_train's tests: a tiny real Qwen3 and scored rollouts drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlk_rollout.records import Completion, Group, Rollout, Scores, VersionSpan
from rlk_rollout.sampling import Sampling

VOCABULARY = 53


@pytest.fixture(scope="session")
def make_model() -> Callable[..., torch.nn.Module]:
    """A two-layer Qwen3 with random weights wide enough that its distributions are far from uniform."""

    def make(
        dtype: torch.dtype = torch.float32, *, seed: int = 0, tied: bool = True, layers: int = 2
    ) -> torch.nn.Module:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def oracle_logps() -> Callable[..., torch.Tensor]:
    """(T,) log-probs of one completion from the model's own logits, in the plainest way; the sequence runs alone."""

    def logps(model: torch.nn.Module, completion: Any, temperature: float) -> torch.Tensor:
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
        logits = model(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1] / temperature
        for step, kept in enumerate(completion.support or ()):
            if kept is not None:
                banned = torch.ones(logits.shape[-1], dtype=torch.bool)
                banned[list(kept)] = False
                logits = torch.cat(
                    [logits[:step], logits[step].masked_fill(banned, -torch.inf)[None], logits[step + 1 :]]
                )
        return torch.log_softmax(logits, -1)[torch.arange(len(completion.token_ids)), list(completion.token_ids)]

    return logps


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    """A scored rollout of random tokens: ragged prompts and completions, log-probs near a uniform guess."""

    def make(
        *,
        groups: int = 2,
        n: int = 4,
        seed: int = 0,
        temperature: float = 1.0,
        longest: int = 9,
        **sampling: Any,
    ) -> Rollout:
        draw = random.Random(seed)
        made = [_group(draw, n, longest) for _ in range(groups)]
        return Rollout(
            groups=tuple(made),
            sampling=Sampling(n=n, temperature=temperature, max_tokens=longest, **sampling),
            weight_version=0,
            seconds={},
            metrics={},
        )

    return make


def _group(draw: random.Random, n: int, longest: int) -> Group:
    prompt = tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 7)))
    completions = tuple(_completion(draw, prompt, longest) for _ in range(n))
    return Group(example={"prompt": "p"}, prompt_text="p", prompt_ids=prompt, completions=completions)


def _completion(draw: random.Random, prompt: tuple[int, ...], longest: int) -> Completion:
    length = draw.randint(1, longest)
    logps = tuple(_fp32(-3.0 - draw.random()) for _ in range(length))
    return Completion(
        prompt_ids=prompt,
        token_ids=tuple(draw.randrange(VOCABULARY) for _ in range(length)),
        text="",
        logps=logps,
        temperature_logps=logps,
        support=None,
        finish_reason="stop",
        spans=(VersionSpan(0, length, 0),),
        seed=draw.randrange(2**31),
        scores=Scores(
            reward=draw.random(),
            rewards={"random": 0.0},
            ref_logps=tuple(_fp32(value + draw.uniform(-0.3, 0.3)) for value in logps),
            error=None,
        ),
    )


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
