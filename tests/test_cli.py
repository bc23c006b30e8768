"""The command line: one clear line and exit code 2 for every bad input, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlk.data import load_prompts
from rlk.files import write_atomic

TINY = ("--steps", "4", "--prompts-per-step", "4", "--n", "4", "--checkpoint-every", "2", "--eval-every", "2")


def start_rlk(*argv, cwd):
    """The command line as a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlk.cli", *map(str, argv)]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def metrics(run: Path):
    """A run's metrics without what the clock decides."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "seconds" not in k and "tokens_per_s" not in k} for row in rows]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The embedded model and tokenizer as a Transformers folder, and a prompt file."""
    from rlk.task import make_model, make_task, make_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer()
    make_model(0, len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps(dict(example)) for example in make_task(0).train[:40]]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def real(folder, prompts=None, reward="rlk.task:spelled_right", *more):
    prompts = prompts or folder / "prompts.jsonl"
    return ("train", "--model", folder / "model", "--prompts", prompts, "--reward", reward, "--max-tokens", 3, *more)


def test_a_run_leaves_everything_a_reader_needs(rlk, tmp_path):
    code, out, err = rlk("train", *TINY, "--out", "runs/a")
    assert (code, err) == (0, "")
    assert "held-out reward" in out
    run = tmp_path / "runs/a"
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    wanted = {"reward/mean", "reward/std", "loss", "kl/k1", "kl/k3", "ratio/min", "ratio/mean", "ratio/max", "clip/low",
              "clip/high", "entropy", "drift/mean", "drift/max", "drift/equal", "grad_norm", "tokens", "lr",
              "weight_version", "rho/mean", "rho/max"}  # fmt: skip
    assert wanted <= rows[0].keys()
    assert [row["weight_version"] for row in rows] == [1, 2, 3, 4]
    assert all(0 <= row["drift/max"] <= 1e-4 for row in rows)
    assert [("eval/reward" in row) for row in rows] == [False, True, False, True]
    record = json.loads((run / "run.json").read_text())
    assert record["command"]
    assert record["hardware"]["cpus"] >= 1
    assert record["versions"]["torch"]
    page = (run / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert (run / "plots/reward.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step-00000002.safetensors",
        "step-00000004.safetensors",
    ]
    assert not list(run.rglob(".*"))
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "prompt", "answer", "completion", "reward"} <= sample.keys()


def test_resuming_gives_the_numbers_of_an_uninterrupted_run(rlk, tmp_path):
    assert rlk("train", *TINY, "--out", "whole", "--kl-coef", "0.01", "--minibatches", 2)[0] == 0
    half = ("train", *TINY, "--kl-coef", "0.01", "--minibatches", 2, "--out", "half")
    assert rlk(*half[:2], "3", *half[3:])[0] == 0  # the checkpoint of step 3 is written at its end
    (tmp_path / "half/checkpoints/step-00000003.safetensors").unlink()  # as if it had died after step 2's
    code, _, err = rlk("train", "--resume", "half", "--steps", 4)
    assert (code, err) == (0, "")
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")


def test_export_loads_in_transformers_and_says_the_same(rlk, tmp_path):
    assert rlk("train", *TINY, "--out", "a")[0] == 0
    code, out, _ = rlk("export", "a", "trained")
    assert (code, out.splitlines()[-1]) == (0, "trained")
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    saved = load_file(tmp_path / "a/checkpoints/step-00000004.safetensors")
    for name, tensor in model.named_parameters():  # a tied head is one of them, once
        assert tensor.equal(saved[f"weights/{name}"]), name
    assert AutoTokenizer.from_pretrained(tmp_path / "trained")("english 3")["input_ids"]
    code, _, err = rlk("export", "a", "trained")
    assert code == 2
    assert "trained exists" in err


def test_a_real_model_and_prompts_from_files(rlk, tiny_model, tmp_path):
    code, _, err = rlk(*real(tiny_model), *TINY, "--out", "a", "--held-out", "0.2", "--objective", "dapo")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "a/run.json").read_text())["prompts"] == {"train": 32, "held_out": 8}
    assert 'name = "dapo"' in (tmp_path / "a/config.toml").read_text()


