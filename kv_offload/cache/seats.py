"""The seats of a host pool: a folder for each engine, and the locks that end with a process."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kv_swap.locks import lock

SEAT = re.compile(r"seat-(\d+)")

LOCK = "lock"
"""Locked by the engine that has the seat."""

READER = "reader"
"""Locked by the process that sets and clears the leases of a seat's engine."""


def find_seats(pool: Path) -> list[Path]:
    """Return the seats of a pool, by number. Raises `OSError`."""
    return sorted((one for one in pool.iterdir() if SEAT.fullmatch(one.name)), key=seat_number)


def seat_number(seat: Path) -> int:
    """Return the number in the name of a seat."""
    return int(seat.name.removeprefix("seat-"))


def lock_file(path: Path, *, creates: bool = True) -> int | None:
    """Lock a file until the returned descriptor is closed, or this process ends.

    Returns None if another process has the lock. Raises `OSError`, also if there is no file and
    `creates` is False.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if creates else 0)
    fd = os.open(path, flags, 0o600)
    if lock(fd):
        return fd
    os.close(fd)
    return None
