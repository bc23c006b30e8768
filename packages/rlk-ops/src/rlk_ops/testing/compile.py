"""Compile Triton kernels for every architecture with no GPU: a broken kernel fails here, before it meets a machine.

A module of `rlk_ops.ops` that holds kernels offers them through a function `compile_variants()`, the representative
ones first.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import rlk_ops.ops

# name -> (Triton backend, architecture, threads of a warp)
TARGETS: Mapping[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
EVERYDAY_VARIANTS = 2


@dataclass(frozen=True)
class KernelVariant:
    """One specialisation of a Triton kernel.

    Attributes:
        name: unique within its module.
        kernel: the `@triton.jit` function.
        signature: parameter name to Triton type ("*fp32", "i64", "constexpr").
        constexprs: values of the constexpr parameters.
        options: compiler options (num_warps, num_stages, ...).
        targets: the architectures it is meant for.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = tuple(TARGETS)


def compile_variant(variant: KernelVariant, target: str) -> Any:
    """The compiled kernel; its `asm` holds "cubin" on NVIDIA and "hsaco" on AMD targets.

    Raises:
        ValueError: an unknown target.
        RuntimeError: Triton's interpreter is on, which replaces the compiler.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r}: expected one of {', '.join(TARGETS)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 replaces the compiler; unset it to compile")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=variant.kernel, signature=dict(variant.signature), constexprs=dict(variant.constexprs))
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=dict(variant.options))


def find_variants(everything: bool) -> Iterator[tuple[str, KernelVariant]]:
    """(module name, variant) of every kernel under `rlk_ops.ops`; at most two a module unless `everything`."""
    for module_info in pkgutil.walk_packages(rlk_ops.ops.__path__, "rlk_ops.ops."):
        module = import_module(module_info.name)
        if hasattr(module, "compile_variants"):
            variants = list(module.compile_variants())
            for variant in variants if everything else variants[:EVERYDAY_VARIANTS]:
                yield module_info.name, variant


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and print a line per kernel and target; 0 when all compile."""
    parser = argparse.ArgumentParser(prog="python -m rlk_ops.testing.compile", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every variant, not two of each module")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: every target")
    options = parser.parse_args(argv)
    failures = compiled = 0
    for module, variant in find_variants(options.all):
        for target in options.target or variant.targets:
            started = time.perf_counter()
            try:
                compile_variant(variant, target)
                verdict, compiled = "ok", compiled + 1
            except Exception as error:
                verdict, failures = f"FAILED {type(error).__name__}: {error}", failures + 1
            print(f"{module} {variant.name} {target} {time.perf_counter() - started:.1f} s {verdict}", flush=True)
    print(f"{compiled} kernels compiled, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