def write(folder, name, *lines):
    path = folder / name
    path.write_text("\n".join(lines) + "\n")
    return path


BAD_PROMPTS = {
    "not json": (['{"prompt": "english 1 2 3 ="}', '{"prompt": '], "p.jsonl:2: not JSON"),
    "no prompt": (['{"question": "x"}'], 'p.jsonl:1: expected an object with the key "prompt"'),
    "a list": (["[1, 2]"], "p.jsonl:1: expected an object"),
    "empty prompt": (['{"prompt": ""}'], 'p.jsonl:1: "prompt" must be text'),
    "wrong messages": (['{"prompt": [{"role": "user"}]}'], 'p.jsonl:1: "prompt" must be text'),
    "no template": (['{"prompt": [{"role": "user", "content": "x"}]}'], "p.jsonl:1: is a chat"),
    "empty file": ([""], "no prompt in it"),
    "half a surrogate pair": (['{"prompt": "one", "answer": "\\ud800"}'], "p.jsonl:1: holds half of a surrogate pair"),
    "a huge number": (['{"prompt": "one", "answer": ' + "9" * 5000 + "}"], "p.jsonl:1: cannot be read: Exceeds"),
    "negative id": (['{"prompt": [1, -1]}'], 'p.jsonl:1: "prompt" must be text'),
    "id of another vocabulary": (['{"prompt": [1, 99999]}'], "p.jsonl:1: token id 99999 is not among the model's 34"),
    "too long": (['{"prompt": "one"}', json.dumps({"prompt": "one " * 64})], "p.jsonl:2: 64 tokens leave no room"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_name_file_and_line_and_write_nothing(rlk, tiny_model, tmp_path, name):
    lines, message = BAD_PROMPTS[name]
    path = write(tmp_path, "p.jsonl", *lines)
    code, _, err = rlk(*real(tiny_model, path), "--out", "runs/a", "--held-out", 0)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("train", "--config", "absent.toml"), "absent.toml"),
        (("train", "--steps", "many"), "--steps"),
        (("train", "--stepz", "3"), "No such option"),
        (("train", "--engine", "vllm"), "vLLM is not in this version"),
        (("train", "--trainer", "deepspeed"), "DeepSpeed is not in this version"),
        (("train", "--model", "absent", "--prompts", "p.jsonl"), "p.jsonl: No such file"),
        (("train", "--reward", "exact_anser"), "did you mean 'exact_answer'"),
        (("train", "--reward", "no_module:f"), "cannot import module 'no_module'"),
        (("train", "--device", "cuda:99"), "model.device"),
        (("train", "--resume", "absent"), "absent is no run folder"),
        (("train", "--resume", "absent", "--out", "b"), "--resume goes on in its own folder"),
        (("train", "--held-out", "0.5"), "the embedded task brings the held-out prompts"),
        (("report", "absent"), "absent is no run folder"),
        (("export", "absent", "out"), "absent is no run folder"),
        (("doctor", "--plan", "absent.toml"), "absent.toml"),
        (("validate", "--op", "logpp"), "did you mean 'logp'"),
        (("nothing",), "No such command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(rlk, tmp_path, argv, message):
    code, _, err = rlk(*argv)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_a_model_that_cannot_be_loaded_is_one_line(rlk, tiny_model):
    code, _, err = rlk("train", "--model", "./absent", "--prompts", tiny_model / "prompts.jsonl")
    assert code == 2
    assert "no such file or folder" in err


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", b"no weights", "cannot be loaded: SafetensorError"),
        ("config.json", b"{", "cannot be loaded"),
        ("tokenizer*", None, "its tokenizer is empty"),
    ],
)
def test_a_damaged_model_is_one_line(rlk, tiny_model, tmp_path, name, damage, message):
    shutil.copytree(tiny_model / "model", tmp_path / "model")
    for path in (tmp_path / "model").glob(name):
        path.unlink()
    if damage is not None:
        (tmp_path / "model" / name).write_bytes(damage)
    code, _, err = rlk("train", "--model", "model", "--prompts", tiny_model / "prompts.jsonl", "--out", "a")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "a").exists()


