"""How kvarto writes a file: whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from kvarto.errors import UsageError


def write_whole(path: Path, data: bytes) -> None:
    """Write under another name, and rename, so that no reader sees half of it. Raises UsageError if that cannot be done."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise UsageError("output", "a file that can be written", f"{path} ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Try the folder of a file that is to be written, so that long work does not end at a closed door. Raises UsageError."""
    if path.is_dir():
        raise UsageError("output", "a file that can be written", f"{path} (a folder)")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise UsageError("output", "a file that can be written", f"{path} ({error.strerror})") from error
