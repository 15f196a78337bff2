"""The format of the index file, and reading it."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_offload.cache.slots import NO_SLOTS, Slots
from kv_offload.errors import ConfigError, KVOffloadError

FORMAT = 2
"""The file's `user_version`. It changes with `SCHEMA`, and with the meaning of a value."""

SCHEMA = (
    "CREATE TABLE meta (description TEXT, files TEXT, num_slots INTEGER, generation BLOB)",
    "CREATE TABLE slots (slot INTEGER PRIMARY KEY, key BLOB, used INTEGER, sum BLOB)",
)
"""`meta` has one row. `used` is the time of a slot's last use in microseconds since 1970; each use
has a later time than the one before. `sum` is the result of `row_sum`.

Nothing in the file is trusted without a check. The description, the files and the number of slots
must match those of the engine that starts. A row's sum must match its slot, its key and the
generation, and the name of the record in the slot must be the generation and the key. `used` alone
is not checked: it only decides the order of eviction.

`used` and `key` have no SQL index: all slots are read and sorted at once, when an engine starts."""

LOG_HEADER_BYTES = 32
"""Size of the header of SQLite's write-ahead log; its salts differ after each restart of the
log."""

COPY_ATTEMPTS = 100

GENERATION_BYTES = 16
LATEST = 1 << 62
"""Times are below this, so that there is always a later one."""


class DamagedIndexError(KVOffloadError):
    """The file is not a valid index of this version."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """The contents of an index; the least recently used slot comes first."""

    description: Mapping[str, str]
    """Properties that all of its blocks share, such as the model."""
    files: Mapping[str, str]
    """The ids of the ranks' files, by rank."""
    num_slots: int
    generation: bytes
    """`GENERATION_BYTES` bytes that are part of the name of every block."""
    keys: list[bytes] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    used: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The time of each slot's last use in microseconds since 1970, shape `(len(slots),)`."""


def row_sum(generation: bytes, slot: int, key: bytes) -> bytes:
    """Return the XXH3-64 checksum of a row, 8 bytes. It is not a signature."""
    return xxhash.xxh3_64_digest(b"%b%d:%b" % (generation, slot, key))


def write_new(database: sqlite3.Connection, contents: DiskContents) -> None:
    """Create an index without slots in an empty database. Raises `sqlite3.Error`."""
    texts = [json.dumps({**texts}) for texts in (contents.description, contents.files)]
    meta = (*texts, contents.num_slots, contents.generation)
    database.execute("BEGIN")
    for sql in SCHEMA:
        database.execute(sql)
    database.execute("INSERT INTO meta VALUES (?, ?, ?, ?)", meta)
    database.execute(f"PRAGMA user_version = {FORMAT}")
    database.execute("COMMIT")


def read_index(path: Path) -> DiskContents:
    """Read the index at `path`, even while an engine writes it; changes nothing.

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

    An engine lets no other process open them. It appends to the log, and restarts the log with
    another header only once all of its contents are in the index. So while the header stays the
    same, the log contains all concurrent writes to the index.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    log, copied_log = (file.with_name(f"{file.name}-wal") for file in (path, copy))
    for _ in range(COPY_ATTEMPTS):
        before = _header(log)
        shutil.copyfile(path, copy)
        copied_log.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):  # an engine that has ended leaves none
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


def read_contents(database: sqlite3.Connection, path: Path) -> DiskContents:
    """Read all of an index at one moment. Raises `DamagedIndexError`, which names `path`."""
    try:
        database.execute("BEGIN")
        return _read(database)
    except Exception as error:  # SQLite returns whatever is in the file
        raise DamagedIndexError(
            f"{path}: cannot be used: {error}. It is only a cache: the next engine that uses "
            "this folder creates a new one"
        ) from error
    finally:
        database.rollback()


def _read(database: sqlite3.Connection) -> DiskContents:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    _require(version == FORMAT, f"it has format {version}, not {FORMAT}")
    schema = database.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall()
    _require([sql for (sql,) in schema] == [*SCHEMA], "its tables are not those of an index")
    problems = database.execute("PRAGMA quick_check(1)").fetchall()
    _require(problems == [("ok",)], str(problems[0][0]))
    (meta,) = database.execute("SELECT * FROM meta").fetchall()
    description, files, num_slots, generation = meta
    _require(isinstance(num_slots, int), "the number of slots is not an integer")
    _require(isinstance(generation, bytes), "the generation is not bytes")
    _require(len(generation) == GENERATION_BYTES, f"the generation has {len(generation)} bytes")
    found = database.execute("SELECT key, slot, used, sum FROM slots ORDER BY used").fetchall()
    _require({type(key) for key, *_ in found} <= {bytes}, "a key is not bytes")
    _require({type(used) for _, _, used, _ in found} <= {int}, "a time is not an integer")
    rows = [row for row in found if row_sum(generation, row[1], row[0]) == row[3]]
    keys = [key for key, *_ in rows]
    slots = np.array([slot for _, slot, *_ in rows], np.int64)
    used = np.array([used for _, _, used, _ in rows], np.int64)
    _require(len(set(keys)) == len(keys), "two slots have one key")
    _require(bool(((slots >= 0) & (slots < num_slots)).all()), "a slot does not exist")
    _require(bool(((used >= 0) & (used < LATEST)).all()), "a time does not exist")
    return DiskContents(
        _texts(description),
        _texts(files),
        num_slots,
        generation,
        keys,
        slots.astype(np.int32),
        used,
    )


def _texts(text: Any) -> dict[str, str]:
    values = json.loads(text)
    _require(isinstance(values, dict), "a description is not a mapping")
    _require(all(isinstance(value, str) for value in values.values()), "a value is not text")
    return dict(values)


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)
