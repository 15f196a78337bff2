"""The format of the index file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_offload.cache.slots import NO_SLOTS, Slots
from kv_offload.errors import KVOffloadError

FORMAT = 2
"""The file's `user_version`. It changes with `SCHEMA`, and with the meaning of a value."""

SCHEMA = (
    "CREATE TABLE meta (description TEXT, files TEXT, num_slots INTEGER, generation BLOB)",
    "CREATE TABLE slots (slot INTEGER PRIMARY KEY, key BLOB, used INTEGER, sum BLOB)",
)
"""`meta` has one row. `used` is the time of a slot's last use in microseconds since 1970; each use
has a later time than the one before. `sum` is the result of `row_sum`.

Nothing is trusted without a check: `meta` must match the engine that starts, a row's sum its slot,
its key and the generation, and the record in the slot the generation and the key. `used` alone is
not checked: it only decides the order of eviction. There is no SQL index, as all slots are read and
sorted at once."""

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
    texts = _texts(description), _texts(files)
    return DiskContents(*texts, num_slots, generation, keys, slots.astype(np.int32), used)


def _texts(text: Any) -> dict[str, str]:
    values = json.loads(text)
    _require(isinstance(values, dict), "a description is not a mapping")
    _require(all(isinstance(value, str) for value in values.values()), "a value is not text")
    return dict(values)


def _require(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)
