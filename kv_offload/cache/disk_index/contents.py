"""The format of the file, and reading it."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import NO_SLOTS, Slots
from kv_offload.errors import ConfigError, KVOffloadError

FORMAT = 1
"""The file's `user_version`. It changes with `SCHEMA`, and with what a value means."""

SCHEMA = (
    "CREATE TABLE meta (description TEXT, files TEXT, num_slots INTEGER, generation BLOB, "
    "was_reset INTEGER)",
    "CREATE TABLE slots (slot INTEGER PRIMARY KEY, key BLOB, used INTEGER)",
)
"""`meta` has one row. `used` is when a slot was last used, in microseconds since 1970, made to rise
from each use to the next.

`used` and `key` have no index: all slots are read and sorted at once, when an engine starts."""

GENERATION_BYTES = 16
LATEST = 1 << 62
"""Times are below, so that there is always a later one."""


class DamagedIndexError(KVOffloadError):
    """A file is no index of this version."""


@dataclass(frozen=True, slots=True)
class DiskContents:
    """What an index says; the least recently used slot comes first."""

    description: Mapping[str, str]
    """What all of its blocks have in common, such as the model."""
    files: Mapping[str, str]
    """The ids of the ranks' files, by rank."""
    num_slots: int
    generation: bytes
    """`GENERATION_BYTES` bytes that are part of the name of every block."""
    was_reset: bool = False
    """Whether a reset emptied it. What it has since is for the engine alone that put it there."""
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


def write_new(database: sqlite3.Connection, contents: DiskContents) -> None:
    """Make an index without slots in an empty database. Raises `sqlite3.Error`."""
    texts = [json.dumps({**texts}) for texts in (contents.description, contents.files)]
    meta = (*texts, contents.num_slots, contents.generation, contents.was_reset)
    database.execute("BEGIN")
    for sql in SCHEMA:
        database.execute(sql)
    database.execute("INSERT INTO meta VALUES (?, ?, ?, ?, ?)", meta)
    database.execute(f"PRAGMA user_version = {FORMAT}")
    database.execute("COMMIT")


def read_index(path: Path) -> DiskContents:
    """Read the index at `path`, also while an engine writes it; changes nothing.

    Raises `ConfigError` if there is none or it may not be read, `DamagedIndexError` for what is no
    index of this version.
    """
    problem: object = None
    try:
        # Not by opening it: SQLite's own locks would end where an engine of this process closed it.
        if not stat.S_ISREG(path.stat().st_mode):
            problem = "not a regular file"
        elif not os.access(path, os.R_OK):
            problem = "Permission denied"
        else:
            # An engine that has ended leaves no log, and to make one takes the right to write.
            has_log = path.with_name(f"{path.name}-wal").exists()
            options = "mode=ro" if has_log else "mode=ro&immutable=1"
            database = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True)
    except OSError as error:
        problem = error.strerror
    except sqlite3.Error as error:  # it has vanished meanwhile
        problem = error
    if problem is not None:
        raise ConfigError(
            f"{path}: cannot be read: {problem}. Give a folder that an engine has as its "
            "disk_path, as a user who may read it"
        )
    try:
        return read_contents(database, path)
    finally:
        database.close()


def read_contents(database: sqlite3.Connection, path: Path) -> DiskContents:
    """Read all of an index, at one moment. Raises `DamagedIndexError`, which names the `path`."""
    try:
        database.execute("BEGIN")
        return _read(database)
    except (sqlite3.Error, ValueError, TypeError, RecursionError) as error:
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
    description, files, num_slots, generation, was_reset = meta
    _require(isinstance(num_slots, int), "the number of slots is no number")
    _require(isinstance(generation, bytes), "the generation is no bytes")
    _require(len(generation) == GENERATION_BYTES, f"the generation has {len(generation)} bytes")
    rows = database.execute("SELECT key, slot, used FROM slots ORDER BY used").fetchall()
    keys = [key for key, _, _ in rows]
    slots = np.array([slot for _, slot, _ in rows], np.int64)
    used = np.array([used for _, _, used in rows], np.int64)
    _require(set(map(type, keys)) <= {bytes}, "a key is no bytes")
    _require(len(set(keys)) == len(keys), "two slots have one key")
    _require(len(np.unique(slots)) == len(slots), "a slot is there twice")
    _require(bool(((slots >= 0) & (slots < num_slots)).all()), "a slot does not exist")
    _require(bool(((used >= 0) & (used < LATEST)).all()), "a time does not exist")
    return DiskContents(
        _texts(description),
        _texts(files),
        num_slots,
        generation,
        bool(was_reset),
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
