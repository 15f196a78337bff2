"""What an index in memory has and its SQLite file has not yet."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence

from kv_offload.cache.disk_index.contents import row_sum


class Changes:
    """Collects changes, the last one of each slot, until they are written in one transaction.

    So memory does not grow with the time in which nothing can be written.
    """

    def __init__(self, last_use: int) -> None:
        """Times of use are in microseconds since 1970, and rise from `last_use` on."""
        self.last_use = last_use
        # By slot, the key that was put, None if it was only used, and the last use.
        self._rows: dict[int, tuple[bytes | None, int]] = {}
        # Deleted before rows are written, so that a slot may be here and there.
        self._removed: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there is something to write."""
        return bool(self._rows or self._removed)

    def put(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Have slots hold keys."""
        times = self._times()
        self._rows.update(zip(slots, zip(keys, times, strict=False), strict=True))

    def use(self, slots: Sequence[int]) -> None:
        """Note that slots were used, in this order."""
        for slot, when in zip(slots, self._times(), strict=False):
            self._rows[slot] = self._key(slot), when

    def remove(self, slots: Sequence[int]) -> None:
        """Have slots hold nothing."""
        self._removed.update(slots)
        for slot in slots:
            self._rows.pop(slot, None)

    def add(self, later: Changes) -> None:
        """Add the changes that came after these."""
        self.remove([*later._removed])
        for slot, (key, when) in later._rows.items():
            self._rows[slot] = self._key(slot) if key is None else key, when
        self.last_use = later.last_use

    def forget(self) -> None:
        """Drop all of it, which has been written."""
        self._rows.clear()
        self._removed.clear()

    def write(self, database: sqlite3.Connection, generation: bytes) -> None:
        """Write all of it in one transaction, of which nothing is left if an error is raised."""
        removed = [(slot,) for slot in self._removed]
        used = [(when, slot) for slot, (key, when) in self._rows.items() if key is None]
        put = [
            (slot, key, when, row_sum(generation, slot, key))
            for slot, (key, when) in self._rows.items()
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

    def _key(self, slot: int) -> bytes | None:
        return self._rows[slot][0] if slot in self._rows else None

    def _times(self) -> Iterator[int]:
        now = time.time_ns() // 1000
        while True:
            self.last_use = max(self.last_use + 1, now)
            yield self.last_use
