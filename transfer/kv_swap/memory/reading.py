"""Maps arenas of other processes for reading. A process that removes an arena can find its readers.

A removed arena keeps its memory as long as a process has it mapped. So a process that maps an arena
locks one byte of the arena's folder, at the offset of its process number, until it has unmapped the
arena. The kernel releases the lock when the process ends.
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
"""Seconds that a start waits for readers of removed arenas if memory is short. They let go within
seconds, but unlock page-locked memory piece by piece."""

_WAIT_SECONDS = 0.1

_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock` of 64-bit Linux: kind, whence, start, length, and 0."""


def find_readers(folder: Path) -> list[int]:
    """Return the numbers, in their containers, of the processes that read a folder's arenas."""
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
            # The kernel reports any one of the locks.
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
    """The processes that read arenas of a folder, and may keep the memory of removed ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._readers: list[int] = []
        self._until: float | None = None

    def wait(self, lack: str) -> bool:
        """Wait a moment for readers to let go; False if there are none, or if it takes too long.

        `lack` describes the shortage for the log. Raises `OSError`.
        """
        self._readers = find_readers(self._folder)
        if self._until is None:
            if not self._readers:
                return False
            self._until = time.monotonic() + LET_GO_SECONDS
            logger.warning("%s%s; waiting up to %.0f s", lack, self.describe(), LET_GO_SECONDS)
        time.sleep(_WAIT_SECONDS)  # a process that ends may release its lock before its memory
        return bool(self._readers) and time.monotonic() < self._until

    def describe(self) -> str:
        """Describe, to complete a message, which processes may have removed arenas mapped."""
        if not self._readers:
            return ""
        return f"; processes {self._readers} read arenas of {self._folder}, also removed ones"


class ReadMapping(Mapping):
    """The first `nbytes` of an arena in a file that another process writes, at reserved addresses.

    With `writable`, the mapping allows writes. Raises `OSError`, and `PinnedMemoryError` also if
    the file is shorter.
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
        """Fault in the pages of a range; releases the GIL.

        Raises `OSError` if pages are not allocated in the file: an access would allocate them.
        Swapped-out pages count as allocated. Before Linux 5.14, the first access faults pages in.
        """
        end, allocated = offset + nbytes, os.lseek(self._fd, offset, os.SEEK_HOLE)
        if allocated < end:
            raise OSError(
                errno.ENODATA, f"its owner has allocated only the first {allocated} of {end} bytes"
            )
        self._fault_in(offset, nbytes, self._advice)

    def describe(self) -> str:
        """Describe where the pages come from, for the log."""
        return "of another process"

    def close(self) -> None:
        """Unmap the file; the addresses stay reserved. See `Mapping.close`."""
        map_memory(self.nbytes, PROT_NONE, None, self.address)
        self._held.close()
