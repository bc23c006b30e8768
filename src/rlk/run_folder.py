"""The run folder: what a run leaves on disk, and the way back to its newest checkpoint."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlk.config import RunConfig, load_config
from rlk.errors import InputError
from rlk.files import append_json, keep_lines_until, read_json_lines, to_json, write_atomic
from rlk_rollout import Rollout

if TYPE_CHECKING:
    from rlk.parts import Parts

CHECKPOINT = "step-{:08d}.safetensors"
SHOWN_SAMPLES = 8


def fresh_folder(parent: Path) -> Path:
    """A folder name that does not exist yet, from the date and time."""
    stem = datetime.now().strftime("%Y%m%d-%H%M%S")
    candidates = (parent / (stem if number == 0 else f"{stem}-{number}") for number in range(1000))
    return next(path for path in candidates if not path.exists())


class RunFolder:
    """One run's folder.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints stand."""
        return self.path / "checkpoints"

    def create(self, config: RunConfig, command: Sequence[str], parts: Parts) -> None:
        """Make the folder with its configuration and its record; it appears whole or not at all.

        Raises:
            InputError: it exists already, or cannot be made.
        """
        if self.path.exists():
            raise InputError(f"run folder {self.path} exists; go on with --resume {self.path}, or choose another --out")
        draft = self.path.parent / f".{self.path.name}.{os.getpid()}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for name in ("checkpoints", "eval"):
                (draft / name).mkdir(parents=True)
            write_atomic(draft / "config.toml", config.to_toml())
            write_atomic(draft / "run.json", to_json(_record(config, command, parts)) + "\n")
            draft.rename(self.path)
        except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise InputError(f"run folder {self.path} cannot be made: {error.strerror}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def config(self, overrides: Mapping[str, Any]) -> RunConfig:
        """The configuration that the run was started with, with overrides.

        Raises:
            InputError: this is no run folder.
        """
        if not (self.path / "config.toml").is_file():
            raise InputError(f"{self.path} is no run folder: it has no config.toml")
        return load_config(self.path / "config.toml", overrides)

    def update_config(self, config: RunConfig) -> None:
        """Record the configuration that a resumed run goes on with."""
        write_atomic(self.path / "config.toml", config.to_toml())

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is one to resume from."""
        return any(self.checkpoints.glob("step-*.safetensors"))

    def newest_checkpoint(self) -> Path:
        """The checkpoint of the highest step.

        Raises:
            InputError: there is none.
        """
        found = sorted(self.checkpoints.glob("step-*.safetensors"))
        if not found:
            raise InputError(f"{self.path} has no checkpoint to resume from; start anew with another --out")
        return found[-1]

    @contextmanager
    def new_checkpoint(self, step: int, *, keep: int) -> Iterator[Path]:
        """The path of this step's checkpoint; older ones beyond `keep` go once it is whole."""
        yield self.checkpoints / CHECKPOINT.format(step)
        for old in sorted(self.checkpoints.glob("step-*.safetensors"))[:-keep]:
            old.unlink()

    def cut_back(self, step: int) -> None:
        """Forget what was recorded after this step."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_lines_until(self.path / name, step)
        for path in (self.path / "eval").glob("step-*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """One object a step."""
        append_json(self.path / "metrics.jsonl", metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """Every step's metrics."""
        return read_json_lines(self.path / "metrics.jsonl")

    def append_samples(self, step: int, rollout: Rollout) -> None:
        """The first group's samples of a step, with their rewards and what failed."""
        for group in rollout.groups[:1]:
            for completion in group.completions[:SHOWN_SAMPLES]:
                append_json(self.path / "samples.jsonl", {"step": step, **_sample(group.example, completion)})

    def write_evaluation(self, step: int, rollout: Rollout, mean: float | None) -> None:
        """Every held-out prompt with its completion and reward, and the mean on the first line."""
        lines: list[dict[str, Any]] = [{"step": step, "eval/reward": mean}]
        lines += [_sample(group.example, completion) for group in rollout.groups for completion in group]
        text = "".join(to_json(line) + "\n" for line in lines)
        write_atomic(self.path / "eval" / f"step-{step:08d}.jsonl", text)

    def evaluation_steps(self) -> dict[int, list[dict[str, Any]]]:
        """Step to the lines of its evaluation, ascending."""
        paths = sorted((self.path / "eval").glob("step-*.jsonl"))
        return {int(path.stem.removeprefix("step-")): read_json_lines(path) for path in paths}

    def evaluations(self) -> tuple[float | None, float | None]:
        """Mean held-out reward of the first and of the last evaluation."""
        means = [lines[0]["eval/reward"] for lines in self.evaluation_steps().values()]
        return (means[0], means[-1]) if means else (None, None)


def _sample(example: Mapping[str, Any], completion: Any) -> dict[str, Any]:
    scores = completion.scores
    return {
        "prompt": example["prompt"],
        "answer": example.get("answer"),
        "completion": completion.text,
        "reward": scores.reward if scores else None,
        "error": scores.error if scores else None,
        "finish_reason": completion.finish_reason,
        "weight_version": completion.weight_version,
    }


def _record(config: RunConfig, command: Sequence[str], parts: Parts) -> dict[str, Any]:
    from rlk.versions import versions
    from rlk_ops import Device

    device = Device.parse(config.model.device)
    parameters = sum(parameter.numel() for parameter in parts.engine.model.parameters())
    return {
        "command": list(command) or [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "hardware": {"device": str(device), "name": device.name, "arch": device.arch, "cpus": os.cpu_count(),
                     "memory_bytes": device.total_memory, "platform": platform.platform()},
        "model": {"class": type(parts.engine.model).__name__, "parameters": parameters},
        "prompts": {"train": len(parts.train), "held_out": len(parts.held_out)},
    }  # fmt: skip
