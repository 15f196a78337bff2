"""Changes of an index in memory that its SQLite file does not have yet."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from kv_offload.cache.disk_index.contents import row_sum


class Changes:
    """Collects changes until they are written in one transaction, keeping the last one per slot.

    So memory stays bounded while nothing can be written.
    """

    def __init__(self, last_use: int) -> None:
        """Times of use are in microseconds since 1970, and increase from `last_use`."""
        self.last_use = last_use
        self._put: dict[int, bytes] = {}
        self._used: dict[int, int] = {}  # includes all slots in `_put`
        # Deletions are written before the rest, so a slot may also be in `_put`.
        self._removed: set[int] = set()

    def __bool__(self) -> bool:
        """True if there is something to write."""
        return bool(self._used or self._removed)

    def put(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Record that slots hold keys."""
        self._put.update(zip(slots, keys, strict=True))
        self.use(slots)

    def use(self, slots: Sequence[int]) -> None:
        """Record that slots were used, in this order."""
        first = max(self.last_use + 1, time.time_ns() // 1000)
        self.last_use = first + len(slots) - 1
        self._used.update(zip(slots, range(first, first + len(slots)), strict=True))

    def remove(self, slots: Sequence[int]) -> None:
        """Record that slots hold nothing."""
        self._removed.update(slots)
        for slot in slots:
            self._put.pop(slot, None)
            self._used.pop(slot, None)

    def add(self, later: Changes) -> None:
        """Add changes that came after these."""
        self.remove([*later._removed])
        self._put.update(later._put)
        self._used.update(later._used)
        self.last_use = later.last_use

    def forget(self) -> None:
        """Drop all changes, which have been written."""
        self._put.clear()
        self._used.clear()
        self._removed.clear()

    def write(self, database: sqlite3.Connection, generation: bytes) -> None:
        """Write all changes in one transaction, which is rolled back if an error is raised."""
        removed = [(slot,) for slot in self._removed]
        used = [(when, slot) for slot, when in self._used.items() if slot not in self._put]
        put = [
            (slot, key, self._used[slot], row_sum(generation, slot, key))
            for slot, key in self._put.items()
        ]
        try:
            database.execute("BEGIN IMMEDIATE")
            database.executemany("DELETE FROM slots WHERE slot = ?", removed)
            database.executemany("UPDATE slots SET used = ? WHERE slot = ?", used)
            database.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?)", put)
            database.execute("COMMIT")
        finally:
            database.rollback()  # does nothing after a commit
