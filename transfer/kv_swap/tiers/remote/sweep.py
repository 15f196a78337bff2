"""Keeps a shared store within its limit by removing the least recently used objects.

Any process may sweep at any time, even while others read, write or sweep. A reader whose object is
removed finds it missing. Overlapping sweeps remove no more than a single one: both remove the
objects of the same age or older. A process sweeps whenever it has written a fixed part of the
limit, so all engines together sweep as often as one engine that writes everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kv_swap.errors import TierError

logger = logging.getLogger(__name__)

WRITTEN_PARTS = 64
"""A process sweeps after writing one part in this many of the limit. So a store can exceed its
limit by one such part per writing process."""

LOW_PARTS = 16
"""A sweep leaves one part in this many of the limit free; if the filesystem is full although
the limit is not reached, it frees that part of the existing objects."""

AGE_SECONDS = 16
"""Objects last used within the same interval of this many seconds count as equally old."""

AHEAD_SECONDS = 86_400.0
"""Clocks must differ by less than this. An object with a mark further in the future counts as the
oldest; otherwise it would outlive all other objects until then."""


REMOVED_AT_ONCE = 256
"""Maximum keys in one request to remove objects."""


class Entry(NamedTuple):
    """An object of a store: its key, size in bytes, and time of use or writing in seconds."""

    key: str
    nbytes: int
    used: float


class Sweepable(Protocol):
    """The store operations that a sweep needs."""

    def entries(self) -> Iterator[Entry]:
        """Yield all objects of all engines, in any order. May take minutes. Raises `TierError`."""

    def remove(self, keys: list[str]) -> None:
        """Remove the objects that exist. Raises `TierError`."""


def sweep(store: Sweepable, limit_bytes: int, *, is_full: bool = False) -> int:
    """Remove the oldest objects of a store with more than `limit_bytes`; return the bytes removed.

    A store that `is_full` can hold no more than it does now, whatever its limit. Lists the store
    once to count and once to remove, so that memory does not grow with the number of objects.
    Raises `TierError`.
    """
    latest = time.time() + AHEAD_SECONDS

    def age_of(entry: Entry) -> int:
        return int(entry.used) // AGE_SECONDS if entry.used <= latest else -1

    by_age: defaultdict[int, int] = defaultdict(int)
    for entry in store.entries():
        by_age[age_of(entry)] += entry.nbytes
    total = sum(by_age.values())
    if is_full:
        limit_bytes = min(limit_bytes, total - 1)
    if total <= limit_bytes:
        return 0
    excess = total - limit_bytes * (LOW_PARTS - 1) // LOW_PARTS
    last, kept_bytes = 0, 0
    for last in sorted(by_age):
        kept_bytes = max(0, by_age[last] - excess)
        excess -= by_age[last]
        if excess <= 0:
            break
    # Remove all older objects, and enough of this interval to leave `kept_bytes`.
    removed, gone, of_last = 0, [], []
    for entry in store.entries():
        age = age_of(entry)
        if age < last:
            gone.append(entry.key)
            removed += entry.nbytes
            if len(gone) >= REMOVED_AT_ONCE:
                store.remove(gone)
                gone = []
        elif age == last:
            of_last.append(entry)
    left_bytes = sum(entry.nbytes for entry in of_last)
    for entry in of_last:
        if left_bytes <= kept_bytes:
            break
        gone.append(entry.key)
        removed += entry.nbytes
        left_bytes -= entry.nbytes
    store.remove(gone)
    return removed


class Sweeper:
    """A thread that sweeps once enough has been written. Only `close` blocks."""

    def __init__(self, store: Sweepable, limit_bytes: int) -> None:
        self._store, self._limit_bytes = store, limit_bytes
        self._written = 0
        self._is_full = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def wrote(self, nbytes: int, *, is_full: bool = False) -> None:
        """Count written bytes; `is_full` means that the store had no room for more."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._written = self._limit_bytes  # existing objects have not been counted yet
                self._thread = threading.Thread(target=self._run, name="kv-swap-sweep", daemon=True)
                self._thread.start()
            self._written += nbytes
            self._is_full |= is_full
            if self._is_due:
                self._changed.notify_all()

    @property
    def _is_due(self) -> bool:
        return self._is_full or self._written >= max(1, self._limit_bytes // WRITTEN_PARTS)

    def close(self, timeout_seconds: float = 1.0) -> None:
        """End the thread, unless it hangs in a call to the store."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_due)
                if self._closed:
                    return
                self._written, is_full, self._is_full = 0, self._is_full, False
            try:
                removed = sweep(self._store, self._limit_bytes, is_full=is_full)
            except TierError as error:
                logger.warning("kv-offload: the remote store could not be swept: %s", error)
            else:
                logger.debug("kv-offload: %d bytes of the remote store were removed", removed)
