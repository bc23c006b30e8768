"""The parts of a run, composed from its configuration: data, policy, engine, rewards, reference, worker, publisher."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlk.config import RunConfig
from rlk.data import Prompts, embedded, load_prompts, split
from rlk.errors import InputError
from rlk.task import make_model, make_task, make_tokenizer
from rlk_ops import Device
from rlk_rollout import PromptError, RolloutEngine
from rlk_rollout.transformers import load_model
from rlk_score import ReferenceModel, Reward, StatelessExecutor, resolve_reward
from rlk_train import CausalLMPolicy, LocalWorker
from rlk_weightsync import Local, Publisher


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        train: the prompts to learn on.
        held_out: the prompts to evaluate on.
        engine: holds its own copy of the weights.
        worker: holds the policy.
        publisher: from the worker to the engine.
        rewards: function to weight.
        reference: scores the frozen initial policy; None where the objective has no KL penalty.
    """

    train: Prompts
    held_out: Prompts
    engine: RolloutEngine
    worker: LocalWorker
    publisher: Publisher
    rewards: Mapping[Any, float]
    reference: StatelessExecutor | None


def build_parts(config: RunConfig) -> Parts:
    """Load and check everything that a run needs; writes nothing.

    Raises:
        InputError: a model, a file, a reward or a prompt cannot be used.
    """
    rewards = _rewards(config)
    train, held_out = load_run_prompts(config)
    model, tokenizer = build_policy(config)
    # The engine's own copy: rollouts see the weights that were published to it and no others.
    engine = RolloutEngine.load(
        copy.deepcopy(model).requires_grad_(False),
        tokenizer=tokenizer,
        max_batch_sequences=config.loop.max_batch_sequences,
    )
    for prompts in (train, held_out):
        _check_prompts(engine, prompts)
    reference = None
    if config.train.objective.kl_coef > 0:
        reference = StatelessExecutor(
            ReferenceModel.frozen_copy(model), micro_batch_tokens=config.train.micro_batch_tokens
        )
    try:
        worker = LocalWorker(CausalLMPolicy(model), config.train)
    except (TypeError, ValueError) as error:
        raise InputError(f"model {config.model.path}: cannot be trained: {error}") from error
    publisher = Publisher(Local(), run_id="rlk", integrity=config.loop.weight_digests)
    return Parts(train, held_out, engine, worker, publisher, rewards, reference)


def _rewards(config: RunConfig) -> dict[Reward, float]:
    weights = config.reward.weights or (1.0,) * len(config.reward.names)
    try:
        return {resolve_reward(name): weight for name, weight in zip(config.reward.names, weights, strict=True)}
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    except Exception as error:  # the module is the user's code, and may raise anything while it is imported
        what = f"importing its module raised {type(error).__name__}: {error}"
        raise InputError(f"reward {', '.join(config.reward.names)}: {what}") from error


def load_run_prompts(config: RunConfig) -> tuple[Prompts, Prompts]:
    """The prompts to train on and those to evaluate on.

    Raises:
        InputError: a file cannot be used; names file and line.
    """
    if config.data.prompts is None:
        task = make_task(config.loop.seed)
        return embedded(task.train, "embedded task"), embedded(task.held_out, "embedded held-out task")
    prompts = load_prompts(config.data.prompts)
    if config.data.eval_prompts is not None:
        return prompts, load_prompts(config.data.eval_prompts)
    return split(prompts, config.data.held_out, config.loop.seed)


def build_policy(config: RunConfig) -> tuple[Any, Any]:
    """The model to train, on its device and in its dtype, and its tokenizer.

    Raises:
        InputError: the device or the model cannot be had.
    """
    try:
        device = Device.parse(config.model.device).torch_device
    except (RuntimeError, ValueError) as error:
        raise InputError(f"model.device: {error}") from error
    dtype = getattr(torch, config.model.dtype)  # one of rlk.config.DTYPES
    if config.model.path is None:
        # Its products are too small to share: with two threads the run took 1.2 to 4 times as long on a busy machine.
        torch.set_num_threads(1)
        tokenizer = make_tokenizer()
        return make_model(config.loop.seed, len(tokenizer)).to(device=device, dtype=dtype), tokenizer
    try:
        model, tokenizer = load_model(config.model.path, dtype=dtype, device=device)
    except ValueError as error:
        raise InputError(str(error)) from error
    except Exception as error:  # each file format has errors of its own
        raise InputError(f"model {config.model.path}: cannot be loaded: {type(error).__name__}: {error}") from error
    if len(tokenizer) < 2:
        raise InputError(f"model {config.model.path}: its tokenizer is empty; put tokenizer.json beside the weights")
    return model.eval(), tokenizer


def _check_prompts(engine: RolloutEngine, prompts: Prompts) -> None:
    model: Any = engine.model
    vocabulary = model.get_input_embeddings().num_embeddings
    for index, example in enumerate(prompts.examples):
        prompt, place = example["prompt"], prompts.places[index]
        if not isinstance(prompt, str) and isinstance(prompt[0], int):
            _check_ids(prompt, vocabulary, place)  # before the tokenizer decodes them
        try:
            _check_ids(engine.encode(example, index)[2], vocabulary, place)
        except PromptError as error:
            raise InputError(f"{place}: {error.problem}") from error


def _check_ids(ids: Sequence[int], vocabulary: int, place: str) -> None:
    if max(ids) >= vocabulary:
        raise InputError(
            f"{place}: token id {max(ids)} is not among the model's {vocabulary}; is it another tokenizer's?"
        )
