"""Opens a tier's file: the lock on it, the space that it takes, and direct I/O.

A file is reused only if format, slot size, number of slots and description are what its user wants.
Else it is begun afresh: it gets another id, with which none of the records in it agrees. What no
tier has made, or another user owns, is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.os_errors import explain
from kv_swap.tiers.record import PAGE_BYTES
from kv_swap.tiers.region import FIRST_REGION_BYTES, FileDescription, read_region

logger = logging.getLogger(__name__)

_REMOVAL_SECONDS = 5.0
"""How long who removes a file waits for another that is just doing so."""

_RETRY_SECONDS = 0.02

_SPACE_SECONDS = 5.0
"""How long a file waits for space: files of one engine that are divided again are opened at about
the same time, and one may need what another gives back."""


class _NoSpaceError(TierError):
    """The filesystem has too little space now."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is open, locked, and has all its space, for an arena.

    `arena` is uint8 of `(slots, slot_bytes)`. `reason` says why the file was begun afresh; it is
    empty if the file is reused.
    """

    fd: int
    path: Path
    content: FileDescription
    arena: NDArray[np.uint8]
    reason: str
    direct: bool


def open_file(
    path: Path, num_slots: int, arena: NDArray[np.uint8], description: Mapping[str, str]
) -> OpenFile:
    """Open a file for the slots of an arena; make it if there is none.

    The descriptor is the caller's. Raises `TierError`; then a file that was made is gone, and one
    that was there is as it was, or gone if space ran out while it was begun afresh.
    """
    slot_bytes = arena.shape[1]
    if num_slots < 1:
        raise TierError(f"{path} needs at least 1 slot, got {num_slots}")
    wanted = FileDescription(secrets.token_hex(16), slot_bytes, num_slots, dict(description))
    fd = _open_locked(path)
    with _closed_on_error(fd, f"write {path}"):
        content, reason = _prepare(fd, path, wanted)
        direct = _turn_direct(fd, content, arena)
    return OpenFile(fd, path, content, arena, reason, direct)


@contextlib.contextmanager
def _closed_on_error(fd: int, what: str) -> Iterator[None]:
    """Close a descriptor after an error; of the system's raise a `TierError` that says `what`."""
    try:
        yield
    except OSError as error:
        os.close(fd)
        raise TierError(f"cannot {what}: {explain(error)}") from error
    except BaseException:
        os.close(fd)
        raise


def _open_locked(path: Path) -> int:
    """Open a file, or make it, and lock it. Raises `TierError`."""
    while True:
        try:
            # KV reveals the prompts of users: the file is for this user alone.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise TierError(f"cannot open {path}: {explain(error)}") from error
        with _closed_on_error(fd, f"lock {path}"):
            _lock(fd, path)
        with _closed_on_error(fd, f"keep other users out of {path}"):
            _make_private(fd, path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)  # `remove_file` had it meanwhile


