"""The index's file: one engine has it, and where it cannot be taken over a new one is made."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kv_offload.cache.disk_index.contents import (
    DamagedIndexError,
    DiskContents,
    read_contents,
    write_new,
)
from kv_offload.errors import ConfigError

LOCK_SECONDS = 1.0
"""How long an engine waits for another one that ends, or for a look at the lock."""

SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite makes."""


def lock(path: Path) -> int:
    """Lock the file beside `path`, and return its descriptor, which has the lock until it closes.

    The kernel closes it however the process ends, which may take a moment.
    """
    file = lock_file(path)
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < end:
                time.sleep(0.02)
                continue
            os.close(descriptor)
            raise ConfigError(
                f"{path}: another engine uses it. Give each engine a disk.path of its own, or end "
                f"the other one; `fuser {shlex.quote(str(file))}` names its process"
            ) from error
        return descriptor


def is_in_use(path: Path) -> bool:
    """Say whether an engine uses the index at `path`. Raises `OSError` if that cannot be looked at.

    Holds the lock for a moment if nobody does.
    """
    with lock_file(path).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def lock_file(path: Path) -> Path:
    """Return the file that is locked as long as an engine uses the index at `path`."""
    return path.with_name(f"{path.name}.lock")


def open_index(path: Path, new: DiskContents) -> tuple[sqlite3.Connection, DiskContents, str]:
    """Open a file, or begin with `new`; return what it says, and why it was begun."""
    reason = "there was none"
    if path.exists():
        found_file = path.stat()
        if not stat.S_ISREG(found_file.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found_file.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"it belongs to user {found_file.st_uid}")
        if found_file.st_mode & 0o077:  # as of a copy
            path.chmod(0o600)
        with contextlib.ExitStack() as opened:
            database = opened.enter_context(contextlib.closing(_connect(path)))
            try:
                found = read_contents(database, path)
                reason = _difference(found, new)
            except DamagedIndexError as error:
                reason = error.args[0]
            if not reason:
                _prepare(database)
                opened.pop_all()
                return database, found, ""
    for suffix in SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # for this user alone
    with contextlib.ExitStack() as opened:
        database = opened.enter_context(contextlib.closing(_connect(path)))
        write_new(database, new)
        _prepare(database)
        opened.pop_all()
    return database, new, reason


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # Else SQLite maps a file that processes share. Where the filesystem cannot give it room for a
    # page any more, as a full btrfs, the system would end the process that writes there.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    if _is_read(database):
        database.execute("PRAGMA locking_mode = NORMAL")
    return database


def _is_read(database: sqlite3.Connection) -> bool:
    """Say whether another program has the file open with SQLite, which must not empty the disk."""
    try:
        database.execute("PRAGMA user_version")
    except sqlite3.Error as error:  # whoever reads more of a damaged file says why
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
    return False


def _prepare(database: sqlite3.Connection) -> None:
    """Have a kill leave whole transactions, and see that there can be one."""
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("BEGIN IMMEDIATE")
    database.rollback()


def end_index(path: Path, file: int, database: sqlite3.Connection) -> None:
    """Have the next engine begin with an empty index; return once that is durable.

    `file` is a descriptor of the index, and `database` the open one. Removing it needs no room on
    the disk. What cannot be removed, or is elsewhere by now, is emptied. Raises `OSError` or
    `sqlite3.Error` where neither is possible.
    """
    try:
        if os.path.samestat(path.stat(), os.fstat(file)):
            path.unlink()
        if os.fstat(file).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was moved or linked")
        _flush(path.parent)
    except OSError:
        database.execute("PRAGMA synchronous = FULL")
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("DELETE FROM meta")
            database.execute("DELETE FROM slots")
            database.execute("COMMIT")
        finally:
            database.rollback()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # it may have lost its log


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn what stands in the way of a file into a `ConfigError`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot be used: {problem}. Give disk.path a folder that exists, that this "
            "user may write, and that has room"
        ) from error


def _difference(found: DiskContents, new: DiskContents) -> str:
    """Say why what was found cannot be used by an engine that would begin with `new`."""
    described = [
        f"{name} was {found.description.get(name)!r}, is {new.description.get(name)!r}"
        for name in {**found.description, **new.description}
        if found.description.get(name) != new.description.get(name)
    ]
    if found.num_slots != new.num_slots:
        described.append(f"it had {found.num_slots} slots, and there are {new.num_slots}")
    described += [
        f"the file of rank {rank} is another one"
        for rank in {**found.files, **new.files}
        if found.files.get(rank) != new.files.get(rank)
    ]
    return "; ".join(described)
