"""The file of the index: locked by one engine, and replaced if it cannot be taken over."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

from kv_swap.locks import lock

from kv_offload.cache.disk_index.contents import (
    DamagedIndexError,
    DiskContents,
    read_contents,
    write_new,
)
from kv_offload.errors import ConfigError

LOCK_SECONDS = 1.0
"""How long an engine waits for another engine that is ending, or for a check of the lock."""

SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite makes."""

NO_INDEX = "it has no index: it is new, or a reset or new weights emptied it"


def lock_index(path: Path) -> int:
    """Lock the lock file of `path`; return its descriptor, which holds the lock until it is closed.

    Raises `ConfigError` as `check_files` does, and if another engine holds the lock.
    """
    check_files(path)
    file = lock_file(path)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if lock(descriptor, LOCK_SECONDS):
        return descriptor
    os.close(descriptor)
    raise ConfigError(
        f"{path}: another engine uses it. Give each engine its own disk.path, or stop the other "
        f"one; `fuser {shlex.quote(str(file))}` names its process"
    )


def lock_file(path: Path) -> Path:
    """Return the file that is locked while an engine uses the index at `path`."""
    return path.with_name(f"{path.name}.lock")


def check_unused(path: Path) -> None:
    """Raise `ConfigError` if an engine uses the index at `path`. Creates no file."""
    with refused(path), contextlib.suppress(FileNotFoundError):
        lock_file(path).stat()
        os.close(lock_index(path))


def check_files(path: Path) -> None:
    """Raise `ConfigError` if a pipe, folder or device is in the place of a file of the index.

    Opening a pipe would block.
    """
    for file in (lock_file(path), *(path.with_name(path.name + suffix) for suffix in SUFFIXES)):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(file.stat().st_mode):
                raise ConfigError(
                    f"{file}: is not a regular file. Remove it, or give another folder as disk.path"
                )


def open_index(path: Path, new: DiskContents) -> tuple[sqlite3.Connection, DiskContents, str]:
    """Open the index, or create one from `new`; return its contents, and why it was created."""
    reason = NO_INDEX
    if path.exists():
        found_file = path.stat()
        if found_file.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"it belongs to user {found_file.st_uid}")
        if found_file.st_mode & 0o077:  # for example a copy
            path.chmod(0o600)
        with contextlib.ExitStack() as opened:
            database = opened.enter_context(contextlib.closing(_connect(path)))
            try:
                found = read_contents(database, path)
                reason = _difference(found, new)
                if not reason:
                    _prepare(database)
                    opened.pop_all()
                    return database, found, ""
            except DamagedIndexError as error:
                reason = error.args[0]
    for suffix in SUFFIXES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # unreadable by others
    with contextlib.ExitStack() as opened:
        database = opened.enter_context(contextlib.closing(_connect(path)))
        write_new(database, new)
        _prepare(database)
        opened.pop_all()
    return database, new, reason


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # Otherwise SQLite maps a file that processes share. If the filesystem cannot provide a page of
    # it, such as a full btrfs, the system kills the process that writes there.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    if _is_read(database):
        database.execute("PRAGMA locking_mode = NORMAL")
    return database


def _is_read(database: sqlite3.Connection) -> bool:
    """Return whether another program has the file open; that must not cost the disk's blocks."""
    try:
        database.execute("PRAGMA user_version")
    except sqlite3.Error as error:  # the reader of a damaged file reports the reason
        return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
    return False


def _prepare(database: sqlite3.Connection) -> None:
    """Ensure that a kill leaves whole transactions, and that a transaction can begin.

    Raises `DamagedIndexError` for a file that SQLite reads but never writes, such as one with the
    number of a later version in its header.
    """
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("BEGIN IMMEDIATE")
    try:
        database.execute("DELETE FROM meta")  # BEGIN alone succeeds for such a file
    except sqlite3.Error as error:
        raise DamagedIndexError(f"it cannot be written: {error}") from error
    finally:
        database.rollback()


def end_index(path: Path, file: int, database: sqlite3.Connection) -> None:
    """Make the next engine begin with an empty index; return once that is durable.

    `file` is a descriptor of the index. Removing it needs no room on the disk; a file that cannot
    be removed, or was moved, is emptied instead. Raises `OSError` or `sqlite3.Error`.
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
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the file may have lost its log


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn errors of opening a file into a `ConfigError`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: cannot be used: {problem}. Give disk.path a folder that exists, that this "
            "user may write, and that has room"
        ) from error


def _difference(found: DiskContents, new: DiskContents) -> str:
    """Return why an engine that would begin with `new` cannot use `found`; empty if it can."""
    described = [
        f"{name} was {found.description.get(name)!r}, is {new.description.get(name)!r}"
        for name in {**found.description, **new.description}
        if found.description.get(name) != new.description.get(name)
    ]
    if found.num_slots != new.num_slots:
        described.append(f"it had {found.num_slots} slots, and there are {new.num_slots}")
    described += [
        f"the file of rank {rank} is a different one"
        for rank in {**found.files, **new.files}
        if found.files.get(rank) != new.files.get(rank)
    ]
    return "; ".join(described)
