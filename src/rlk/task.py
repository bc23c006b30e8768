"""The embedded default: a model, a tokenizer and a task made on the spot, so that a first run needs no download.

The task is to spell digits: `english 3 1 4 =` asks for `three one four`, `spanish 3 1 4 =` for `tres uno cuatro`. The
reward is the fraction of words that are right in their places. The right word depends on the instruction, the digit
and its place, so whatever a policy says without reading the prompt is right at most one time in twenty a word.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LANGUAGES = {
    "english": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "spanish": ("cero", "uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve"),
}
DIGITS = 3
HELD_OUT = 200
END = "<end>"
REWARD = "rlk.task:spelled_right"

# Found by a search over learning rates, batch shapes and entropy bonuses on seeds 0 to 2. Rotary positions turn fast
# (theta 30) because prompts have six tokens; without the entropy bonus a word can freeze on a wrong one.
DEFAULTS: Mapping[str, Any] = {
    "loop.steps": 260,
    "loop.prompts_per_step": 16,
    "loop.eval_every": 50,
    "loop.checkpoint_every": 100,
    "sampling.n": 16,
    "sampling.max_tokens": DIGITS,
    "reward.names": [REWARD],
    "train.lr": 1.5e-3,
    "train.betas": [0.9, 0.95],
    "train.objective.entropy_coef": 0.03,
}


@dataclass(frozen=True)
class Task:
    """The embedded task.

    Attributes:
        train: examples with `prompt` and `answer`.
        held_out: examples whose prompts are not among those.
    """

    train: tuple[Mapping[str, str], ...]
    held_out: tuple[Mapping[str, str], ...]


def make_task(seed: int) -> Task:
    """Every instruction with every three digits, shuffled by the seed; the first 200 are held out."""
    examples = [
        {"prompt": " ".join((language, *map(str, digits), "=")), "answer": " ".join(words[d] for d in digits)}
        for language, words in LANGUAGES.items()
        for digits in itertools.product(range(10), repeat=DIGITS)
    ]
    random.Random(seed).shuffle(examples)
    return Task(tuple(examples[HELD_OUT:]), tuple(examples[:HELD_OUT]))


def spelled_right(text: str, example: Mapping[str, Any]) -> float:
    """The fraction of the answer's words that stand in their places."""
    wanted, given = example["answer"].split(), text.split()
    return sum(word == right for word, right in zip(given, wanted)) / len(wanted)


def make_tokenizer() -> Any:
    """A tokenizer of whole words over the task's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [END, "=", *map(str, range(10)), *LANGUAGES, *itertools.chain(*LANGUAGES.values())]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def make_model(seed: int, vocabulary: int) -> Any:
    """A Qwen3 of two layers, 64 wide, with random weights from the seed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 30.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()
