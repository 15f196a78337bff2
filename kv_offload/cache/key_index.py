"""The index of a directory: finds the slots that may hold a key; a miss reads one cache line.

The hash of a key selects one of as many buckets as there are slots. A bucket has `WAYS` tags of 16
bits, which are 0 without a key, and `WAYS` slot numbers in a separate array. About one bucket in a
million has more keys than ways, and peers miss one of its keys.

The index is only a hint: readers verify the entry of a slot. One process writes it, in no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import Slots

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
        """Return the names of keys; fast if all keys have the same length."""
        lengths = [*map(len, keys)]
        distinct = {*lengths}
        if len(distinct) == 1:
            return cls.of_words(_pad(b"".join(keys), len(keys), lengths[0]))
        words = np.zeros((len(keys), NAME_WORDS), np.uint64)
        for length in distinct:
            own = [row for row, other in enumerate(lengths) if other == length]
            words[own] = _pad(b"".join([keys[row] for row in own]), len(own), length)
        return cls.of_words(words)

    @classmethod
    def of_words(cls, words: NDArray[np.uint64]) -> Names:
        """Return names with their hashes."""
        return cls(words, _mix(words))

    def keys(self) -> list[bytes]:
        """Return the keys."""
        text = self.words.tobytes()
        step = 8 * NAME_WORDS
        return [text[at + 1 : at + max(1, text[at])] for at in range(0, len(text), step)]


def hash_keys(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return the hashes of keys, equal to those of `Names`; takes 40 ns per key.

    The keys may have at most two lengths, as vLLM's do: with and without a cache group. With more
    lengths, some hashes may belong to no key.
    """
    text = b"".join(keys)
    if keys and len(keys[0]) * len(keys) == len(text):
        return _mix(_pad(text, len(keys), len(keys[0])))
    return Names.of(keys).hashes


def _pad(text: bytes, count: int, length: int) -> NDArray[np.uint64]:
    """Return the words of the names of `count` keys of `length` bytes, which follow each other."""
    names = np.zeros((count, 8 * NAME_WORDS), np.uint8)
    if length <= KEY_BYTES:
        names[:, 0] = length + 1
        names[:, 1 : length + 1] = np.frombuffer(text, np.uint8).reshape(count, length)
    return names.view("<u8")


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    hashes: NDArray[np.uint64] = words @ _FACTORS
    hashes ^= hashes >> _HALF
    hashes *= _FACTORS[0]
    hashes ^= hashes >> np.uint64(29)
    return hashes


class KeyIndex:
    """The buckets: `tags`, uint16, and `cells`, uint32, slot numbers; both `(num_slots, WAYS)`."""

    def __init__(self, tags: NDArray[np.uint16], cells: NDArray[np.uint32]) -> None:
        self._tags, self._cells = tags, cells
        self.words = tags.view("<u8")
        """The tags, four at a time."""

    def slots(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the slots in which keys may be, and for each of these the row of the key."""
        buckets = _buckets(hashes, len(self._tags))
        rows, ways = np.nonzero(self._tags[buckets] == _tags(hashes)[:, None])
        slots = self._cells[buckets[rows], ways].astype(np.intp)
        valid = slots < len(self._tags)
        return slots[valid], rows[valid]

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


def may_have(indices: Sequence[KeyIndex], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return for each index and key whether the key may be there, shape `(indices, keys)`.

    True for one absent key in 65,536; never False for a key that is there. Reads one cache line per
    index and key.
    """
    tags = _tags(hashes).repeat(WAYS)
    words = TAG_BYTES // 8
    read = np.empty((len(indices), len(hashes), words), np.uint64)
    buckets = {count: _buckets(hashes, count) for count in {len(one.words) for one in indices}}
    for row, index in zip(read, indices, strict=True):
        index.words.take(buckets[len(index.words)], axis=0, out=row, mode="clip")
    fits = read.reshape(len(indices), len(hashes) * words).view("<u2") == tags
    # The ways of a bucket are eight bytes, which are compared at once.
    maybe: NDArray[np.bool_] = fits.view("<u8") != 0
    return maybe


def _buckets(hashes: NDArray[np.uint64], count: int) -> NDArray[np.intp]:
    return (((hashes >> _HALF) * np.uint64(count)) >> _HALF).astype(np.intp)


def _tags(hashes: NDArray[np.uint64]) -> NDArray[np.uint16]:
    tags: NDArray[np.uint16] = np.maximum(hashes & _TAG, np.uint64(1)).astype(np.uint16)
    return tags
