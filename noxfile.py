"""Every check of the project, per package and per backend. `nox -l` lists them; `nox -t ops`, `nox -t rocm` select."""

from __future__ import annotations

import datetime
import os
import re
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "layers", "wheels"]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
PACKAGES = ("ops", "weightsync", "rollout", "score", "train")
SIBLINGS = {
    "ops": (),
    "weightsync": (),
    "rollout": ("ops", "weightsync"),
    "score": ("ops", "weightsync", "rollout"),
    "train": ("ops", "weightsync", "rollout"),
}
BACKENDS = ("cpu", "cuda", "rocm")
PYTHONS = ("3.11", "3.12", "3.13")
# What a package's own tests need beside its declared dependencies: independent oracles and the real models they run.
TEST_EXTRAS = {
    "ops": (),
    "weightsync": ("fast",),
    "rollout": ("transformers", "gguf"),
    "score": (),
    "train": ("transformers",),
}
TEST_REQUIREMENTS = ("pytest", "pytest-timeout", "hypothesis", "numpy", "transformers", "safetensors")
HEAVY = ("vllm", "deepspeed", "ray", "transformers", "flashinfer", "flash_attn", "triton")
SOURCES = ("src", "packages", "tests", "benchmarks", "examples", "noxfile.py")
# The extra vllm and torch need different versions of it, and a constraint holds for every extra at once.
UNPINNED = ("cuda-bindings",)

PRESENCE = """
import sys, torch
hip = torch.version.hip is not None
wanted = sys.argv[1]
found = ("rocm" if hip else "cuda") if torch.cuda.is_available() else "cpu"
if wanted != "cpu" and found != wanted:
    sys.exit(f"backend {wanted!r} was asked for; this machine offers {found!r} (torch {torch.__version__})")
"""


def root_config() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def constraints(session: nox.Session) -> str:
    """A constraints file with the versions that the root pyproject.toml pins."""
    path = Path(session.create_tmp()) / "constraints.txt"
    path.write_text("\n".join(root_config()["tool"]["uv"]["constraint-dependencies"]) + "\n")
    return str(path)


def sync(session: nox.Session) -> None:
    """The whole workspace with its dev group in the session's own environment, as `uv sync` gives it to a developer."""
    session.run_install("uv", "sync", "--quiet", env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location})


def install_editable(session: nox.Session, package: str, *extras: str, resolution: str = "highest") -> None:
    """One package with its siblings from this tree, and what its tests need."""
    own = f"packages/rlk-{package}" + (f"[{','.join(extras)}]" if extras else "")
    arguments = ["-e", own]
    for sibling in SIBLINGS[package]:
        arguments += ["-e", f"packages/rlk-{sibling}"]
    pins = [] if resolution != "highest" else ["-c", constraints(session)]
    session.install(*arguments, *TEST_REQUIREMENTS, *pins, f"--resolution={resolution}")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    session.install("ruff", "-c", constraints(session))
    present = [source for source in SOURCES if (ROOT / source).exists()]
    session.run("ruff", "check", *present)
    session.run("ruff", "format", "--check", *present)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over the six packages."""
    sync(session)
    session.run("mypy", "src", *(f"packages/rlk-{package}/src" for package in PACKAGES))


@nox.session
def layers(session: nox.Session) -> None:
    """The import-linter contract: rlk > train | score > rollout > ops | weightsync."""
    session.install("import-linter", "-c", constraints(session))
    paths = ["src", *(f"packages/rlk-{package}/src" for package in PACKAGES)]
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in paths)})


MATRIX = [
    nox.param(package, backend, id=f"{package}-{backend}", tags=[package, backend])
    for package in PACKAGES
    for backend in BACKENDS
]


@nox.session(python=PYTHONS)
@nox.parametrize(("package", "backend"), MATRIX)
def tests(session: nox.Session, package: str, backend: str) -> None:
    """One package's own tests on one Python and one backend; a backend that is absent fails, it does not skip.

    A ROCm build of torch is on no default index: `UV_TORCH_BACKEND=auto nox -t rocm`.
    """
    declared = tomllib.loads((ROOT / f"packages/rlk-{package}/pyproject.toml").read_text())["project"]
    offered = declared.get("optional-dependencies", {})
    extras = [*TEST_EXTRAS[package], *([backend] if backend in offered else [])]
    install_editable(session, package, *extras)
    session.run("python", "-c", PRESENCE, backend)
    session.run("pytest", f"packages/rlk-{package}", *session.posargs, env={"RLK_TEST_BACKEND": backend})


@nox.session(tags=["full"])
@nox.parametrize("package", [nox.param(package, id=package) for package in PACKAGES])
def minimums(session: nox.Session, package: str) -> None:
    """One package's tests on the lowest versions that it declares."""
    install_editable(session, package, *TEST_EXTRAS[package], resolution="lowest-direct")
    session.run("pytest", f"packages/rlk-{package}", *session.posargs)


@nox.session(tags=["full"])
def slow(session: nox.Session) -> None:
    """The tests marked slow, which the everyday test command leaves out."""
    sync(session)
    session.run("pytest", "-m", "slow", "--override-ini", "addopts=-ra --import-mode=importlib", *session.posargs)


@nox.session
def compile(session: nox.Session) -> None:
    """Compile every kernel source for every architecture with no GPU; `-- --all` takes every variant."""
    kernels = sorted(path for path in (ROOT / "packages").rglob("*.cu"))
    kernels += sorted(p for p in (ROOT / "packages").rglob("src/**/*.py") if "@triton.jit" in p.read_text())
    if not kernels:
        session.skip("this version ships no kernel source (no .cu file, no @triton.jit function)")
    sync(session)
    session.run("python", "-m", "rlk_ops.testing.compile", *session.posargs)


