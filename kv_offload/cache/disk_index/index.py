"""The index of a disk's slots, and the thread that writes it.

Each transaction of the thread includes all changes since the last one. So the file always shows a
consistent state, usually less than a second old.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kv_offload.cache.disk_index.contents import GENERATION_BYTES, DiskContents, row_sum
from kv_offload.cache.disk_index.file import end_index, lock_index, open_index, refused
from kv_offload.cache.slots import Slots

logger = logging.getLogger(__name__)

COMMIT_SECONDS = 0.5
RETRY_SECONDS = 10.0
"""Delay after a failed write; the next attempt may have every slot to write."""


class Changes:
    """Changes that the file does not have yet, the last one per slot."""

    def __init__(self, last_use: int) -> None:
        """Times of use are in microseconds since 1970, and increase from `last_use`."""
        self.last_use = last_use
        self._key_of: dict[int, bytes | None] = {}  # None if removed
        self._used: dict[int, int] = {}

    def __bool__(self) -> bool:
        """True if there is something to write."""
        return bool(self._used or self._key_of)

    def put(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Record that slots hold keys."""
        self._key_of.update(zip(slots, keys, strict=True))
        self.use(slots)

    def use(self, slots: Sequence[int]) -> None:
        """Record that slots were used, in this order."""
        first = max(self.last_use + 1, time.time_ns() // 1000)
        self.last_use = first + len(slots) - 1
        self._used.update(zip(slots, range(first, first + len(slots)), strict=True))

    def remove(self, slots: Sequence[int]) -> None:
        """Record that slots hold nothing."""
        self._key_of.update(dict.fromkeys(slots))

    def add(self, later: Changes) -> None:
        """Add changes that came after these."""
        self._key_of.update(later._key_of)
        self._used.update(later._used)
        self.last_use = later.last_use

    def write(self, database: sqlite3.Connection, generation: bytes) -> None:
        """Write all changes in one transaction, which is rolled back if an error is raised."""
        removed = [(slot,) for slot, key in self._key_of.items() if key is None]
        used = [(when, slot) for slot, when in self._used.items() if slot not in self._key_of]
        put = [
            (slot, key, self._used[slot], row_sum(generation, slot, key))
            for slot, key in self._key_of.items()
            if key is not None
        ]
        try:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("DELETE FROM slots WHERE slot = ?", removed)
            database.executemany("UPDATE slots SET used = ? WHERE slot = ?", used)
            database.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?)", put)
            database.execute("COMMIT")
        finally:
            database.rollback()  # does nothing after a commit


class DiskIndex:
    """The key of each slot of a disk. Called from one thread.

    Only `wait_ended` and `close` block.
    """

    def __init__(
        self, path: Path, description: Mapping[str, str], files: Mapping[str, str], num_slots: int
    ) -> None:
        """Open the file at `path`, or create it; no other engine can until `close` or a kill.

        Its contents are taken over if `description` (of the blocks), `files` (ids of the ranks'
        files, by rank) and `num_slots` match. Raises `ConfigError` if no file can be used there.
        """
        generation = secrets.token_bytes(GENERATION_BYTES)
        new = DiskContents(description, files, num_slots, generation)
        with refused(path), contextlib.ExitStack() as opened:
            self._lock = lock_index(path)
            opened.callback(os.close, self._lock)
            self._database, found, self.reason = open_index(path, new)
            opened.callback(self._database.close)
            # The file itself, wherever it is moved. Closing it releases SQLite's locks.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            opened.pop_all()
        self.keys, self.slots = found.keys, found.slots
        """The keys found, least recently used first; `slots` has the slot of each."""
        self.generation = found.generation
        """Part of the name of every block: new with every created file and every `clear`."""
        self.errors = 0
        """Number of failed writes. The first one is logged."""
        self.problem = ""
        """Why the last attempt to end the file after `clear` failed."""
        self._path = path
        self._written_generation = found.generation
        self._changes = Changes(last_use=int(found.used.max(initial=0)))
        self._changing = threading.Lock()
        self._changed, self._urgent, self._closing = (threading.Event() for _ in range(3))
        self._cleared, self._ended = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._run, name="kv-offload-disk-index", daemon=True)
        self._writer.start()

    def put(self, keys: Sequence[bytes], slots: Slots) -> None:
        """Record that slots now hold these keys; the last one is the most recently used."""
        with self._changing:
            self._changes.put(slots.tolist(), keys)
        self._changed.set()

    def use(self, slots: Slots) -> None:
        """Record that slots were used, the last one most recently."""
        with self._changing:
            self._changes.use(slots.tolist())
        self._changed.set()

    def remove(self, slots: Slots) -> None:
        """Record that slots no longer hold anything."""
        with self._changing:
            self._changes.remove(slots.tolist())
        self._changed.set()

    def clear(self) -> None:
        """Drop all keys, choose another `generation`, and have the thread end the file.

        The new generation exists in this process alone: no restart, perhaps with other weights, can
        name a block of it. Once the file has ended, none can name an earlier block; see
        `wait_ended`.
        """
        self.generation = secrets.token_bytes(GENERATION_BYTES)
        self._cleared.set()
        self._changed.set()
        self._urgent.set()

    def wait_ended(self, timeout_seconds: float) -> bool:
        """Block until the file has durably ended after `clear`; False after a timeout."""
        return self._ended.wait(timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write pending changes and release the file, unless the disk hangs beyond the timeout."""
        self._closing.set()
        self._changed.set()
        self._urgent.set()
        self._writer.join(timeout_seconds)

    def _run(self) -> None:
        """Write until the index is closed. Only this thread touches the file."""
        while not self._closing.is_set():
            self._changed.wait()
            self._urgent.wait(COMMIT_SECONDS)
            self._changed.clear()
            self._urgent.clear()
            if not self._work() and not self._closing.is_set():
                self._urgent.wait(RETRY_SECONDS)
                self._changed.set()
        self._work()
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        os.close(self._file)
        os.close(self._lock)

    def _work(self) -> bool:
        """Write all pending changes, or end the file; return whether that succeeded."""
        with self._changing:
            changes, self._changes = self._changes, Changes(self._changes.last_use)
        try:
            if not self._cleared.is_set():
                self._write(changes)
            elif not self._ended.is_set():
                end_index(self._path, self._file, self._database)
                self._ended.set()
        except Exception as error:  # noqa: BLE001 - no error may end the thread
            with self._changing:
                changes.add(self._changes)
                self._changes = changes
            self.errors += 1
            if self._cleared.is_set():
                self.problem = f"{self._path} cannot be removed or emptied: {error}"
            elif self.errors == 1:
                logger.warning(
                    "kv-offload: %s: the disk index cannot be written: %s. The engine "
                    "continues, but a restart finds fewer blocks. Check that the folder exists, "
                    "has room and is writable",
                    self._path,
                    error,
                )
            return False
        return True

    def _write(self, changes: Changes) -> None:
        if not changes:
            return
        found, own = self._path.stat(), os.fstat(self._file)
        if not os.path.samestat(found, own):
            raise FileNotFoundError(f"{self._path} was replaced while it was open")
        changes.write(self._database, self._written_generation)
