"""A run's plots and its page: PNG files, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk.errors import InputError
from rlk.files import disk_errors_named, write_atomic
from rlk.run_folder import RunFolder

SHOWN_ANSWERS = 12


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        name: of its file.
        title: above it.
        axis: the label of its vertical axis.
        lines: (metric, label) pairs; a metric that no step has is left out.
        log: whether the vertical axis is logarithmic.
        note: what a reader should know.
    """

    name: str
    title: str
    axis: str
    lines: tuple[tuple[str, str], ...]
    log: bool = False
    note: str = ""


PLOTS = (
    Plot("reward", "Reward", "mean reward", (("reward/mean", "training samples"), ("eval/reward", "held out, greedy"))),
    Plot("kl", "KL to the reference", "nats per token", (("kl/ref", "reference"), ("kl/k3", "start of the update")),
         note="Without a KL penalty there is no reference; with one optimizer step a rollout, the KL to the start of "
              "the update is 0 by definition."),
    Plot("entropy", "Entropy", "nats per token", (("entropy", "policy"),)),
    Plot("drift", "Rollout against trainer", "|difference of log-probs|",
         (("drift/max", "largest"), ("drift/mean", "mean")), log=True,
         note="How far the engine's log-probs are from the trainer's for the same tokens and weights."),
    Plot("grad_norm", "Gradient norm", "before clipping", (("grad_norm", "norm"),)),
    Plot("throughput", "Throughput", "completion tokens per second", (("tokens_per_s", "whole step"),)),
    Plot("length", "Completion length", "tokens", (("rollout/length/mean", "mean"), ("rollout/length/max", "longest"))),
    Plot("seconds", "Where the time goes", "seconds per step",
         tuple((f"seconds/{phase}", phase) for phase in ("rollout", "score", "train", "sync"))),
)  # fmt: skip


def write_report(run: Path) -> Path:
    """Draw a run's plots into `plots/` and write `report.html`.

    Returns:
        The path of the page.

    Raises:
        InputError: no run folder, or no step done yet.
    """
    folder = RunFolder(run)
    folder.config({})  # refuses what is no run folder
    steps, evaluations = folder.metrics(), folder.evaluation_steps()
    if not steps:
        raise InputError(f"{run} has no finished step to report on")
    rows = [{"step": 0, "eval/reward": evaluations[0][0]["eval/reward"]}, *steps] if 0 in evaluations else steps
    drawn = [(plot, image) for plot in PLOTS if (image := draw(plot, rows)) is not None]
    page = _page(folder, steps, list(evaluations.values()), drawn)
    with disk_errors_named(f"free some space, then: rlk report {run}"):
        (run / "plots").mkdir(exist_ok=True)
        for plot, image in drawn:
            write_atomic(run / "plots" / f"{plot.name}.png", image)
        write_atomic(run / "report.html", page)
    return run / "report.html"