IMPORT_ALONE = """
import importlib, pkgutil, sys
name, heavy = sys.argv[1], sys.argv[2].split(",")
package = importlib.import_module(name)
modules = [m.name for m in pkgutil.walk_packages(package.__path__, name + ".") if not m.name.endswith("__main__")]
for module in modules:
    if not module.endswith("pytest_plugin"):  # pytest itself imports that one
        importlib.import_module(module)
loaded = [m for m in heavy if m in sys.modules]
assert not loaded, f"importing {name} imported {loaded}"
print(f"{name}: {len(modules) + 1} modules import alone")
"""


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every package; install each alone, then all together, from the built wheels only; import every module."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    session.run("uv", "build", "--quiet", "--all-packages", "--wheel", "--clear", "-o", str(dist), external=True)
    built = sorted(dist.glob("*.whl"))
    names = [f"rlk_{package}" for package in PACKAGES] + ["rlk"]
    if len(built) != len(names) or any(not wheel.name.endswith("-py3-none-any.whl") for wheel in built):
        session.error(f"expected {len(names)} pure-Python wheels, found {[wheel.name for wheel in built]}")
    for name in names:
        session.run("uv", "venv", "--quiet", "--clear", str(dist / name), external=True)
        install_wheels(session, dist, dist / name, [name])
    install_wheels(session, dist, Path(session.virtualenv.location), names)


def install_wheels(session: nox.Session, dist: Path, environment: Path, names: list[str]) -> None:
    """Install packages into an environment from `dist` (their siblings too) and import them with nothing else."""
    python = str(environment / "bin" / "python")
    wanted = [str(next(dist.glob(f"{name}-*.whl"))) for name in names]
    pins = ["-c", constraints(session), "--find-links", str(dist)]
    session.run("uv", "pip", "install", "--quiet", "--python", python, *wanted, *pins, external=True)
    session.run("uv", "pip", "check", "--python", python, external=True)
    for name in names:
        session.run(python, "-I", "-c", IMPORT_ALONE, name, ",".join(HEAVY), external=True)


@nox.session
@nox.parametrize("backend", [nox.param(backend, id=backend, tags=["bench"]) for backend in BACKENDS])
def bench(session: nox.Session, backend: str) -> None:
    """Run every script under benchmarks/ on one backend; each writes its JSON under benchmarks/results/."""
    sync(session)
    session.run("python", "-c", PRESENCE, backend)
    for script in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        session.run("python", str(script), "--device", backend, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """API documentation of the six packages as HTML under dist/docs."""
    sync(session)
    session.install("pdoc")
    modules = [f"rlk_{package}" for package in PACKAGES]
    session.run("pdoc", "--docformat", "google", "-o", "dist/docs", "rlk", *modules)


@nox.session
def repin(session: nox.Session) -> None:
    """Resolve anew without pins, run the tests, and write the versions that passed as constraint-dependencies."""
    path = ROOT / "pyproject.toml"
    before = path.read_text()
    path.write_text(replace_pins(before, []))
    try:
        session.run("uv", "lock", "--quiet", "--upgrade", external=True)
        exported = session.run(
            "uv", "export", "--quiet", "--no-hashes", "--no-emit-workspace", "--no-annotate", "--no-header",
            external=True, silent=True,
        )  # fmt: skip
        lines = [line for line in (exported or "").splitlines() if "==" in line]
        pins = [pin(line) for line in lines if line.partition("==")[0] not in UNPINNED]
        path.write_text(replace_pins(before, pins))
        sync(session)
        session.run("pytest", *session.posargs)
    except BaseException:
        path.write_text(before)
        raise


def pin(line: str) -> str:
    """An exported requirement without the platform that `[tool.uv] environments` states already."""
    requirement, _, marker = line.partition(" ; ")
    kept = [part for part in marker.split(" and ") if part.startswith("python_")]
    return f"{requirement} ; {' and '.join(kept)}" if kept else requirement


def replace_pins(text: str, pins: list[str]) -> str:
    block = "constraint-dependencies = [\n" + "".join(f'    "{pin}",\n' for pin in pins) + "]"
    return re.sub(r"constraint-dependencies = \[[^\]]*\]", lambda _: block, text, count=1)


@nox.session
def release(session: nox.Session) -> None:
    """Release one package: `nox -s release -- ops minor` bumps, dates the changelog, commits, tags and builds."""
    if len(session.posargs) != 2 or session.posargs[0] not in PACKAGES:
        session.error(f"usage: nox -s release -- {{{'|'.join(PACKAGES)}}} {{major|minor|patch}}")
    package, bump = session.posargs
    if session.run("git", "status", "--porcelain", external=True, silent=True):
        session.error("the working tree has uncommitted changes; commit them first")
    name, folder = f"rlk-{package}", ROOT / f"packages/rlk-{package}"
    changelog = folder / "CHANGELOG.md"
    session.run("uv", "version", "--quiet", "--frozen", "--package", name, "--bump", bump, external=True)
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    text, dated = changelog.read_text(), f"## {version} ({datetime.date.today().isoformat()})"
    if not re.search(r"^## .*unreleased", text, re.M):
        session.error(f"{changelog.relative_to(ROOT)} has no section marked unreleased")
    changelog.write_text(re.sub(r"^## .*unreleased.*$", dated, text, count=1, flags=re.M))
    session.run("git", "commit", "--quiet", "-am", f"Release {name} {version}", external=True)
    session.run("git", "tag", f"{name}-v{version}", external=True)
    session.run("uv", "build", "--package", name, "--no-sources", external=True)
