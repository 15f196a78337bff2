"""Reads files that users name, who may name the wrong one."""

from __future__ import annotations

import stat
from pathlib import Path


def read_small(path: Path, most_bytes: int, what: str) -> bytes:
    """Return what is in a regular file of `most_bytes` at most, as `what` has: "a config.json".

    Raises `OSError` if it cannot be read, and `ValueError` if it is no such file.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would block who reads it, a device may never end
        raise ValueError("it is not a regular file")
    if found.st_size > most_bytes:
        raise ValueError(f"it has {found.st_size:,} bytes, but {what} has at most {most_bytes:,}")
    return path.read_bytes()
