"""Arenas in files of a memory filesystem: they outlive their process, and its successor maps them.

FOLDER/rank-0.KIND.TOKEN     all slots of a rank, from the first byte on

`KIND` identifies everything that determines the layout of the bytes, and `TOKEN` is random for each
new file. So a name identifies one arena forever: a process that recorded it finds that arena or
none.

A file is locked as long as a process has it open *or mapped*: the lock belongs to the open file,
which the kernel closes after its last mapping is gone, however the process ends. So a process that
gets the lock knows that no other process writes to the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from pathlib import Path

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.mapping import whole_pages
from kv_swap.memory.reading import Readers
from kv_swap.memory.registration import MemoryRoom
from kv_swap.memory.shared import SharedMemory


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user may enter, or check that an existing one is private.

    Raises `PinnedMemoryError` for a link, or for a folder that another user could have written to.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        found = path.lstat()
    except OSError as error:
        raise PinnedMemoryError(
            f"cannot keep host memory in {path}: {error.strerror}; make the folder above it, for "
            f"user {os.geteuid()}, or name another"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PinnedMemoryError(
            f"cannot keep host memory in {path}: it must be a folder with mode 0700 of user "
            f"{os.geteuid()}, and is {stat.filemode(found.st_mode)} of user {found.st_uid}: remove "
            f"it, or name another"
        )


def find_arenas(folder: Path) -> dict[str, int]:
    """Return the bytes of memory that each arena in a folder takes, by name."""
    arenas = {}
    for path in sorted(folder.glob("rank-*.*.*")):
        with contextlib.suppress(FileNotFoundError):  # a starting engine removes other arenas
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                arenas[path.name] = found.st_blocks * 512
    return arenas


def rank_of(name: str) -> int:
    """Return the rank in the name of an arena; -1 if there is none."""
    number = name.partition(".")[0].removeprefix("rank-")
    return int(number) if number.isdecimal() else -1


class ArenaFiles:
    """One rank's arenas in its engine's folder, which no other engine is using.

    With `reserve`, creating a file allocates all memory, which `room`, if given, must have: the
    kernel kills a process that touches memory that the filesystem no longer has. Otherwise memory
    is allocated when it is page-locked, where a shortage is only an error.
    """

    def __init__(
        self, folder: Path, rank: int, kind: str, room: MemoryRoom | None = None, *, reserve: bool
    ) -> None:
        self.folder, self._rank, self._kind = folder, rank, kind
        self._room, self._reserve = room, reserve

    def create(self, nbytes: int) -> SharedMemory:
        """Open the arena that a predecessor left, or create one; remove this rank's other arenas.

        If memory is short, waits for processes that still read removed arenas. Raises
        `PinnedMemoryError` if there is too little.
        """
        opened: tuple[str, int] | None = None
        for name in self._own():
            if opened is None and (fd := self._adopt(name, nbytes)) is not None:
                opened = name, fd
        self._remove_others("" if opened is None else opened[0])
        is_new = opened is None
        if opened is None:
            name = f"rank-{self._rank}.{self._kind}.{secrets.token_hex(8)}"
            opened = name, self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        name, fd = opened
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)  # shared, because peers also lock it
            os.ftruncate(fd, whole_pages(nbytes))
            self._take_memory(fd, nbytes)
        except OSError as error:
            os.close(fd)
            if is_new:
                (self.folder / name).unlink(missing_ok=True)
            raise PinnedMemoryError(
                f"cannot keep an arena of {nbytes} bytes in {self.folder}: {error.strerror}; mount "
                f"it larger (in a container --shm-size, in Kubernetes an emptyDir with medium "
                f"Memory), remove unused files, free memory, or use a smaller pool"
            ) from error
        return SharedMemory(fd, nbytes, name)

    def attach(self, name: str, nbytes: int) -> SharedMemory:
        """Open an arena that another rank has created. Raises `PinnedMemoryError`."""
        fd = self._open(name, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise PinnedMemoryError(f"cannot share {self.folder / name}: {error}") from error
        self._remove_others(name)
        return SharedMemory(fd, nbytes, name)

    def _own(self) -> list[str]:
        return [name for name in find_arenas(self.folder) if rank_of(name) == self._rank]

    def _remove_others(self, kept: str) -> None:
        """Remove all but one of this rank's arenas; processes that map one keep its memory."""
        for name in self._own():
            if name != kept:
                (self.folder / name).unlink(missing_ok=True)

    def _adopt(self, name: str, nbytes: int) -> int | None:
        """Return a descriptor of an unused arena with the same slots; None if there is none."""
        if not name.startswith(f"rank-{self._rank}.{self._kind}."):
            return None
        try:
            fd = self._open(name, os.O_RDWR)
        except PinnedMemoryError:
            return None
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and found.st_size == whole_pages(nbytes):
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
        os.close(fd)
        return None

    def _take_memory(self, fd: int, nbytes: int) -> None:
        """Check that the memory that the file still needs is available, and reserve it."""
        missing = whole_pages(nbytes) - os.fstat(fd).st_blocks * 512
        readers, waits = Readers(self.folder), True
        while lack := self._describe_lack(fd, missing):
            if not waits:
                raise OSError(errno.ENOSPC, lack + readers.describe())
            waits = readers.wait(lack)
        if self._reserve and missing > 0:
            os.posix_fallocate(fd, 0, whole_pages(nbytes))

    def _describe_lack(self, fd: int, missing: int) -> str:
        """Describe a shortage of memory for `missing` bytes; empty if there is enough."""
        room = os.fstatvfs(fd)
        left = room.f_bavail * room.f_frsize
        if missing > left:
            return f"the filesystem has {left} bytes left, and {missing} are missing"
        if self._room is not None and missing > 0:
            spare_bytes, figures = self._room.spare_bytes(missing)
            return figures if spare_bytes < 0 else ""
        return ""

    def _open(self, name: str, flags: int) -> int:
        path = self.folder / name
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PinnedMemoryError(f"cannot open {path}: {error.strerror}") from error
