"""The command line of the gold path: `python -m rlk_ops validate --op logp`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from rlk_ops.device import DeviceUnavailable
from rlk_ops.registry import Unsupported, find_op, ops
from rlk_ops.testing.harness import DTYPES, ERRORS, RELATIONS, validate
from rlk_ops.testing.report import Report
from rlk_ops.testing.tolerance import dtype_name

PASSED, FAILED, BAD_USAGE = 0, 1, 2
SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
EXAMPLES = """examples:
  %(prog)s --op logp
  %(prog)s --op linear_logp --impl chunked --relation gradients --dtype bf16
  %(prog)s --op attention --device cuda --json report.json
  %(prog)s --list
"""


class BadUsage(ValueError):
    """Arguments that make no call."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadUsage(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 where everything passed, 1 where something failed, 2 for bad usage (one line on stderr)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="rlk-ops", description="Operators for RL post-training: validate and explain them.")
    commands = parser.add_subparsers(dest="command", metavar="{validate,explain}", required=True)
    checking = commands.add_parser(
        "validate",
        help="hold implementations against the gold path",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_validate(checking)
    explaining = commands.add_parser("explain", help="say which implementation each operator takes, and why not others")
    explaining.add_argument("--op", action="append", help="an operator; may be repeated (default: all)")
    explaining.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, rocm (default: cpu)")
    try:
        options = parser.parse_args(arguments)
        return _validate(options) if options.command == "validate" else _explain(options)
    except (BadUsage, ValueError, DeviceUnavailable, OSError) as error:
        print(f"rlk-ops: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_USAGE


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", action="append", help="an operator; may be repeated (default: all)")
    parser.add_argument("--impl", action="append", help="an implementation; may be repeated (default: all)")
    parser.add_argument("--relation", action="append", help=f"{', '.join((*RELATIONS, ERRORS))} (default: all)")
    parser.add_argument("--case", action="append", help="a case of the operator (default: all but the bench's)")
    parser.add_argument("--dtype", action="append", help=f"{', '.join(SHORT)} (default: all)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, rocm (default: the current one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports there as a JSON list")
    parser.add_argument("--list", action="store_true", help="list operators, implementations and cases")


def _validate(options: argparse.Namespace) -> int:
    names = options.op or list(ops())
    if options.list:
        for name in names:
            operator = find_op(name)
            print(f"{name}: {', '.join(operator.implementations)}")
            print(f"    cases: {', '.join(case.name for case in operator.list_cases())}")
        return PASSED
    if len(names) != 1 and (options.impl or options.case):
        raise BadUsage("--impl and --case belong to one operator; name it with --op")
    dtypes = [_dtype(name) for name in options.dtype] if options.dtype else None
    reports = []
    for name in names:
        for implementation in options.impl or find_op(name).implementations:
            report = validate(
                name, implementation, dtypes=dtypes, relations=options.relation, cases=options.case,
                device=options.device,
            )  # fmt: skip
            print(report, flush=True)
            reports.append(report)
    if options.json is not None:
        _write(options.json, reports)
    return PASSED if all(report.passed for report in reports) else FAILED


def _explain(options: argparse.Namespace) -> int:
    from rlk_ops.device import Device
    from rlk_ops.testing.trial import typical_call

    device = Device.parse(options.device)
    for name in options.op or list(ops()):
        operator = find_op(name)
        reasons = operator.explain(**typical_call(operator, device))
        try:
            chosen = operator.selected(**typical_call(operator, device))
        except Unsupported:
            chosen = "none"
        refusals = "; ".join(f"{other}: {why}" for other, why in reasons.items() if why)
        print(f"{name}: {chosen}" + (f"  (not {refusals})" if refusals else ""))
    return PASSED


def _dtype(name: str) -> torch.dtype:
    for dtype in DTYPES:
        if SHORT.get(name, name) == dtype_name(dtype):
            return dtype
    raise BadUsage(f"--dtype {name!r}: expected one of {', '.join(SHORT)}")


def _write(path: Path, reports: Sequence[Report]) -> None:
    text = "[" + ",\n".join(report.to_json() for report in reports) + "]\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
