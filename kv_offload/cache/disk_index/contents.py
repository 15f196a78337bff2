"""The format of the file, and reading it."""

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
"""The file's `user_version`. It changes with `SCHEMA`, and with what a value means."""

SCHEMA = (
    "CREATE TABLE meta (description TEXT, files TEXT, num_slots INTEGER, generation BLOB)",
    "CREATE TABLE slots (slot INTEGER PRIMARY KEY, key BLOB, used INTEGER, sum BLOB)",
)
"""`meta` has one row. `used` is when a slot was last used, in microseconds since 1970, made to rise
from each use to the next. `sum` is what `row_sum` returns.

Nothing here is believed without proof. The description, the files and the number of slots must be
those of the engine that starts. A row must have the sum of its slot, its key and the generation,
and the record in the slot must have the generation and the key as its name. `used` alone has no
proof: it only decides which block goes first.

`used` and `key` have no index: all slots are read and sorted at once, when an engine starts."""

LOG_HEADER_BYTES = 32
"""Header of SQLite's write-ahead log; its salts differ each time that the log is restarted."""

COPY_ATTEMPTS = 100

GENERATION_BYTES = 16
LATEST = 1 << 62
"""Times are below, so that there is always a later one."""


class DamagedIndexError(KVOffloadError):
    """A file is no index of this version."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """The contents of an index; the least recently used slot comes first."""

    description: Mapping[str, str]
    """The description that all of its blocks share, such as the model."""
    files: Mapping[str, str]
    """The ids of the ranks' files, by rank."""
    num_slots: int
    generation: bytes
    """`GENERATION_BYTES` bytes that are part of the name of every block."""
    keys: list[bytes] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    used: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """When each slot was last used, in microseconds since 1970, shape `(len(slots),)`."""

    def names(self) -> dict[int, bytes]:
        """Return by slot the name that its record on the disk must have to be the key's block."""
        return {
            slot: self.generation + key
            for slot, key in zip(self.slots.tolist(), self.keys, strict=True)
        }


def row_sum(generation: bytes, slot: int, key: bytes) -> bytes:
    """Return the XXH3-64 of a row, 8 bytes. It is no signature."""
    return xxhash.xxh3_64_digest(b"%b%d:%b" % (generation, slot, key))


def write_new(database: sqlite3.Connection, contents: DiskContents) -> None:
    """Make an index without slots in an empty database. Raises `sqlite3.Error`."""
    texts = [json.dumps({**texts}) for texts in (contents.description, contents.files)]
    meta = (*texts, contents.num_slots, contents.generation)
    database.execute("BEGIN")
    for sql in SCHEMA:
        database.execute(sql)
    database.execute("INSERT INTO meta VALUES (?, ?, ?, ?)", meta)
    database.execute(f"PRAGMA user_version = {FORMAT}")
    database.execute("COMMIT")


def read_index(path: Path) -> DiskContents:
    """Read the index at `path`, also while an engine writes it; changes nothing.

    Raises `ConfigError` if there is none or it may not be read, `DamagedIndexError` for what is no
    index of this version.
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
    """Copy an index with its log as they are at one moment. Raises `OSError`.

    An engine lets no other process open them. It appends to the log, and only once all of that is
    in the index it restarts the log, with another header. So while the header stays the same,
    the log has whatever is written to the index meanwhile.
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
    raise OSError(errno.EBUSY, "an engine writes it all the time")


def _header(log: Path) -> bytes | None:
    try:
        with log.open("rb") as file:
            return file.read(LOG_HEADER_BYTES)
    except FileNotFoundError:
        return None


def read_contents(database: sqlite3.Connection, path: Path) -> DiskContents:
    """Read all of an index, at one moment. Raises `DamagedIndexError`, which names the `path`."""
    try:
        database.execute("BEGIN")
        return _read(database)
    except Exception as error:  # whatever is in it: SQLite hands out what it finds
        raise DamagedIndexError(
            f"{path}: cannot be used: {error}. It is only a cache: the next engine that has this "
            "folder begins a new one"
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
    _require(isinstance(num_slots, int), "the number of slots is no number")
    _require(isinstance(generation, bytes), "the generation is no bytes")
    _require(len(generation) == GENERATION_BYTES, f"the generation has {len(generation)} bytes")
    found = database.execute("SELECT key, slot, used, sum FROM slots ORDER BY used").fetchall()
    _require({type(key) for key, *_ in found} <= {bytes}, "a key is no bytes")
    _require({type(used) for _, _, used, _ in found} <= {int}, "a time is no number")
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
    _require(isinstance(values, dict), "a description is no mapping")
    _require(all(isinstance(value, str) for value in values.values()), "a value is no text")
    return dict(values)


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)
