"""The two ways in which a command ends badly, and the exit codes that say so."""

from __future__ import annotations

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


class InputError(ValueError):
    """What the user gave cannot be used; nothing was started, nothing is half-written."""


class RunFailed(RuntimeError):
    """A run stopped; what it had finished is on disk, and the message says how to go on."""


class Interrupted(RuntimeError):
    """The user stopped the run; it can be resumed."""
