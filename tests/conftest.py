"""Fixtures of the tests that cross packages: the real command line, in this process and in others."""

from __future__ import annotations

import pytest


@pytest.fixture
def rlk(capsys, monkeypatch, tmp_path):
    """Run the command line in this process and in a fresh folder: (exit code, stdout, stderr)."""
    from rlk.cli import run

    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = run([str(part) for part in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