def _make_private(fd: int, path: Path) -> None:
    """Let no other user read or write a file; raise `TierError` for one that another user owns."""
    found, user = os.fstat(fd), os.geteuid()
    if found.st_uid != user:
        raise TierError(
            f"{path} belongs to user {found.st_uid}, who could read what users wrote, and this is "
            f"user {user}: remove the file, or name another folder"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        logger.warning("%s could be used by other users, with mode %o: it is 600 now", path, mode)
        os.fchmod(fd, 0o600)


def revoke(fd: int, content: FileDescription) -> None:
    """Give an open file another id on the disk: the next to open it trusts no record in it.

    Blocks until that is durable. Raises `OSError`. A region that was written in part counts as
    damaged, so its file is begun afresh: that has the same effect.
    """
    region = replace(content, file_id=secrets.token_hex(16)).encode()
    page = HostArena(1, FIRST_REGION_BYTES, register=None).view()[0]  # for direct I/O
    page[:] = np.frombuffer(region, np.uint8)
    if os.pwrite(fd, page.data, 0) < FIRST_REGION_BYTES:
        raise OSError(errno.EIO, "only a part could be written")
    os.fsync(fd)


def remove_file(path: Path) -> int:
    """Remove the file of a tier, which is not in use, and return the bytes that this gives back.

    They are free on return, also where another process has removed it at the same time. Raises
    `TierError` for what no tier has made, what is in use, and what may not be removed.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise TierError(f"cannot open {path}: {explain(error)}") from error
    try:
        _lock(fd, path, _REMOVAL_SECONDS)
        found = os.fstat(fd)
        if found.st_nlink == 0:
            return 0
        if found.st_size:  # else it was being removed, or begun, when its process was killed
            read_region(fd, path)
        # A filesystem may give back later what a file has that is unlinked.
        os.ftruncate(fd, 0)
        if not path.is_symlink():  # one to another disk is its user's
            path.unlink()
    except OSError as error:
        raise TierError(f"cannot remove {path}: {explain(error)}") from error
    finally:
        os.close(fd)
    return found.st_blocks * 512


def _lock(fd: int, path: Path, timeout_seconds: float = 0.0) -> None:
    """Lock the file until its descriptor is closed, by the end of the process at the latest."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise TierError(f"{path} is no regular file; name a file in a folder of a disk")
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < deadline:
                time.sleep(_RETRY_SECONDS)
                continue
            raise TierError(
                f"{path} is in use by another engine, or by one whose disk hangs; `fuser {path}` "
                f"names its process: end that, or name another file"
            ) from error
        return


def _prepare(fd: int, path: Path, wanted: FileDescription) -> tuple[FileDescription, str]:
    """Go on with a locked file or begin it afresh; return what it is, and the reason."""
    found: FileDescription | str = "there is no file yet"
    if os.fstat(fd).st_size:
        found = read_region(fd, path)
    reason = found if isinstance(found, str) else found.reason_against(wanted)
    if isinstance(found, FileDescription) and not reason:
        size = os.fstat(fd).st_size
        if size < found.nbytes:
            logger.warning(
                "%s has %d of %d bytes: it was cut, and the data after that is lost",
                path,
                size,
                found.nbytes,
            )
        _reserve(fd, path, found)
        return found, ""
    try:
        _begin(fd, path, wanted)
    except BaseException:
        if os.fstat(fd).st_size == 0:
            path.unlink(missing_ok=True)
        raise
    return wanted, reason


def _begin(fd: int, path: Path, wanted: FileDescription) -> None:
    """Make the file what is wanted, with nothing in it. If that fails later it is empty."""
    region = wanted.encode()
    deadline = time.monotonic() + _SPACE_SECONDS
    while True:
        try:
            _begin_now(fd, path, wanted, region)
        except _NoSpaceError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _begin_now(fd: int, path: Path, wanted: FileDescription, region: bytes) -> None:
    # Asked first: what lies there stays, and the call that fails fills the filesystem for a moment.
    missing_bytes = wanted.nbytes - os.fstat(fd).st_blocks * 512
    system = os.fstatvfs(fd)
    free_bytes = system.f_bavail * system.f_frsize
    if missing_bytes > free_bytes:
        raise _NoSpaceError(
            f"{path} needs {missing_bytes} more bytes for {wanted.num_slots} slots of "
            f"{wanted.slot_bytes}, and its filesystem has {free_bytes} free: free space, or use "
            f"fewer slots"
        )
    try:
        os.ftruncate(fd, min(os.fstat(fd).st_size, wanted.nbytes))
        os.pwrite(fd, region, 0)
        # So that the file is known for a tier's, whenever the machine stops.
        os.fsync(fd)
        _reserve(fd, path, wanted)
    except BaseException:
        os.ftruncate(fd, 0)
        raise


def _reserve(fd: int, path: Path, content: FileDescription) -> None:
    """Have the filesystem give the file all its space now, so that it cannot run out later."""
    try:
        os.posix_fallocate(fd, 0, content.nbytes)
    except OSError as error:
        kind = _NoSpaceError if error.errno == errno.ENOSPC else TierError
        raise kind(
            f"cannot reserve {content.nbytes} bytes for {path}, {content.num_slots} slots of "
            f"{content.slot_bytes} bytes: {explain(error)}"
        ) from error


def _turn_direct(fd: int, content: FileDescription, arena: NDArray[np.uint8]) -> bool:
    """Turn to direct I/O if file and arena allow it, which a record after the last slot shows."""
    page = HostArena(1, PAGE_BYTES, register=None).view()[0].data
    # Slot 0 lies at the beginning of a page, all others like slot 1.
    record = [page, arena[min(1, len(arena) - 1)].data, page[: content.records.pad_bytes]]
    return turn_direct(fd, record, content.offset(content.num_slots))


def turn_direct(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Turn a descriptor to direct I/O if these buffers can be written so; say whether they can.

    Raises `OSError` if they cannot be written at all.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        os.pwritev(fd, buffers, offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        return False
    return True
