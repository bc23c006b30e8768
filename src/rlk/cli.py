"""The command line. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from rlk.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    InputError,
    Interrupted,
    RunFailed,
)

app = typer.Typer(
    name="rlk",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models: train, inspect, validate, report.",
)

# The parent of every complaint about arguments; typer carries its own copy of click and exports only this child.
USAGE_ERROR: Any = typer.BadParameter.__base__

MODEL = "Model and data"


def _option(help: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


@app.command()
def train(
    config: Annotated[
        Path | None, _option("a TOML file; flags override it, it overrides a resumed run's", "Run")
    ] = None,
    out: Annotated[Path | None, _option("the run folder; default: a fresh one under runs/", "Run")] = None,
    resume: Annotated[Path | None, _option("go on from this run folder's newest checkpoint", "Run")] = None,
    steps: Annotated[int | None, _option("rollouts, each with one update", "Run")] = None,
    seed: Annotated[int | None, _option("of the data order and every draw", "Run")] = None,
    eval_every: Annotated[int | None, _option("steps between evaluations on held-out prompts (greedy)", "Run")] = None,
    checkpoint_every: Annotated[int | None, _option("steps between checkpoints", "Run")] = None,
    model: Annotated[str | None, _option("Transformers folder, GGUF file or folder, or hub id", MODEL)] = None,
    dtype: Annotated[str | None, _option("float32, bfloat16 or float64", MODEL)] = None,
    device: Annotated[str | None, _option("cpu, cuda, cuda:1, rocm", MODEL)] = None,
    engine: Annotated[str | None, _option("rollout engine: transformers", MODEL)] = None,
    trainer: Annotated[str | None, _option("training worker: local", MODEL)] = None,
    prompts: Annotated[str | None, _option("prompts as JSON lines", MODEL)] = None,
    eval_prompts: Annotated[str | None, _option("held-out prompts as JSON lines", MODEL)] = None,
    held_out: Annotated[float | None, _option("else: the part of --prompts that is held out", MODEL)] = None,
    reward: Annotated[list[str] | None, _option("name or module:function; may be repeated", "Reward")] = None,
    reward_timeout: Annotated[float | None, _option("seconds for one sample", "Reward")] = None,
    max_failed_fraction: Annotated[float | None, _option("of a step's samples, before the run stops", "Reward")] = None,
    n: Annotated[int | None, _option("samples of each prompt", "Rollout")] = None,
    prompts_per_step: Annotated[int | None, _option("prompts of a rollout", "Rollout")] = None,
    max_tokens: Annotated[int | None, _option("tokens of a completion at the most", "Rollout")] = None,
    temperature: Annotated[float | None, _option("of the draws", "Rollout")] = None,
    top_p: Annotated[float | None, _option("nucleus", "Rollout")] = None,
    top_k: Annotated[int | None, _option("keep the k most probable tokens", "Rollout")] = None,
    objective: Annotated[str | None, _option("grpo, dapo, dr_grpo, gspo, cispo, sapo, gmpo, ...", "Training")] = None,
    kl_coef: Annotated[float | None, _option("weight of the KL penalty to the initial model", "Training")] = None,
    entropy_coef: Annotated[float | None, _option("weight of the entropy bonus", "Training")] = None,
    lr: Annotated[float | None, _option("AdamW's learning rate", "Training")] = None,
    max_grad_norm: Annotated[float | None, _option("clip the gradient's norm to this", "Training")] = None,
    minibatches: Annotated[int | None, _option("optimizer steps of one rollout", "Training")] = None,
    micro_batch_tokens: Annotated[
        int | None, _option("padded tokens of a forward: memory, not results", "Training")
    ] = None,
    warmup_steps: Annotated[int | None, _option("optimizer steps of linear warm-up", "Training")] = None,
    quiet: Annotated[bool, _option("show nothing but the outcome", "Run", "--quiet", "-q")] = False,
) -> None:
    """Train a model by reinforcement learning. Without --model: a tiny Qwen3 learns to spell digits, in under a minute.

    **Examples**

        rlk train
        rlk train --seed 1 --steps 100 --out runs/a
        rlk train --model ./SmolLM2-135M --prompts sums.jsonl --reward numeric_answer --n 8 --lr 2e-5
        rlk train --model ./model --prompts p.jsonl --reward my_rewards:judge --objective dapo --kl-coef 0.01
        rlk train --config run.toml --steps 500 --eval-every 20
        rlk train --resume runs/a
        rlk train --config run.toml --resume runs/a --steps 500

    A prompt file has one JSON object a line: {"prompt": "..." or [{"role": ..., "content": ...}], "answer": ...}.
    A reward is a function (completion_text, example) -> float | None, by built-in name or module:function.
    """
    overrides = {
        "loop.steps": steps, "loop.seed": seed, "loop.eval_every": eval_every,
        "loop.checkpoint_every": checkpoint_every, "loop.prompts_per_step": prompts_per_step,
        "model.path": model, "model.dtype": dtype, "model.device": device, "model.engine": engine,
        "model.trainer": trainer,
        "data.prompts": prompts, "data.eval_prompts": eval_prompts, "data.held_out": held_out,
        "reward.names": reward or None, "reward.timeout": reward_timeout,
        "reward.max_failed_fraction": max_failed_fraction,
        "sampling.n": n, "sampling.max_tokens": max_tokens, "sampling.temperature": temperature,
        "sampling.top_p": top_p, "sampling.top_k": top_k,
        "train.objective.name": objective, "train.objective.kl_coef": kl_coef,
        "train.objective.entropy_coef": entropy_coef, "train.lr": lr, "train.max_grad_norm": max_grad_norm,
        "train.minibatches": minibatches, "train.micro_batch_tokens": micro_batch_tokens,
        "train.warmup_steps": warmup_steps,
    }  # fmt: skip
    _train(config, out, resume, overrides, quiet)


def _train(config: Path | None, out: Path | None, resume: Path | None, overrides: dict[str, Any], quiet: bool) -> None:
    from rich.console import Console

    console = Console(quiet=quiet)
    with console.status("loading"):
        from rlk.config import load_config, read_settings
        from rlk.loop import Loop
        from rlk.progress import Progress
        from rlk.run_folder import RunFolder, fresh_folder
    if resume is not None and out is not None:
        raise InputError("--resume goes on in its own folder; drop --out")
    sys.path.insert(0, str(Path.cwd()))  # a reward module:function beside the caller
    if resume is not None:
        given = {name: value for name, value in overrides.items() if value is not None}
        overrides = {**(read_settings(config) if config else {}), **given}
        folder, settings = resume, RunFolder(resume).config(overrides)
    else:
        settings, folder = load_config(config, overrides), out or fresh_folder(Path("runs"))
        if folder.exists():
            raise InputError(f"run folder {folder} exists; go on with --resume {folder}, or choose another --out")
    changed = [name for name, value in overrides.items() if value is not None]
    loop = Loop(
        settings,
        folder,
        resume=resume is not None,
        changed=changed,
        progress=Progress(console),
        command=["rlk", *sys.argv[1:]],
    )
    with _stopping_on_interrupt(loop.stop, console):
        result = loop.run()
    _write_report(folder, console)
    if result.eval_before is not None and result.eval_after is not None:
        console.print(f"held-out reward {result.eval_before:.3f} -> {result.eval_after:.3f}", highlight=False)
    console.print(f"{result.steps} steps, {result.seconds:.1f} s, {folder}", highlight=False)


def _write_report(folder: Path, console: Any) -> None:
    from rlk.report import write_report

    page = write_report(folder)
    console.print(f"report: {page}", highlight=False)


@contextmanager
def _stopping_on_interrupt(stop: Callable[[], None], console: Any) -> Iterator[None]:
    """The first Ctrl-C ends the run after its step, with a checkpoint; the second ends it at once."""
    previous = signal.getsignal(signal.SIGINT)

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()
        console.print("stopping after this step, with a checkpoint; Ctrl-C again quits at once", highlight=False)

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="a run folder", show_default=False)]) -> None:
    """Draw a run's plots (PNG) and its page (one self-contained HTML file).

    **Example**

        rlk report runs/a
    """
    from rlk.report import write_report

    typer.echo(write_report(run))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="a run folder", show_default=False)],
    out: Annotated[Path, typer.Argument(help="the folder to make", show_default=False)],
) -> None:
    """Write a run's newest weights as a Transformers folder.

    **Example**

        rlk export runs/a ./trained
    """
    from rlk.export import export_run

    typer.echo(export_run(run, out))


@app.command()
def doctor(
    plan: Annotated[
        Path | None, _option("say what a run of this TOML file would need before it starts", "Plan")
    ] = None,
) -> None:
    """Say what this machine has, and which implementation every operator would take here, and why not the others.

    **Examples**

        rlk doctor
        rlk doctor --plan run.toml
    """
    from rlk.doctor import show_machine, show_plan

    if plan is not None:
        show_plan(plan)
    else:
        show_machine()


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def validate(context: typer.Context) -> None:
    """Hold an operator's implementations against the gold path (see `rlk validate --help`).

    **Examples**

        rlk validate --op logp
        rlk validate --op linear_logp --impl chunked --relation gradients
    """
    from rlk_ops.testing.cli import main as validate_main

    raise typer.Exit(validate_main(["validate", *context.args]))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        outcome = typer.main.get_command(app).main(
            args=list(argv) if argv is not None else None, prog_name="rlk", standalone_mode=False
        )
        return outcome if isinstance(outcome, int) else EXIT_OK
    except InputError as error:
        return _say(str(error), EXIT_BAD_INPUT)
    except USAGE_ERROR as error:
        # Without a command there is no message: the help was shown.
        return _say(message, EXIT_BAD_INPUT) if (message := error.format_message()) else EXIT_BAD_INPUT
    except SystemExit as error:  # how argparse ends its own --help
        return error.code if isinstance(error.code, int) else EXIT_OK
    except RunFailed as error:
        return _say(str(error), EXIT_FAILED)
    except Interrupted as error:
        return _say(str(error), EXIT_INTERRUPTED)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted; a run that had a checkpoint can go on with: rlk train --resume RUN", EXIT_INTERRUPTED)


def _say(message: str, code: int) -> int:
    print("rlk: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
