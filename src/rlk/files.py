"""Files that are whole or not there: temporary sibling, fsync, rename."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlk.errors import RunFailed


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one."""
    payload = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def to_json(value: Any) -> str:
    """Strict JSON on one line; a number that is not finite becomes null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def append_json(path: Path, value: Any) -> None:
    """Append one object as a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(to_json(value) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a file; a last line that a crash cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def keep_lines_until(path: Path, step: int) -> None:
    """Cut a file of JSON lines back to those whose `step` is at most this one."""
    if path.exists():
        kept = [line for line in read_json_lines(path) if line["step"] <= step]
        write_atomic(path, "".join(to_json(line) + "\n" for line in kept))


@contextmanager
def disk_errors_named(remedy: str | Callable[[], str]) -> Iterator[None]:
    """Turn the disk's refusal into one line that says what to do; a callable is asked when it happens."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO):
            raise
        where = f" at {error.filename}" if error.filename else ""
        what_to_do = remedy if isinstance(remedy, str) else remedy()
        raise RunFailed(f"cannot write{where}: {os.strerror(error.errno)}; {what_to_do}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