def test_a_reward_whose_module_raises_is_one_line(rlk, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "raising_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = rlk(*real(tiny_model, None, "raising_reward:f"), "--out", "a")
    assert (code, err.count("\n")) == (2, 1)
    assert "raising_reward:f: importing its module raised ZeroDivisionError" in err


@pytest.mark.parametrize("command", ["train", "export"])
def test_a_folder_that_cannot_be_made_is_one_line(rlk, tmp_path, command):
    (tmp_path / "file").write_text("")
    if command == "export":
        assert rlk("train", *TINY, "--out", "a")[0] == 0
    argv = ("train", *TINY, "--out", "file/x") if command == "train" else ("export", "a", "file/x")
    code, _, err = rlk(*argv)
    assert (code, err.count("\n")) == (2, 1)
    assert "file/x cannot be made" in err


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"prompt": "one\u2028two"}', '{"prompt": "three"}')
    assert [example["prompt"] for example in load_prompts(path).examples] == ["one\u2028two", "three"]


def test_an_existing_run_folder_is_left_alone(rlk, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine").write_text("x")
    code, _, err = rlk("train", *TINY, "--out", "a")
    assert code == 2
    assert "go on with --resume a" in err
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["mine"]


def test_a_failing_reward_costs_its_samples_and_then_the_run(rlk, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "judge.py").write_text(
        "import math\n"
        "def some(text, example):\n"
        "    if len(text) % 3 == 0: raise ConnectionError('verifier down')\n"
        "    return math.nan if len(text) % 3 == 1 else 1.0 * len(text)\n"
        "def never(text, example): raise ConnectionError('verifier down')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    some = real(tiny_model, None, "judge:some")
    code, _, err = rlk(*some, *TINY, "--out", "a", "--max-failed-fraction", 1.0)
    assert (code, err) == (0, "")
    failed = [row["reward/failed"] for row in metrics(tmp_path / "a")]
    assert all(0 < count < 16 for count in failed)
    assert any(
        "ConnectionError: verifier down" in line for line in (tmp_path / "a/samples.jsonl").read_text().splitlines()
    )
    code, _, err = rlk(*real(tiny_model, None, "judge:never"), *TINY, "--out", "b")
    assert code == 1
    assert "16 of 16 samples failed to be rewarded" in err
    assert "--resume b" in err
    assert err.count("\n") == 1
    assert (tmp_path / "b/checkpoints/step-00000000.safetensors").exists()


def test_a_full_disk_is_one_line_and_the_last_checkpoint_survives(rlk, tmp_path):
    """A file-size limit makes the second, larger write fail as a full disk does."""
    script = (
        "import resource, sys\n"
        "from rlk.cli import run\n"
        "import rlk.run_folder as folder\n"
        "old = folder.RunFolder.append_metrics\n"
        "def limited(self, metrics):\n"
        "    old(self, metrics)\n"
        "    if metrics['step'] == 3:\n"
        "        import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "folder.RunFolder.append_metrics = limited\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "train", *TINY, "--out", "a"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "cannot write" in done.stderr
    assert "--resume a" in done.stderr
    assert "Traceback" not in done.stderr
    assert [p.name for p in (tmp_path / "a/checkpoints").iterdir()] == ["step-00000002.safetensors"]
    code, _, err = rlk("train", "--resume", "a")
    assert (code, err) == (0, "")
    assert [row["step"] for row in metrics(tmp_path / "a")] == [1, 2, 3, 4]


def test_ctrl_c_leaves_a_run_that_goes_on_to_the_same_numbers(rlk, tmp_path):
    options = ("--prompts-per-step", 4, "--n", 4, "--eval-every", 0, "--checkpoint-every", 1000)
    process = start_rlk("train", *options, "--steps", 5000, "--out", "cut", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "cut/metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "rlk train --resume cut" in err
    done = metrics(tmp_path / "cut")[-1]["step"]
    assert (tmp_path / f"cut/checkpoints/step-{done:08d}.safetensors").exists()
    assert rlk("train", "--resume", "cut", "--steps", done + 2)[0] == 0
    assert rlk("train", *options, "--steps", done + 2, "--out", "whole")[0] == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_help_has_examples_and_is_quick_to_import():
    code = "import sys, rlk.cli; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("command", ["train", "doctor", "report", "export", "validate"])
def test_every_help_has_an_example(rlk, command):
    code, out, _ = rlk(command, "--help")
    assert code == 0
    assert f"{command} " in out.lower().split("usage", 1)[1].split("example", 1)[1]


def test_doctor_names_machine_versions_and_operators(rlk):
    code, out, _ = rlk("doctor")
    assert code == 0
    for word in ("cores", "transformers", "linear_logp", "chunked"):
        assert word in out


def test_doctor_plans_a_run(rlk, tmp_path):
    (tmp_path / "c.toml").write_text("[loop]\nsteps = 10\n")
    code, out, _ = rlk("doctor", "--plan", "c.toml")
    assert code == 0
    for word in ("weights (2 copies)", "total", "min for 10 steps", "operations per parameter"):
        assert word in " ".join(out.split())


def test_validate_reaches_the_gold_path(rlk):
    code, out, _ = rlk("validate", "--op", "silu", "--relation", "accuracy")
    assert code == 0
    assert "silu / reference on cpu: passed" in out


def test_files_are_whole_or_not_there(tmp_path):
    path = tmp_path / "a.txt"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, 3)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_settings_changed_on_resume_are_taken_and_recorded(rlk, tmp_path):
    assert rlk("train", *TINY, "--out", "a")[0] == 0
    code, _, err = rlk("train", "--resume", "a", "--steps", 5, "--lr", 1e-5)
    assert (code, err) == (0, "")
    assert metrics(tmp_path / "a")[-1]["lr"] == 1e-5
    assert "lr = 1e-05" in (tmp_path / "a/config.toml").read_text()


def test_a_file_and_new_held_out_prompts_may_come_with_resume(rlk, tiny_model, tmp_path):
    assert rlk(*real(tiny_model), *TINY, "--out", "a", "--held-out", "0.2")[0] == 0
    other = write(tmp_path, "other.jsonl", json.dumps({"prompt": "english 1 2 3 =", "answer": "one two three"}))
    (tmp_path / "more.toml").write_text("[train]\nlr = 2e-5\n[data]\nheld_out = 0.1\n[loop]\nsteps = 6\n")
    argv = ("train", "--config", "more.toml", "--resume", "a", "--steps", 5, "--eval-prompts", other)
    code, _, err = rlk(*argv)
    assert (code, err) == (0, "")
    assert (len(metrics(tmp_path / "a")), metrics(tmp_path / "a")[-1]["lr"]) == (5, 2e-5)
    assert "<h2>Held-out" not in (tmp_path / "a/report.html").read_text()  # none was asked both times
    code, _, err = rlk("train", "--resume", "a", "--steps", 3)
    assert code == 2
    assert "a has done 5 steps already" in err
    assert "steps = 5" in (tmp_path / "a/config.toml").read_text()


def test_a_checkpoint_of_another_model_is_refused(rlk, tmp_path):
    assert rlk("train", *TINY, "--out", "a")[0] == 0
    checkpoint = tmp_path / "a/checkpoints/step-00000004.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    code, _, err = rlk("train", "--resume", "a", "--steps", 5)
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("every", "stands"),
    [(1, "the last checkpoint stands: rlk train --resume a"), (9, "there is no checkpoint yet: start anew")],
)
def test_a_step_that_cannot_go_on_is_one_line_that_says_what_stands(rlk, every, stands):
    code, _, err = rlk("train", *TINY, "--out", "a", "--lr", 1e38, "--checkpoint-every", every)
    assert code == 1
    assert stands in err
    assert err.count("\n") == 1
