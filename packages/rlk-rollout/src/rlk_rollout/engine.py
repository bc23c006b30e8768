"""The rollout engine: prompts in, records out, weights installed in order, each completion tagged with its version."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from rlk_rollout.records import Completion, Group, Rollout
from rlk_rollout.sampling import Sampling
from rlk_weightsync import Consumer, Keep, Receipt
from rlk_weightsync.adapters.base import Adapter

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Mapping[str, Any]
Progress = Callable[[int, int], None]


class PromptError(ValueError):
    """A prompt that cannot be used.

    Attributes:
        index: its place in the call.
        problem: what is wrong with it.
    """

    def __init__(self, index: int, problem: str) -> None:
        self.index, self.problem = index, problem
        super().__init__(f"prompt {index}: {problem}")


class EmptyPrompt(PromptError):
    """A prompt without a token: nothing predicts the first token of its completion."""


class PromptTooLong(PromptError):
    """A prompt that leaves no room for a token in the model's context."""


class EngineBusy(RuntimeError):
    """The engine is paused, generating, or installing weights."""


@dataclass(frozen=True)
class Request:
    """One completion to draw.

    Attributes:
        prompt: index of its prompt.
        prompt_ids: the prompt's tokens.
        seed: of its draws.
    """

    prompt: int
    prompt_ids: tuple[int, ...]
    seed: int


class Engine(Protocol):
    """What draws completions: the embedded Transformers engine, or one of your own."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None where prompts come as ids alone."""

    @property
    def model(self) -> torch.nn.Module:
        """The module that holds the weights."""

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and completion together at the most; None where nothing bounds them."""

    @property
    def adapter(self) -> Adapter:
        """Installs published weights; the same object for the engine's whole life."""

    def draw(
        self, requests: Sequence[Request], sampling: Sampling, *, version: int, progress: Progress | None = None
    ) -> list[Completion]:
        """One completion per request, in order; requests of one prompt share its prefill."""


def derive_seed(seed: int, prompt: int, sample: int) -> int:
    """The seed of one sample: distinct, reproducible, and independent of how many others are drawn."""
    digest = hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # a seed is a non-negative int64


