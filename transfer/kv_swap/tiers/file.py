"""Opens a tier's file: locks it, reserves its space, and sets up direct I/O.

A file is reused only if its format, slot size, number of slots and description are as requested.
Otherwise it is started over: it gets a new id, which none of its records match. A file that was not
created by a tier, or that belongs to another user, is left alone.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kv_swap.errors import TierError, explain
from kv_swap.locks import lock
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.record import FORMAT, PAGE_BYTES
from kv_swap.tiers.region import FIRST_REGION_BYTES, FileDescription, read_region

logger = logging.getLogger(__name__)

_REMOVAL_SECONDS = 5.0
"""Seconds that removing a file waits for another process that is removing it."""

_RETRY_SECONDS = 0.02

_SPACE_SECONDS = 5.0
"""Seconds that a file waits for space. If an engine divides its space differently, its files are
opened at about the same time, and one may need space that another one frees."""


class _NoSpaceError(TierError):
    """The filesystem has too little space now."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file for an arena that is open, locked, and has all its space reserved.

    `arena` is uint8 of shape `(slots, slot_bytes)`. `reason` says why the file was started over,
    and is empty if it is reused.
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
    """Open a file for the slots of an arena; create it if it does not exist.

    The caller owns the descriptor. On `TierError`, a newly created file is removed, and an existing
    one is unchanged, or removed if space ran out while it was started over.
    """
    slot_bytes = arena.shape[1]
    if num_slots < 1:
        raise TierError(f"{path} needs at least 1 slot, got {num_slots}")
    wanted = FileDescription(
        secrets.token_hex(16), slot_bytes, num_slots, dict(description), FORMAT
    )
    fd = _open_locked(path)
    with _closed_on_error(fd, f"write {path}"):
        content, reason = _prepare(fd, path, wanted)
        direct = _turn_direct(fd, content, arena)
    return OpenFile(fd, path, content, arena, reason, direct)


@contextlib.contextmanager
def _closed_on_error(fd: int, what: str) -> Iterator[None]:
    """Close a descriptor after an error; turn an `OSError` into a `TierError` that names `what`."""
    try:
        yield
    except OSError as error:
        os.close(fd)
        raise TierError(f"cannot {what}: {explain(error)}") from error
    except BaseException:
        os.close(fd)
        raise


def _open_locked(path: Path) -> int:
    """Open or create a file and lock it. Raises `TierError`."""
    while True:
        try:
            # KV reveals users' prompts, so only this user may access the file.
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
        os.close(fd)  # `remove_file` has just unlinked it


def _make_private(fd: int, path: Path) -> None:
    """Make a file private to this user; raise `TierError` for another user's file."""
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
    """Give an open file another id on disk, so that its next user trusts no record in it.

    Blocks until that is durable. Raises `OSError`. A partly written region counts as damaged, so
    the file is started over, which has the same effect.
    """
    region = structs.replace(content, file_id=secrets.token_hex(16)).encode()
    page = HostArena(1, FIRST_REGION_BYTES, register=None).view()[0]  # for direct I/O
    page[:] = np.frombuffer(region, np.uint8)
    if os.pwrite(fd, page.data, 0) < FIRST_REGION_BYTES:
        raise OSError(errno.EIO, "only a part could be written")
    os.fsync(fd)


def remove_file(path: Path) -> int:
    """Remove an unused file of a tier, and return the number of bytes that this frees.

    The space is free on return, even if another process removes the file at the same time. Raises
    `TierError` for a file that no tier created, that is in use, or that this user may not remove.
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
        if found.st_size:  # else a process was killed while removing or starting it
            read_region(fd, path)
        # A filesystem may free the space of an unlinked file later.
        os.ftruncate(fd, 0)
        if not path.is_symlink():  # the user may have linked to another disk
            path.unlink()
    except OSError as error:
        raise TierError(f"cannot remove {path}: {explain(error)}") from error
    finally:
        os.close(fd)
    return found.st_blocks * 512


def _lock(fd: int, path: Path, timeout_seconds: float = 0.0) -> None:
    """Lock the file until its descriptor is closed or the process ends."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise TierError(f"{path} is not a regular file; name a file in a folder of a disk")
    if not lock(fd, timeout_seconds):
        raise TierError(
            f"{path} is in use by another engine, or by one whose disk hangs; `fuser {path}` "
            f"names its process: end that, or give each engine its own folder"
        )


def _prepare(fd: int, path: Path, wanted: FileDescription) -> tuple[FileDescription, str]:
    """Reuse a locked file or start it over; return its description, and why it was started over."""
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
    """Start the file over as wanted, without records. A failure in a later step leaves it empty."""
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
    # Check first: a failing call would briefly fill the filesystem, and lose existing contents.
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
        # From now on the file can be recognised as a tier's, even if the machine stops.
        os.fsync(fd)
        _reserve(fd, path, wanted)
    except BaseException:
        os.ftruncate(fd, 0)
        raise


def _reserve(fd: int, path: Path, content: FileDescription) -> None:
    """Reserve all the file's space now, so that it cannot run out later."""
    try:
        os.posix_fallocate(fd, 0, content.nbytes)
    except OSError as error:
        kind = _NoSpaceError if error.errno == errno.ENOSPC else TierError
        raise kind(
            f"cannot reserve {content.nbytes} bytes for {path}, {content.num_slots} slots of "
            f"{content.slot_bytes} bytes: {explain(error)}"
        ) from error


def _turn_direct(fd: int, content: FileDescription, arena: NDArray[np.uint8]) -> bool:
    """Use direct I/O if file and arena allow it; tries it with a record after the last slot."""
    page = HostArena(1, PAGE_BYTES, register=None).view()[0].data
    # Slot 0 is page-aligned; all other slots are aligned like slot 1.
    record = [page, arena[min(1, len(arena) - 1)].data, page[: content.records.pad_bytes]]
    return turn_direct(fd, record, content.offset(content.num_slots))


def turn_direct(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Use direct I/O on a descriptor if it can write these buffers; return whether it does.

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
