"""Slots that requests asked to retain: held against eviction until they expire.

If several requests retain a slot, the latest expiry counts. Retained slots may take a limited share
of host memory, and those of one owner a limited share as well. Slots for which there is no room are
not retained, but stored and loaded as usual.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.owners import Owners
from kv_offload.cache.slots import Slots
from kv_offload.hints import Keep

SWEPT_PER_STEP, RELEASED_PER_STEP = 4096, 1024
"""Maximum number of slots that one step reads, and of expired ones that it releases; the rest
follows in later steps."""

NEVER = np.iinfo(np.int32).max


class Retention:
    """Holds slots of `manager`, each once, until `expire` or `drop` releases it.

    `max_share` and `max_owner_share` are shares of the manager's usable slots. `count` adds to a
    counter. Once a second, all slots are swept for those that have expired, over several steps.
    """

    def __init__(
        self,
        manager: CacheManager,
        max_share: float,
        max_owner_share: float,
        count: Callable[[str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._count, self._clock = manager, count, clock
        self._max_share, self._max_owner_share = max_share, max_owner_share
        self.slots = 0
        """Number of retained slots."""
        self._expires_of = np.full(manager.num_slots, NEVER, np.int32)  # by slot, a second
        self._owners = Owners(manager)
        # The second for which slots are swept, from the last one; those below `_unswept` follow.
        self._second = self._unswept = 0
        # By slot that is being written: how to retain it once the write has ended.
        self._pending: dict[int, Keep] = {}

    def keep(self, slots: Slots, keep: Keep) -> None:
        """Retain distinct slots that have keys; slots that are being written follow in `stored`."""
        keys = self._manager.readable_keys(slots)
        readable = np.array([key is not None for key in keys], bool)
        for slot in slots[~readable].tolist():
            before = self._pending.get(slot, keep)
            self._pending[slot] = max(before, keep, key=lambda one: one.seconds)
        self._retain(slots[readable], keep)

    def stored(self, slots: Slots) -> None:
        """Retain those of `slots` that waited for a transfer, which has now succeeded or failed."""
        if not self._pending:
            return
        wished: dict[Keep, list[int]] = {}
        for slot in slots.tolist():
            keep = self._pending.pop(slot, None)
            if keep is not None:
                wished.setdefault(keep, []).append(slot)
        for keep, names in wished.items():
            ended = np.array(names, np.int32)
            keys = self._manager.readable_keys(ended)  # None if the store failed
            self._retain(ended[[key is not None for key in keys]], keep)

    def _retain(self, slots: Slots, keep: Keep) -> None:
        """Hold readable slots for which there is room; later ends replace earlier ones."""
        second, owner = math.ceil(self._clock() + keep.seconds), keep.owner or ""
        before = self._expires_of[slots]
        fresh = slots[before == NEVER]
        kept = fresh[: self._room(owner)]
        self._count("unretained_slots", len(fresh) - len(kept))
        if len(kept):
            self._manager.prepare_copy(kept)
            self._owners.give(owner, kept)
            self.slots += len(kept)
        self._expires_of[kept] = second
        self._expires_of[slots[before < second]] = second

    def _room(self, owner: str) -> int:
        """Return how many more slots an owner may retain."""
        usable = self._manager.usable_slots
        own_room = int(self._max_owner_share * usable) - self._owners.slots_of(owner)
        return max(0, min(own_room, int(self._max_share * usable) - self.slots))

    def expire(self) -> None:
        """Release expired slots, a bounded number per call, and the last ones first."""
        if not self._unswept:
            if not self.slots or (second := int(self._clock())) == self._second:
                return  # true in most steps
            self._second, self._unswept = second, self._manager.usable_slots
        first = max(0, self._unswept - SWEPT_PER_STEP)
        expired = np.flatnonzero(self._expires_of[first : self._unswept] <= self._second) + first
        self._unswept = first
        if len(expired) > RELEASED_PER_STEP:
            expired = expired[-RELEASED_PER_STEP:]
            self._unswept = int(expired[0])
        if len(expired):
            self._release(expired.astype(np.int32))

    def _release(self, slots: Slots) -> None:
        self._expires_of[slots] = NEVER
        self.slots -= len(slots)
        self._owners.take(slots)
        self._manager.complete_load(slots)

    def drop(self) -> None:
        """Release all slots and drop pending ones; called before the manager is reset."""
        self._release(np.flatnonzero(self._expires_of < NEVER).astype(np.int32))
        self._pending.clear()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        held = np.flatnonzero(self._expires_of < NEVER).astype(np.int32)
        assert not self._manager.idle(held).any(), "a retained slot is not held"
        owned = sum(int(its.sum()) for share, its in self._owners.split(held) if share is not None)
        assert self.slots == len(held) == owned, "retained slots are counted wrongly"
        self._owners.check_integrity()
