"""The configuration of a run: frozen dataclasses, validated at construction, one to one with a TOML file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rlk.errors import InputError
from rlk_rollout import Sampling
from rlk_train import TrainConfig

NONE = "none"
HELD_OUT = 0.1
DTYPES = ("float32", "bfloat16", "float64")
ENGINES = {"transformers": None, "vllm": "vLLM"}
TRAINERS = {"local": None, "deepspeed": "DeepSpeed", "fsdp": "FSDP", "ray": "Ray"}


@dataclass(frozen=True)
class ModelConfig:
    """Which model.

    Attributes:
        path: a Transformers folder, a GGUF file or folder, or a hub id; None makes the embedded tiny Qwen3.
        dtype: `float32`, `bfloat16` or `float64`.
        device: `cpu`, `cuda`, `cuda:1`, `rocm`.
        engine: `transformers`, the embedded rollout engine.
        trainer: `local`.
    """

    path: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    engine: str = "transformers"
    trainer: str = "local"

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, DTYPES)
        _choice("engine", self.engine, ENGINES)
        _choice("trainer", self.trainer, TRAINERS)
        if ENGINES[self.engine]:
            raise ValueError(f"engine={self.engine!r}: {ENGINES[self.engine]} is not in this version; use transformers")
        if TRAINERS[self.trainer]:
            raise ValueError(f"trainer={self.trainer!r}: {TRAINERS[self.trainer]} is not in this version; use local")


@dataclass(frozen=True)
class DataConfig:
    """Which prompts.

    Attributes:
        prompts: a file of JSON lines; None takes the embedded task's.
        eval_prompts: a file of held-out ones; None holds out a part of `prompts`.
        held_out: that part, as a fraction; 0 holds out none. Without effect, and so refused, beside `eval_prompts` and
            for the embedded task, which brings its own.
    """

    prompts: str | None = None
    eval_prompts: str | None = None
    held_out: float = HELD_OUT

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out}: expected a fraction from 0 to below 1")
        if self.eval_prompts is not None and self.prompts is None:
            raise ValueError("eval_prompts needs prompts: the embedded task brings its own held-out prompts")
        if self.held_out != HELD_OUT and (self.prompts is None or self.eval_prompts is not None):
            source = "eval_prompts names" if self.prompts else "the embedded task brings"
            raise ValueError(f"held_out={self.held_out} has no effect: {source} the held-out prompts; leave it out")


@dataclass(frozen=True)
class RewardConfig:
    """What is rewarded.

    Attributes:
        names: built-in names or `module:function`.
        weights: one a name; empty means 1 each.
        timeout: seconds for one sample of one reward.
        max_failed_fraction: the run stops when more of a step's samples failed.
    """

    names: tuple[str, ...] = ("exact_answer",)
    weights: tuple[float, ...] = ()
    timeout: float = 10.0
    max_failed_fraction: float = 0.5

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"names={self.names!r}: expected at least one reward, each once")
        if self.weights and len(self.weights) != len(self.names):
            raise ValueError(f"weights={self.weights!r}: expected one for each of {self.names}")
        if self.timeout <= 0 or not 0 <= self.max_failed_fraction <= 1:
            raise ValueError("expected timeout > 0 and max_failed_fraction from 0 to 1")


@dataclass(frozen=True)
class LoopConfig:
    """How long and how often.

    Attributes:
        steps: rollouts, each with one update.
        prompts_per_step: prompts of a rollout.
        seed: of the embedded model and task, the order of prompts and every draw.
        eval_every: steps between evaluations; 0 evaluates before the first and after the last step alone.
        checkpoint_every: steps between checkpoints; one is written at the end in any case.
        keep_checkpoints: how many of the newest are kept.
        max_batch_sequences: sequences that the engine decodes at once.
        weight_digests: `off`, `sample` or `full`: how much of the synced weights is verified.
    """

    steps: int = 100
    prompts_per_step: int = 16
    seed: int = 0
    eval_every: int = 20
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    max_batch_sequences: int = 256
    weight_digests: str = "full"

    def __post_init__(self) -> None:
        least = {
            "steps": 1,
            "prompts_per_step": 1,
            "keep_checkpoints": 1,
            "max_batch_sequences": 1,
            "checkpoint_every": 1,
        }
        for name in ("steps", "prompts_per_step", "seed", "eval_every", "checkpoint_every", "keep_checkpoints",
                     "max_batch_sequences"):  # fmt: skip
            if getattr(self, name) < least.get(name, 0):
                raise ValueError(f"{name}={getattr(self, name)}: expected at least {least.get(name, 0)}")
        _choice("weight_digests", self.weight_digests, ("off", "sample", "full"))


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: Sampling = field(default_factory=Sampling)
    reward: RewardConfig = field(default_factory=RewardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)

    def __post_init__(self) -> None:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature=0: greedy samples have nothing to learn from; use one above 0")
        if self.sampling.n == 1:
            raise ValueError("sampling.n=1: an advantage compares the samples of one prompt; use at least 2")
        if self.sampling.seed != 0:
            raise ValueError(
                f"sampling.seed={self.sampling.seed} has no effect: loop.seed decides every draw; set that"
            )
        if (self.model.path is None) != (self.data.prompts is None):
            raise ValueError("model.path and data.prompts go together: the embedded task has its own model and prompts")

    @property
    def embedded(self) -> bool:
        """Whether this is the embedded task."""
        return self.model.path is None

    def to_toml(self) -> str:
        """The configuration as TOML; None values are left out."""
        import tomli_w

        document = _plain(asdict(self))
        if self.train.max_grad_norm is None:
            document["train"]["max_grad_norm"] = NONE  # TOML has no null, and the default is not None
        return tomli_w.dumps(document)


def load_config(path: str | Path | None, overrides: Mapping[str, Any]) -> RunConfig:
    """The configuration of a TOML file, with overrides by dotted name (`train.lr`), over the defaults.

    Args:
        path: of the file; None starts from the defaults.
        overrides: dotted name to value; None values are passed over.

    Raises:
        InputError: no such file, not TOML, an unknown key (the nearest known one is named) or a value out of range.
    """
    given: dict[str, Any] = {} if path is None else _read(Path(path))
    for name, value in overrides.items():
        if value is not None:
            _set(given, name, value)
    if given.get("model", {}).get("path") is None and given.get("data", {}).get("prompts") is None:
        given = _over_task_defaults(given)
    for name, value in (("sampling.n", 8), ("train.report_entropy", True)):
        if name not in dict(_flat(given)):
            _set(given, name, value)
    config: RunConfig = _build(RunConfig, given, "")
    return config


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a TOML file by dotted name, as `load_config` takes them for overrides.

    Raises:
        InputError: no such file, or not TOML.
    """
    return dict(_flat(_read(path)))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"config {path}: not TOML: {error}") from error


