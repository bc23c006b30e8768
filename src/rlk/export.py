"""A run's weights as a Transformers folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from rlk.errors import InputError
from rlk.files import disk_errors_named
from rlk.run_folder import RunFolder


def export_run(run: Path, out: Path) -> Path:
    """Write the newest checkpoint's weights with configuration and tokenizer; the folder appears whole or not at all.

    Raises:
        InputError: no run folder, no checkpoint, or `out` exists.
    """
    from rlk.parts import build_policy
    from rlk_train import CausalLMPolicy, LocalWorker

    folder = RunFolder(run)
    config = folder.config({})
    checkpoint = folder.newest_checkpoint()
    if out.exists():
        raise InputError(f"{out} exists; choose another folder")
    model, tokenizer = build_policy(config)
    LocalWorker(CausalLMPolicy(model), config.train).load(checkpoint)
    draft = out.parent / f".{out.name}.{os.getpid()}"
    try:
        with disk_errors_named("free some space and export again"):
            out.parent.mkdir(parents=True, exist_ok=True)
            saved: Any = model
            saved.save_pretrained(draft)
            if tokenizer is not None:
                tokenizer.save_pretrained(draft)
            draft.rename(out)
    except (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"{out} cannot be made: {error.strerror}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out
