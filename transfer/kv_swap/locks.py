"""File locks that end with this process, even if a forked child outlives it.

A child inherits its parent's open files and mappings, and with them the parent's locks: while a
child such as a data loader lives, the next engine would find its folder in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from pathlib import Path

from kv_swap.memory.mapping import map_memory

_RETRY_SECONDS = 0.02

_OPEN: dict[int, tuple[int, int]] = {}
"""Device and inode of each file, by descriptor, which may since be closed or reused."""


def lock(fd: int, timeout_seconds: float = 0.0) -> bool:
    """Lock an open file until it is closed or this process ends; False if another process has it.

    Blocks until the timeout: an engine that is ending closes its files after its ranks have ended.
    Raises `OSError`.
    """
    keep_from_children(fd)
    until = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_RETRY_SECONDS)
        else:
            return True


def keep_from_children(fd: int) -> None:
    """Make forked children drop an open file and the mappings of it that they inherit."""
    if (file := _file_of(fd)) is not None:
        _OPEN[fd] = file


def _let_go_in_child() -> None:
    """Replace descriptors by `/dev/null`, and mappings by zeros.

    This keeps their numbers and addresses in use, so the child's copies of the owners can close
    them. Looks descriptors up in the system, because Python's `mmap` has its own copies.
    """
    kept = {file for fd, file in _OPEN.items() if _file_of(fd) == file}
    if not kept:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if _file_of(fd) in kept:
            os.dup2(null, fd, inheritable=False)
    os.close(null)
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, _, device, inode = line.split()[:5]
        major, minor = (int(number, 16) for number in device.split(":"))
        if (os.makedev(major, minor), int(inode)) in kept:
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            map_memory(end - start, mmap.PROT_READ | mmap.PROT_WRITE, None, start)


def _file_of(fd: int) -> tuple[int, int] | None:
    """Return device and inode of an open file; None if it is closed."""
    with contextlib.suppress(OSError):
        found = os.fstat(fd)
        return found.st_dev, found.st_ino
    return None


os.register_at_fork(after_in_child=_let_go_in_child)
