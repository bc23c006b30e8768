"""What a run shows while it runs: a bar with the reward in it on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_LINES = 20  # over a whole run


class Progress:
    """Shows a run.

    Args:
        console: where; None shows nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._eval: float | None = None

    @classmethod
    def silent(cls) -> Progress:
        """Shows nothing."""
        return cls(None)

    @contextmanager
    def running(self, total: int, done: int) -> Iterator[None]:
        """The bar stands while the block runs."""
        self._total = total
        if self._console is None or not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
            TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        with Bar(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task(self._text({}), total=total, completed=done)
            yield
        self._bar = None

    def advance(self, metrics: Mapping[str, Any]) -> None:
        """One step is done."""
        step = metrics["step"]
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=self._text(metrics))
        elif self._console is not None and (step % max(1, self._total // PLAIN_LINES) == 0 or step == self._total):
            self._console.print(f"step {step}/{self._total}  {self._text(metrics)}", highlight=False)

    def evaluated(self, step: int, mean: float | None) -> None:
        """Held-out prompts were scored."""
        self._eval = mean
        if self._console is not None and self._bar is None and mean is not None:
            self._console.print(f"step {step}  held-out reward {mean:.3f} (greedy)", highlight=False)

    def _text(self, metrics: Mapping[str, Any]) -> str:
        shown = {
            "reward": metrics.get("reward/mean"),
            "held-out": self._eval,
            "drift": metrics.get("drift/max"),
            "tok/s": metrics.get("tokens_per_s"),
        }
        forms = {"drift": ".1e", "tok/s": ".0f"}
        return "  ".join(
            f"{name} {value:{forms.get(name, '.3f')}}" for name, value in shown.items() if value is not None
        )
