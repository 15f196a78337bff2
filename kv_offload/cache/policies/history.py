"""Remembers the bucket of keys that have no slot, as long as there is room."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies.density import Buckets
from kv_offload.cache.slots import Key

Hashes: TypeAlias = NDArray[np.uint64]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio. Python's hash of an integer is the integer."""

MIN_BITS = 6

_ENTRY = np.dtype([("hash", np.uint64), ("bucket", np.int64)])
"""A place of the table; bucket 0 says that nobody is here."""

PAGE_ENTRIES = mmap.PAGESIZE // _ENTRY.itemsize


def hash_keys(keys: Sequence[Key]) -> Hashes:
    """Return a number for each key, whose upper bits are well mixed."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
    hashes *= _SPREAD
    return hashes


class History:
    """A table in which each key has one place; the last that was put there has it.

    A place takes 16 bytes. Keys with the same hash are taken for one: that costs a wrong guess, not
    a wrong block.

    Keys lie anywhere, so each costs a read of memory that is in no cache. Hash and bucket lie side
    by side, to make that one.
    """

    def __init__(self, keys_per_slot: int, slots: int) -> None:
        """Make room for as many keys as the next power of two."""
        bits = max(MIN_BITS, (keys_per_slot * slots - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._table = _small_pages(1 << bits)
        self._hashes, self._buckets = self._table["hash"], self._table["bucket"]
        self._is_empty = True
        self._per_slot = -(-(1 << bits) // slots)
        self._touched = 0

    def touch(self, slots: int) -> None:
        """Take from the system the memory that the table will need for so many more slots.

        The system gives it a page at the first write, which takes a microsecond: as much as all
        else that is done for a key. Keys lie anywhere, so in a table without memory each key of a
        prompt would need a page. While host memory fills there are some for each prompt.
        """
        if self._touched < len(self._buckets):
            end = self._touched + slots * self._per_slot
            self._buckets[self._touched : end : PAGE_ENTRIES] += 0
            self._touched = end

    def __len__(self) -> int:
        """How many keys are known, in O(places)."""
        return int(np.count_nonzero(self._buckets))

    def take(self, hashes: Hashes) -> Buckets:
        """Return the bucket of each key, 0 where none is known, and forget these keys."""
        if self._is_empty:
            return np.zeros(len(hashes), np.int64)
        places = (hashes >> self._shift).view(np.int64)
        same = self._hashes[places] == hashes
        if not same.any():  # as mostly of what requests have just computed
            return np.zeros(len(hashes), np.int64)
        found = np.where(same, self._buckets[places], 0)
        self._buckets[places[same]] = 0
        return found

    def put(self, hashes: Hashes, buckets: Buckets) -> Buckets:
        """Remember keys with their buckets; return the buckets of those forgotten for them."""
        self._is_empty = False
        places, order = hashes >> self._shift, np.arange(len(hashes))
        forgotten = self._buckets[places]
        # The last of several for one place is kept: the value that it writes is read back.
        self._buckets[places] = order
        kept = self._buckets[places] == order
        if not kept.all():
            forgotten = np.concatenate((forgotten[kept], buckets[~kept]))
        self._buckets[places] = buckets
        self._hashes[places] = hashes
        known: Buckets = forgotten[forgotten > 0]
        return known


def _small_pages(places: int) -> NDArray[np.void]:
    """Return an empty table that takes memory as it is written, page by page.

    Keys lie anywhere. In the large pages that NumPy asks for, the first few hundred keys would
    bring all of the table at once: 0.4 s in a step, for a million slots.
    """
    memory = mmap.mmap(-1, places * _ENTRY.itemsize)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, _ENTRY)