def _over_task_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    from rlk.task import DEFAULTS

    merged: dict[str, Any] = {}
    for name, value in DEFAULTS.items():
        _set(merged, name, value)
    for name, value in _flat(given):
        _set(merged, name, value)
    return merged


def _set(target: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise InputError(f"config: {section} must be a table, to hold {name}")
    target[last] = value


def _flat(given: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in given.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs


def _build(cls: Any, given: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise InputError(f"config: {where.rstrip('.')} must be a table, got {given!r:.60}")
    hints = get_type_hints(cls)
    known = {f.name: hints[f.name] for f in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {where}{near[0]}?" if near else f"; known are {', '.join(known)}"
            raise InputError(f"config: unknown key {where}{name}{hint}")
        nested = _nested(known[name])
        values[name] = _build(nested, value, f"{where}{name}.") if nested else _value(known[name], value, where + name)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise InputError(f"config: {where}{error}") from error


def _nested(hint: Any) -> Any:
    options = [hint, *get_args(hint)]
    return next((option for option in options if isinstance(option, type) and is_dataclass(option)), None)


def _value(hint: Any, value: Any, name: str) -> Any:
    """A TOML value as the field's type: lists become tuples, whole numbers become floats where floats are expected."""
    accepted = [getattr(option, "__origin__", option) for option in (get_args(hint) or (hint,))]
    if str(hint).startswith("tuple"):
        accepted = [tuple]
    if value == NONE and type(None) in accepted:
        return None
    value = tuple(value) if isinstance(value, list) else value
    if isinstance(value, int) and not isinstance(value, bool) and float in accepted and int not in accepted:
        value = float(value)
    if type(value) not in accepted:
        expected = " or ".join(option.__name__ for option in accepted if option is not type(None))
        raise InputError(f"config: {name}={value!r:.60}: expected {expected}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return list(value) if isinstance(value, tuple) else value


def _choice(name: str, value: object, known: Any) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}")
