"""Keeps a shared store below its bound: removes the objects that were used longest ago.

Any process may sweep at any time, also while others read, write or sweep. A reader whose object
goes finds it missing. Two sweeps that overlap remove the same objects, those of the same age and
older, so nothing more goes than with one. A process sweeps once for each part of the bound that it
has written: all engines together sweep as often as one that writes it all.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from kv_swap.errors import TierError

logger = logging.getLogger(__name__)

WRITTEN_PARTS = 64
"""A process sweeps after it has written one part in so many of the bound. So a store may exceed its
bound by one such part for each process that writes."""

LOW_PARTS = 16
"""A sweep leaves one part in so many of the bound free; one for a filesystem that is full,
though below its bound, as much of what was there."""

AGE_SECONDS = 16
"""Objects whose last uses lie in one such interval are equally old."""

AHEAD_SECONDS = 86_400.0
"""Clocks may differ by less. What is marked as used later than that counts as the oldest: else it
would take the place of all other objects until then."""


REMOVED_AT_ONCE = 256
"""Keys in one request to remove objects."""


class Entry(NamedTuple):
    """An object of a store: its key, its size, and when it was used or written, in seconds."""

    key: str
    nbytes: int
    used: float


class Sweepable(ABC):
    """The operations of a store that a sweep needs."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Yield all objects of all engines, in any order; raises `TierError`. May take minutes."""

    @abstractmethod
    def remove(self, keys: list[str]) -> None:
        """Remove objects, as far as they are there. Raises `TierError`."""


def sweep(store: Sweepable, limit_bytes: int, *, is_full: bool = False) -> int:
    """Remove the oldest objects of a store that has more than `limit_bytes`; return their bytes.

    One that `is_full` has as much as it may have, whatever its limit.
    Lists the store once, and once more if something goes: memory does not grow with the number of
    objects. Raises `TierError`.
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
    # All that is older goes, and of this interval as much as leaves `kept_bytes`.
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
    """A thread that sweeps once enough was written. Methods never wait but `close`."""

    def __init__(self, store: Sweepable, limit_bytes: int) -> None:
        self._store, self._limit_bytes = store, limit_bytes
        self._written = 0
        self._is_full = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def wrote(self, nbytes: int, *, is_full: bool = False) -> None:
        """Count bytes that were written; `is_full` says that there was no room for more."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._written = self._limit_bytes  # what is there has never been looked at
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
        """End the thread; one that hangs in a call of the store is left alone."""
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
