"""What is remembered of keys that have no slot: the bucket of each, as long as there is room."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies.density import Buckets
from kv_offload.cache.slots import Key

Hashes: TypeAlias = NDArray[np.uint64]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio. Python's hash of an integer is the integer."""

MIN_BITS = 6


def hash_keys(keys: Sequence[Key]) -> Hashes:
    """Return a number for each key, whose upper bits are well mixed."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys)).view(np.uint64)
    hashes *= _SPREAD
    return hashes


class History:
    """A table in which each key has one place; the last that was put there has it.

    A place takes 16 bytes once it is used. Keys with the same hash are taken for one: that costs a
    wrong guess, not a wrong block.
    """

    def __init__(self, places: int) -> None:
        """Make room for as many keys as the next power of two."""
        bits = max(MIN_BITS, (places - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._hashes = _small_pages(1 << bits, np.uint64)
        self._buckets = _small_pages(1 << bits, np.int64)  # 0: nobody is here

    def __len__(self) -> int:
        """How many keys are known, in O(places)."""
        return int(np.count_nonzero(self._buckets))

    def take(self, hashes: Hashes) -> Buckets:
        """Return the bucket of each key, 0 where none is known, and forget these keys."""
        places = hashes >> self._shift
        found = np.where(self._hashes[places] == hashes, self._buckets[places], 0)
        if found.any():
            self._buckets[places[found > 0]] = 0
        return found

    def put(self, hashes: Hashes, buckets: Buckets) -> Buckets:
        """Remember keys with their buckets; return the buckets of those forgotten for them."""
        places = hashes >> self._shift
        # Of several for one place the last is kept: it comes first in reverse.
        kept = np.zeros(len(places), bool)
        kept[len(places) - 1 - np.unique(places[::-1], return_index=True)[1]] = True
        forgotten = np.concatenate((self._buckets[places[kept]], buckets[~kept]))
        self._hashes[places[kept]] = hashes[kept]
        self._buckets[places[kept]] = buckets[kept]
        known: Buckets = forgotten[forgotten > 0]
        return known


def _small_pages(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Return zeros that take memory as they are written, page by page.

    Keys lie anywhere. In the large pages that NumPy asks for, the first few hundred keys would
    bring all of the table at once: 0.4 s in a step, for a million slots.
    """
    memory = mmap.mmap(-1, count * np.dtype(dtype).itemsize)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype)