def draw(plot: Plot, rows: Sequence[dict[str, Any]]) -> bytes | None:
    """One plot as PNG; None where no row has any of its metrics."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = [(label, _points(metric, rows)) for metric, label in plot.lines]
    series = [(label, points) for label, points in series if points]
    if not series:
        return None
    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (label, points) in enumerate(series):
        steps, values = zip(*points, strict=True)
        sparse = len(points) < len(rows) / 2 or len(points) < 8
        style = {"marker": "o", "markersize": 4} if sparse else {"linewidth": 1.4}
        axes.plot(steps, values, label=label, color=f"C{number}", **style)
    if plot.log and all(value > 0 for _, points in series for _, value in points):
        axes.set_yscale("log")
    axes.set_title(plot.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel(plot.axis)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _points(metric: str, rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]


def _page(
    folder: RunFolder, steps: list[dict[str, Any]], evaluations: list[list[dict[str, Any]]], drawn: list[Any]
) -> str:
    from jinja2 import Environment

    record = json.loads((folder.path / "run.json").read_text(encoding="utf-8"))
    images = [
        {"title": plot.title, "note": plot.note, "data": base64.b64encode(image).decode()} for plot, image in drawn
    ]
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    return template.render(
        name=folder.path.name,
        record=record,
        command=" ".join(record["command"]),
        versions={name: version for name, version in record["versions"].items() if version},
        config=(folder.path / "config.toml").read_text(encoding="utf-8"),
        images=images,
        summary=_summary(steps, evaluations),
        answers=_answers(evaluations),
        first=evaluations[0][0]["step"] if evaluations else None,
        last=evaluations[-1][0]["step"] if evaluations else None,
    )


def _summary(steps: list[dict[str, Any]], evaluations: list[list[dict[str, Any]]]) -> list[tuple[str, str]]:
    seconds = sum(value for row in steps for name, value in row.items() if name.startswith("seconds/"))
    rows = [("steps", str(len(steps))), ("seconds in steps", f"{seconds:.1f}")]
    rows += [("first and last five steps' mean reward", f"{_five(steps[:5])} → {_five(steps[-5:])}")]
    means = [lines[0]["eval/reward"] for lines in evaluations if lines[0]["eval/reward"] is not None]
    if means:
        rows.append(("held-out reward (greedy)", f"{means[0]:.3f} → {means[-1]:.3f}"))
    drifts = [row["drift/max"] for row in steps if row.get("drift/max") is not None]
    if drifts:
        rows.append(("largest |rollout − trainer| log-prob", f"{max(drifts):.2e}"))
    skipped = sum(row.get("skipped") or 0 for row in steps)
    failed = sum(row.get("reward/failed") or 0 for row in steps)
    return [*rows, ("optimizer steps skipped", f"{skipped:.0f}"), ("samples without a reward", f"{failed:.0f}")]


def _five(rows: Sequence[dict[str, Any]]) -> str:
    means = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    return f"{sum(means) / len(means):.3f}" if means else "none"


def _answers(evaluations: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Held-out prompts with what the model said first and last; only those that were asked both times."""
    if not evaluations:
        return []
    asked_last = {json.dumps(after["prompt"]): after for after in evaluations[-1][1:]}
    both = [line for line in evaluations[0][1:] if json.dumps(line["prompt"]) in asked_last]
    return [
        {"prompt": _prompt_text(line["prompt"]), "answer": line["answer"], "before": line,
         "after": asked_last[json.dumps(line["prompt"])]}
        for line in both[:SHOWN_ANSWERS]
    ]  # fmt: skip


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    if prompt and isinstance(prompt[0], dict):
        return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
    return " ".join(map(str, prompt))


TEMPLATE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ name }} - rlk report</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1c2024; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top; padding: .3rem .6rem;
border-bottom: 1px solid #e3e6ea; } th { font-weight: 600; color: #555c66; }
pre { background: #f5f6f8; padding: .8rem; overflow: auto; border-radius: 6px; white-space: pre-wrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figure img { width: 100%; } figcaption { color: #555c66; font-size: .85rem; }
.right { color: #16794a; } .wrong { color: #b3362b; } td.said { white-space: pre-wrap; }
</style>
<h1>{{ name }}</h1>
<p>{{ record.model.class }}, {{ "{:,}".format(record.model.parameters) }} parameters;
{{ record.prompts.train }} training prompts, {{ record.prompts.held_out }} held out; started {{ record.started }}.</p>
<pre>{{ command }}</pre>
<table>{% for name, value in summary %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Curves</h2>
<div class="plots">
{% for image in images %}
<figure><img alt="{{ image.title }}" src="data:image/png;base64,{{ image.data }}">
{% if image.note %}<figcaption>{{ image.note }}</figcaption>{% endif %}</figure>
{% endfor %}
</div>
{% if answers %}
<h2>Held-out prompts, before and after</h2>
<table><tr><th>prompt</th><th>answer</th><th>step {{ first }}</th><th>step {{ last }}</th></tr>
{% for row in answers %}
<tr><td class="said">{{ row.prompt }}</td><td>{{ row.answer }}</td>
{% for said in (row.before, row.after) %}
<td class="said {{ 'right' if said.reward is not none and said.reward >= 1 else 'wrong' }}">{{ said.completion }}
({{ "%.2f" % said.reward if said.reward is not none else said.error }})</td>
{% endfor %}</tr>
{% endfor %}
</table>
{% endif %}
<h2>Configuration</h2>
<pre>{{ config }}</pre>
<h2>Machine and versions</h2>
<table>
{% for name, value in record.hardware.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}
{% for name, value in versions.items() %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>{% endfor %}
</table>
</html>
"""
