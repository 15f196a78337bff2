"""Reads a disk's index, even while an engine writes to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shutil
import sqlite3
import tempfile
from pathlib import Path

from kv_offload.cache.disk_index.contents import DiskContents, read_contents
from kv_offload.cache.disk_index.file import lock_file
from kv_offload.errors import ConfigError

LOG_HEADER_BYTES = 32
"""Size of the header of SQLite's write-ahead log; its salts change at each restart of the log."""

COPY_ATTEMPTS = 100


def read_index(path: Path) -> DiskContents:
    """Read the index at `path`, even while an engine writes to it; changes nothing.

    Raises `ConfigError` if there is none or it may not be read, `DamagedIndexError` if the file is
    not an index of this version.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="kv-offload-"))
            copy = Path(folder, path.name)
            _copy(path, copy)
            database = opened.enter_context(contextlib.closing(sqlite3.connect(copy)))
        except (OSError, sqlite3.Error) as error:
            problem = getattr(error, "strerror", None) or error
            remedy = "Give a folder that an engine has as its disk.path, as a user who may read it"
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                where = tempfile.gettempdir()
                remedy = f"A copy of it is read, in {where}: set TMPDIR to a folder with more room"
            raise ConfigError(f"{path}: cannot be read: {problem}. {remedy}") from error
        return read_contents(database, path)


def _copy(path: Path, copy: Path) -> None:
    """Copy an index and its log as they were at one moment. Raises `OSError`.

    An engine lets no other process open the database. It appends to the log, and restarts the log
    with another header only once all its contents are in the index. So while the header stays the
    same, the log contains all concurrent writes to the index.
    """
    log, copied_log = (file.with_name(f"{file.name}-wal") for file in (path, copy))
    for _ in range(COPY_ATTEMPTS):
        before = _header(log)
        shutil.copyfile(path, copy)
        copied_log.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # an engine that has ended leaves no log
            shutil.copyfile(log, copied_log)
        if before == _header(copied_log) == _header(log):
            return
    raise OSError(errno.EBUSY, "an engine keeps writing it")


def _header(log: Path) -> bytes | None:
    try:
        with log.open("rb") as file:
            return file.read(LOG_HEADER_BYTES)
    except FileNotFoundError:
        return None


def is_in_use(path: Path) -> bool:
    """Return whether an engine is using the index at `path`. Raises `OSError`."""
    with lock_file(path).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
