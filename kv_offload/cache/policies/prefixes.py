"""Which block stands behind which: a block is of use only while all before it are kept.

So a block is not evicted before the one behind it. What the traffic teaches of their classes does
not see to that: the head of a prompt may be of a class that is worth less than its tail's, and
without the head the tail only takes room.

Of several blocks behind one the last that was stored counts. The others came with earlier accesses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import Slots

FIRST = -1
"""Stands for the slot before a block that has none before it."""

ROUNDS = 8
"""How often a tail is followed over stretches of a list whose slots do not follow each other. If
this is too few, a head leaves before its tail, as it would have without this module."""


class PrefixOrder:
    """By slot: the slot of the block before it, and of the last that was stored behind it.

    A link counts as long as both sides name each other. A slot that gets another key names others,
    so nobody has to take links apart.
    """

    def __init__(self, bucket_of: NDArray[np.int64]) -> None:
        """`bucket_of` is 0 for slots without a key, shape `(capacity,)`, and others write it."""
        self._bucket_of = bucket_of
        # Numbers of slots from 1 on, 0 for none: zeros take no memory until they are written.
        self._before = np.zeros(len(bucket_of), np.int32)
        self._behind = np.zeros(len(bucket_of) + 1, np.int32)  # the last is of FIRST, and not read
        self._place = np.zeros(len(bucket_of), np.int32)  # only within `split`

    def link(self, slots: Slots, before: NDArray[np.int64]) -> None:
        """Take note of the slot before each of `slots`, which are about to get new keys.

        No slot is named that has lost its key, so no block is behind itself.
        """
        self._behind[slots] = 0
        self._before[slots] = before + 1
        self._behind[before] = slots + 1

    def split(self, slots: Slots) -> tuple[Slots, Slots]:
        """Return those that can leave in this order, no head before its tail, and the others."""
        behind = self._behind[slots] - 1
        blocked = (behind >= 0) & (self._before[behind] == slots + 1)
        blocked &= self._bucket_of[behind] > 0
        if not blocked.any():
            return slots, slots[:0]
        # Where the block behind leaves earlier in this list, it decides for those before it.
        places = np.arange(len(slots), dtype=np.int32)
        self._place[slots] = places
        place = np.where(blocked, self._place[behind], 0)
        place[place >= len(slots)] = 0
        listed = blocked & (slots[place] == behind) & (place < places)
        blocked &= ~listed
        stretch = np.maximum.accumulate(np.where(listed & (place == places - 1), 0, places))
        for _ in range(ROUNDS):
            blocked = np.maximum.accumulate(np.where(blocked, places, -1)) >= stretch
            more = listed & blocked[place] & ~blocked
            if not more.any():
                break
            blocked |= more
        return slots[~blocked], slots[blocked]
