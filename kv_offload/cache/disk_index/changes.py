"""What an index in memory has and its SQLite file has not yet."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence


class Changes:
    """Collects changes, the last one of each slot, until they are written in one transaction.

    So memory does not grow with the time in which nothing can be written.
    """

    def __init__(self, last_use: int) -> None:
        """Times of use are in microseconds since 1970, and rise from `last_use` on."""
        self._last_use = last_use
        self._generation: bytes | None = None  # of a reset; the slots here came after it
        self._used: dict[int, int] = {}
        self._put: dict[int, bytes] = {}
        self._removed: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there is something to write."""
        return bool(self.has_reset or self._used or self._removed)

    @property
    def has_reset(self) -> bool:
        """Whether all that the file has is to be forgotten."""
        return self._generation is not None

    def put(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Have slots hold keys."""
        self._put.update(zip(slots, keys, strict=True))
        self._removed.difference_update(slots)
        self.use(slots)

    def use(self, slots: Sequence[int]) -> None:
        """Note that slots were used, in this order."""
        self._used.update(zip(slots, self._times(), strict=False))

    def _times(self) -> Iterator[int]:
        now = time.time_ns() // 1000
        while True:
            self._last_use = max(self._last_use + 1, now)
            yield self._last_use

    def remove(self, slots: Sequence[int]) -> None:
        """Have slots hold nothing."""
        self._removed.update(slots)
        for slot in slots:
            self._put.pop(slot, None)
            self._used.pop(slot, None)

    def reset(self, generation: bytes) -> None:
        """Have all slots hold nothing, and name what comes now by another generation."""
        self.forget()
        self._generation = generation

    def forget(self) -> None:
        """Begin anew: all of it has been written."""
        self._generation = None
        self._used.clear()
        self._put.clear()
        self._removed.clear()

    def write(self, database: sqlite3.Connection) -> None:
        """Write all of it in one transaction, of which nothing is left if an error is raised.

        A reset is flushed: a power cut must not bring back what was there before it.
        """
        put = [(slot, key, self._used[slot]) for slot, key in self._put.items()]
        used = [(when, slot) for slot, when in self._used.items() if slot not in self._put]
        removed = [(slot,) for slot in self._removed]
        try:
            if self.has_reset:
                database.execute("PRAGMA synchronous = FULL")
            database.execute("BEGIN IMMEDIATE")
            if self._generation is not None:
                reset = "UPDATE meta SET generation = ?, was_reset = 1"
                database.execute(reset, (self._generation,))
                database.execute("DELETE FROM slots")
            database.executemany("DELETE FROM slots WHERE slot = ?", removed)
            database.executemany("UPDATE slots SET used = ? WHERE slot = ?", used)
            database.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?, ?)", put)
            database.execute("COMMIT")
        finally:
            database.rollback()  # does nothing after a commit
            if self.has_reset:
                database.execute("PRAGMA synchronous = NORMAL")
