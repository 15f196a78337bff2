"""The index of a directory: finds the slots that may hold a key; a miss reads one cache line.

The hash of a key selects one of as many buckets as there are slots. A bucket has `WAYS` tags of 16
bits, which are 0 without a key, and `WAYS` slot numbers in a separate array. About one bucket in a
million has more keys than ways, and peers miss one of its keys.

The index is only a hint: readers verify the entry of a slot. One process writes it, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import Mask, Slots

NAME_WORDS = 5
KEY_BYTES = 8 * NAME_WORDS - 1
"""vLLM's keys have 20 or 36 bytes. A longer key is not published."""

WAYS = 8
TAG_BYTES, CELL_BYTES = 2 * WAYS, 4 * WAYS
"""Bytes of a bucket's tags, and of its slot numbers."""

_FACTORS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xFF51AFD7ED558CCD,
    ],
    np.uint64,
)
_HALF, _TAG = np.uint64(32), np.uint64(0xFFFF)


class Names(NamedTuple):
    """Keys as they are stored in entries, with their hashes.

    `words` is uint64 of shape `(n, NAME_WORDS)`: a byte with the length plus one, the key, and
    zeros. A key that is too long is all zeros. `hashes` is uint64 of shape `(n,)`.
    """

    words: NDArray[np.uint64]
    hashes: NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Names:
        """Return the names of keys; takes 40 ns per key if all have the same length.

        The keys have at most two lengths, as vLLM's do: with and without a cache group.
        """
        text = b"".join(keys)
        if keys and len(keys[0]) * len(keys) == len(text):
            return cls.of_words(_pad(text, len(keys), len(keys[0])))
        words = np.zeros((len(keys), NAME_WORDS), np.uint64)
        for length in {*map(len, keys)}:
            own = [row for row, key in enumerate(keys) if len(key) == length]
            words[own] = _pad(b"".join([keys[row] for row in own]), len(own), length)
        return cls.of_words(words)

    @classmethod
    def of_words(cls, words: NDArray[np.uint64]) -> Names:
        """Return names with their hashes."""
        hashes: NDArray[np.uint64] = words @ _FACTORS
        hashes ^= hashes >> _HALF
        hashes *= _FACTORS[0]
        hashes ^= hashes >> np.uint64(29)
        return cls(words, hashes)

    def keys(self) -> list[bytes]:
        """Return the keys."""
        text = self.words.tobytes()
        step = 8 * NAME_WORDS
        return [text[at + 1 : at + max(1, text[at])] for at in range(0, len(text), step)]


def same_words(words: NDArray[np.uint64], others: NDArray[np.uint64]) -> Mask:
    """Return for each name whether it equals the other one; both are `(n, NAME_WORDS)`."""
    same: Mask = reduce(np.bitwise_or, (words ^ others).T) == 0
    return same


def _pad(text: bytes, count: int, length: int) -> NDArray[np.uint64]:
    """Return the words of the names of `count` concatenated keys of `length` bytes each."""
    names = np.zeros((count, 8 * NAME_WORDS), np.uint8)
    if length <= KEY_BYTES:
        names[:, 0] = length + 1
        names[:, 1 : length + 1] = np.frombuffer(text, np.uint8).reshape(count, length)
    return names.view("<u8")


class KeyIndex:
    """The buckets: `tags`, uint16, and `cells`, uint32, slot numbers; both `(num_slots, WAYS)`."""

    def __init__(self, tags: NDArray[np.uint16], cells: NDArray[np.uint32]) -> None:
        self._tags, self._cells = tags, cells
        self._words = tags.view("<u8")  # four tags each

    def add(self, slots: Slots, hashes: NDArray[np.uint64]) -> None:
        """Add keys; in a full bucket, one of the keys is replaced."""
        buckets = _buckets(hashes, len(self._tags))
        tags, cells = _tags(hashes), slots.astype(np.uint32)
        for _ in range(WAYS):
            ways = (self._tags[buckets] == 0).argmax(axis=1)
            self._cells[buckets, ways], self._tags[buckets, ways] = cells, tags
            # If several keys share a bucket, only the last write survives.
            left = self._cells[buckets, ways] != cells
            if not left.any():
                return
            buckets, tags, cells = buckets[left], tags[left], cells[left]

    def remove(self, slots: Slots, hashes: NDArray[np.uint64]) -> None:
        """Remove keys from the index, if they are in it."""
        buckets = _buckets(hashes, len(self._tags))
        in_slots = self._cells[buckets] == slots.astype(np.uint32)[:, None]
        rows, ways = np.nonzero(in_slots & (self._tags[buckets] != 0))
        self._tags[buckets[rows], ways] = 0

    def clear(self) -> None:
        """Remove all keys."""
        self._tags[:] = 0


Candidates = tuple[NDArray[np.intp], NDArray[np.intp]]
"""Slots in which keys may be, and for each of these the row of its key."""


def candidates(indices: Sequence[KeyIndex], hashes: NDArray[np.uint64]) -> Iterator[Candidates]:
    """Yield for each index the slots in which keys may be; one for 65,536 absent keys.

    Never leaves out a slot whose key is in the index. Reads one cache line per index and key.
    """
    tags, buckets = _tags(hashes).repeat(WAYS), {}
    for index in indices:
        count = len(index._tags)
        if count not in buckets:
            buckets[count] = _buckets(hashes, count)
        read = index._words.take(buckets[count], axis=0)
        cells = np.flatnonzero(read.reshape(-1).view("<u2") == tags)
        if not len(cells):
            yield cells, cells
            continue
        rows, ways = cells // WAYS, cells % WAYS
        slots = index._cells[buckets[count][rows], ways].astype(np.intp)
        valid = slots < count
        yield slots[valid], rows[valid]


def _buckets(hashes: NDArray[np.uint64], count: int) -> NDArray[np.intp]:
    return (((hashes >> _HALF) * np.uint64(count)) >> _HALF).astype(np.intp)


def _tags(hashes: NDArray[np.uint64]) -> NDArray[np.uint16]:
    tags: NDArray[np.uint16] = np.maximum(hashes & _TAG, np.uint64(1)).astype(np.uint16)
    return tags
