"""Arenas of other processes, mapped to be read; who removes one can find out who reads it.

A removed arena keeps its memory as long as a process has it mapped. So a process that maps an arena
locks a byte of the arena's folder, the one with the number of the process, until it has unmapped
it. The kernel ends the lock with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from pathlib import Path

from kv_swap.errors import PinnedMemoryError
from kv_swap.locks import keep_from_children
from kv_swap.memory.mapping import (
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    PROT_NONE,
    Mapping,
    map_memory,
    whole_pages,
)

logger = logging.getLogger(__name__)

LET_GO_SECONDS = 120.0
"""How long a start that lacks memory waits for processes that read removed arenas. They let go in
some seconds, but unlock page-locked memory piece by piece."""

_WAIT_SECONDS = 0.1

_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of 64-bit Linux: kind, whence, start, length, and 0."""


def find_readers(folder: Path) -> list[int]:
    """Return the processes that read arenas of a folder, by their numbers in their containers."""
    found: list[int] = []
    parts = [(0, 0)]  # start and length, to the end if that is 0
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        while parts:
            start, length = parts.pop()
            answer = _control(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, length)
            kind, _, locked, locked_bytes, _ = answer
            if kind == fcntl.F_UNLCK:
                continue
            if locked_bytes == 1:  # other programs may lock more
                found.append(locked)
            # The answer may be any of the locks.
            if locked > start:
                parts.append((start, locked - start))
            after, end = locked + locked_bytes, start + length
            if locked_bytes and not (length and after >= end):
                parts.append((after, end - after if length else 0))
    finally:
        os.close(fd)
    return sorted(found)


def _control(fd: int, command: int, kind: int, start: int, length: int) -> tuple[int, ...]:
    return _FLOCK.unpack(fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)))


class Readers:
    """The processes that read arenas of a folder, whose removed arenas still have their memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: list[int] = []
        self._until: float | None = None

    def wait(self, lack: str) -> bool:
        """Wait a moment for them to let go; False if there are none, or if it takes too long.

        `lack` says for the log what is lacking. Raises `OSError`.
        """
        self._readers = find_readers(self._folder)
        if self._until is None:
            if not self._readers:
                return False
            self._until = time.monotonic() + LET_GO_SECONDS
            logger.warning("%s%s; waiting up to %.0f s", lack, self.describe(), LET_GO_SECONDS)
        time.sleep(_WAIT_SECONDS)  # the lock of a process that ends may end before its memory
        return bool(self._readers) and time.monotonic() < self._until

    def describe(self) -> str:
        """Describe who may have removed arenas mapped, to be added to a sentence on the lack."""
        if not self._readers:
            return ""
        return f"; processes {self._readers} read arenas of {self._folder}, also removed ones"


class ReadMapping(Mapping):
    """The first `nbytes` of an arena in a file that another process writes, at reserved addresses.

    With `writable`, the kernel would let this process write. Raises `OSError`, and
    `PinnedMemoryError` also if the file is shorter.
    """

    def __init__(self, address: int, nbytes: int, path: Path, *, writable: bool) -> None:
        flags = os.O_RDWR if writable else os.O_RDONLY
        if not writable:
            self._protection = mmap.PROT_READ
        self._advice = MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ
        with contextlib.ExitStack() as stack:
            folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            keep_from_children(folder)
            _control(folder, fcntl.F_OFD_SETLK, fcntl.F_RDLCK, os.getpid(), 1)
            self._fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
            stack.callback(os.close, self._fd)
            keep_from_children(self._fd)
            size = os.fstat(self._fd).st_size
            if size < whole_pages(nbytes):
                raise PinnedMemoryError(f"it has {size} bytes, and {nbytes} are wanted")
            super().__init__(nbytes, fd=self._fd, address=address)
            self._held = stack.pop_all()

    def populate(self, offset: int, nbytes: int) -> None:
        """Fault the pages of a range in; releases the GIL.

        Raises `OSError` if the file lacks some, which an access would allocate. Pages that were
        swapped out are not lacking. Kernels before Linux 5.14 leave it to the first access.
        """
        end, allocated = offset + nbytes, os.lseek(self._fd, offset, os.SEEK_HOLE)
        if allocated < end:
            raise OSError(
                errno.ENODATA, f"its owner has allocated only the first {allocated} of {end} bytes"
            )
        self._fault_in(offset, nbytes, self._advice)

    def describe(self) -> str:
        """Describe whose pages they are, for the log."""
        return "of another process"

    def close(self) -> None:
        """Unmap the file; the addresses stay reserved. See `Mapping.close`."""
        map_memory(self.nbytes, PROT_NONE, None, self.address)
        self._held.close()