class RolloutEngine:
    """Draws groups of completions and takes weight updates, one at a time.

    Args:
        engine: what draws.
        weight_version: of the weights that it now holds.
    """

    def __init__(self, engine: Engine, *, weight_version: int = 0) -> None:
        self._engine = engine
        self._weight_version = weight_version
        self._paused = False
        self._busy: str | None = None

    @classmethod
    def load(
        cls,
        model: str | Path | torch.nn.Module,
        *,
        tokenizer: Any = None,
        backend: str = "transformers",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        max_batch_sequences: int = 256,
    ) -> RolloutEngine:
        """An engine over a model's folder, hub id or module.

        Args:
            model: see :func:`rlk_rollout.transformers.load_model`; a module is used as it is, not copied.
            tokenizer: of a module; a path brings its own.
            backend: `transformers`, the embedded engine.
            device: where to put the model; None leaves a module where it is and a path on the CPU.
            dtype: of the weights; None leaves a module's as it is and gives a path fp32.
            max_batch_sequences: sequences decoded at once at the most.

        Raises:
            ValueError: another backend, or no such model.
        """
        if backend != "transformers":
            raise ValueError(f"backend={backend!r} is not in this version; use backend='transformers'")
        from rlk_rollout.transformers import TransformersEngine, load_model

        if isinstance(model, torch.nn.Module):
            module = model if device is None and dtype is None else model.to(device=device, dtype=dtype)
        else:
            module, own = load_model(model, dtype=dtype or torch.float32, device=device or "cpu")
            tokenizer = tokenizer or own
        return cls(TransformersEngine(module, tokenizer, max_batch_sequences=max_batch_sequences))

    @property
    def weight_version(self) -> int:
        """The version of the installed weights."""
        return self._weight_version

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer, or None."""
        return self._engine.tokenizer

    @property
    def model(self) -> torch.nn.Module:
        """The engine's module."""
        return self._engine.model

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and completion together at the most."""
        return self._engine.context_length

    def encode(self, prompt: Prompt, index: int = 0) -> tuple[Mapping[str, Any], str, tuple[int, ...]]:
        """A prompt as (example, text, token ids), checked against the context.

        Args:
            prompt: text, chat messages, token ids, or an example with one of these under `prompt`.
            index: its place in the caller's list, for messages.

        Raises:
            EmptyPrompt, PromptTooLong, PromptError: it cannot be used; the message names the index.
        """
        example = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        if "prompt" not in example:
            raise PromptError(index, f"an example needs the key 'prompt'; it has {sorted(example)}")
        text, ids = self._tokenize(example["prompt"], index)
        if not ids:
            raise EmptyPrompt(index, "has no token; give at least one")
        limit = self.context_length
        if limit is not None and len(ids) >= limit:
            raise PromptTooLong(index, f"{len(ids)} tokens leave no room in a context of {limit}; shorten it")
        return example, text, ids

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, *, progress: Progress | None = None
    ) -> Rollout:
        """Draw `sampling.n` completions of every prompt.

        Args:
            prompts: see :meth:`encode`.
            sampling: how to draw; the default is one sample at temperature 1.
            progress: called with (completions finished, completions in all).

        Raises:
            PromptError: a prompt cannot be used; nothing was drawn.
            EngineBusy: the engine is paused or at work.
        """
        sampling = sampling or Sampling()
        started = time.perf_counter()
        encoded = [self.encode(prompt, index) for index, prompt in enumerate(prompts)]
        requests = [
            Request(index, ids, derive_seed(sampling.seed, index, sample))
            for index, (_, _, ids) in enumerate(encoded)
            for sample in range(sampling.n)
        ]
        with self._at_work("generating"):
            drawn = self._engine.draw(requests, sampling, version=self._weight_version, progress=progress)
        groups = tuple(
            Group(example, text, ids, tuple(drawn[index * sampling.n : (index + 1) * sampling.n]))
            for index, (example, text, ids) in enumerate(encoded)
        )
        seconds = time.perf_counter() - started
        return Rollout(groups, sampling, self._weight_version, {"generate": seconds}, _metrics(drawn, seconds))

    def install(self, ticket: bytes, caches: Literal["reset"] | Keep = "reset") -> Receipt:
        """Install a published update: pause, import, install, caches, acknowledge, version, resume.

        Args:
            ticket: from `Update.ticket(rank)`.
            caches: `"reset"`, or `Keep(reason)` where what the caches hold is known to be valid.

        Raises:
            WeightSyncError: the update was refused, or its installation failed; after a failure half-way the engine
                refuses to generate until a full update is installed.
        """
        with self._at_work("installing weights"), Consumer(ticket) as consumer:
            consumer.import_update()
            receipt = consumer.install(self._engine.adapter, caches=caches)
            self._weight_version = receipt.version  # the weights are in, whether or not the producer hears of it
            consumer.acknowledge(receipt)
        return receipt

    def pause(self) -> None:
        """Refuse to generate until :meth:`resume`; updates are still taken."""
        self._paused = True

    def resume(self) -> None:
        """Generate again."""
        self._paused = False

    @contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        if self._busy is not None:
            raise EngineBusy(f"the engine is {self._busy}; it does one thing at a time")
        if what == "generating":
            if self._paused:
                raise EngineBusy("the engine is paused; resume() it before generating")
            self._engine.adapter.require_usable()
        self._busy = what
        try:
            yield
        finally:
            self._busy = None

    def _tokenize(self, prompt: Any, index: int) -> tuple[str, tuple[int, ...]]:
        tokenizer = self.tokenizer
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return (tokenizer.decode(list(prompt)) if tokenizer else ""), tuple(prompt)
        if tokenizer is None:
            raise PromptError(index, "the engine has no tokenizer; give token ids")
        if isinstance(prompt, str):
            return prompt, tuple(tokenizer(prompt)["input_ids"])
        if not all(isinstance(item, Mapping) and {"role", "content"} <= set(item) for item in prompt):
            raise PromptError(index, "expected text, token ids, or messages with 'role' and 'content'")
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(index, "is a chat, and the tokenizer has no chat template; give text or token ids")
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself.
        return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _metrics(drawn: Sequence[Completion], seconds: float) -> dict[str, float]:
    lengths = [len(completion.token_ids) for completion in drawn]
    total = float(sum(lengths))
    return {
        "completions": float(len(drawn)),
        "tokens": total,
        "tokens_per_s": total / seconds if seconds > 0 else 0.0,
        "length/mean": total / max(1, len(drawn)),
        "length/max": float(max(lengths, default=0)),
        "truncated": sum(completion.finish_reason == "length" for completion in drawn) / max(1, len(drawn)),
    }
