"""The compile driver on kernels of its own: machine code with no GPU, and a broken kernel caught."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
import toy
from rlk_ops.testing.compile import KernelVariant, compile_variant
kernel = getattr(toy, {kernel!r})
variant = KernelVariant("toy", kernel, dict(x_ptr="*fp32", y_ptr="*fp32", n="i32", BLOCK="constexpr"), dict(BLOCK=128))
print(sorted(compile_variant(variant, {target!r}).asm))
"""
KERNELS = """
import triton
import triton.language as tl

@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2.0, mask=at < n)

@triton.jit
def broken(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), undefined_name)
"""


def run(tmp_path, kernel, target, **environment):
    (tmp_path / "toy.py").write_text(KERNELS)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), **environment}
    script = SCRIPT.format(folder=str(tmp_path), kernel=kernel, target=target)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)


@pytest.mark.parametrize(("target", "code"), [("sm_90", "cubin"), ("gfx942", "hsaco")])
def test_compiles_to_machine_code_without_a_gpu(tmp_path, target, code):
    done = run(tmp_path, "scale", target)
    assert done.returncode == 0, done.stderr
    assert f"'{code}'" in done.stdout


def test_a_broken_kernel_fails(tmp_path):
    done = run(tmp_path, "broken", "sm_90")
    assert done.returncode != 0
    assert "undefined_name" in done.stderr


def test_the_interpreter_and_an_unknown_target_are_refused(tmp_path):
    assert "TRITON_INTERPRET" in run(tmp_path, "scale", "sm_90", TRITON_INTERPRET="1").stderr
    assert "expected one of sm_80" in run(tmp_path, "scale", "sm_70").stderr
