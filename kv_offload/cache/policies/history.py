"""Remembers the buckets of keys that have no slot, as far as there is room."""

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
"""2**64 over the golden ratio: it spreads Python's hash of an integer, which is that integer."""

MIN_BITS = 6

_ENTRY = np.dtype([("hash", np.uint64), ("bucket", np.int64)])
"""An entry of the table; it is empty if its bucket is 0."""

PAGE_ENTRIES = mmap.PAGESIZE // _ENTRY.itemsize


def hash_keys(keys: Sequence[Key]) -> Hashes:
    """Return a hash of each key with well mixed upper bits."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
    hashes *= _SPREAD
    return hashes


class History:
    """A table with one possible place per key; the last key that was put into a place stays.

    Keys with the same hash count as one key, which costs a wrong guess, never a wrong block. Each
    key costs a single read of uncached memory, because hash and bucket are adjacent.
    """

    def __init__(self, keys_per_slot: int, slots: int) -> None:
        """Make room for `keys_per_slot * slots` keys, rounded up to a power of two."""
        bits = max(MIN_BITS, (keys_per_slot * slots - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._table = _small_pages(1 << bits)
        self._hashes, self._buckets = self._table["hash"], self._table["bucket"]
        self._is_empty = True
        self._per_slot = -(-(1 << bits) // slots)
        self._touched = 0

    def touch(self, slots: int) -> None:
        """Fault in the memory that the table will need for this many more slots.

        A page fault takes a microsecond, as much as all other work for a key, and in an untouched
        table each key of a prompt would cost one.
        """
        if self._touched < len(self._buckets):
            end = self._touched + slots * self._per_slot
            self._buckets[self._touched : end : PAGE_ENTRIES] += 0
            self._touched = end

    def __len__(self) -> int:
        """Number of known keys, in O(places)."""
        return int(np.count_nonzero(self._buckets))

    def take(self, hashes: Hashes) -> Buckets:
        """Return the bucket of each key, 0 if it is unknown, and drop these keys."""
        if self._is_empty:
            return np.zeros(len(hashes), np.int64)
        places = (hashes >> self._shift).view(np.int64)
        same = self._hashes[places] == hashes
        if not same.any():  # common for new prompts
            return np.zeros(len(hashes), np.int64)
        found = np.where(same, self._buckets[places], 0)
        self._buckets[places[same]] = 0
        return found

    def put(self, hashes: Hashes, buckets: Buckets) -> Buckets:
        """Remember keys with their buckets; return the buckets of the keys that they replaced."""
        self._is_empty = False
        places, order = hashes >> self._shift, np.arange(len(hashes))
        forgotten = self._buckets[places]
        # Of several keys for one place the last stays: its index is read back.
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

    Keys hash to random places. With the huge pages that NumPy asks for, the first few hundred keys
    would fault in the whole table at once: 0.4 s in a step, for a million slots.
    """
    memory = mmap.mmap(-1, places * _ENTRY.itemsize)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, _ENTRY)
