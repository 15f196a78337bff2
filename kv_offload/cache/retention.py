"""Slots that requests asked to retain: held against eviction until they expire.

If several requests retain a slot, the latest expiry counts. All slots of a key have the same owner,
because the salt of a request is part of its keys. Retained slots may take a limited share of host
memory, and those of one owner a limited share as well. Slots for which there is no room are not
retained, but stored and loaded as usual.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slots import Slots
from kv_offload.hints import Keep

MIN_STALE = 64
"""A lease compacts its parts when they name more slots that it has lost than slots it has, plus
this."""

RELEASED_PER_STEP = 1024
"""Maximum number of expired slots that one step releases; the rest follows in later steps."""


Terms: TypeAlias = tuple[int, str]
"""The second at which a lease ends, and its owner."""


@dataclass(slots=True, eq=False)
class Lease:
    """The slots that one owner retains until the same second.

    `parts` holds `named` slots, which may include slots that have since moved to later leases.
    """

    parts: list[Slots] = field(default_factory=list)
    slots: int = 0
    named: int = 0


class Retention:
    """Holds slots of `manager`, each once, until `expire` or `drop` releases it.

    `max_share` and `max_owner_share` are shares of the manager's usable slots. `count` adds to a
    counter. All operations except `drop` take O(1) amortised time per slot, and O(log n) per lease.
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
        # By slot, the second at which it expires, 0 for none; zeros from the system take no memory
        # until they are written.
        self._expires_of = np.zeros(manager.num_slots, np.int64)
        # By the second at which they end and their owner; these terms also as a heap.
        self._leases: dict[Terms, Lease] = {}
        self._ends: list[Terms] = []
        self._owned: Counter[str] = Counter()
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
        """Put readable slots into the lease with these terms."""
        owner = keep.owner or ""  # vLLM's keys are the same without a salt and with an empty one
        # At least a second from now: a slot never returns to a lease.
        second = math.ceil(self._clock() + max(1.0, keep.seconds))
        before = self._expires_of[slots]
        fresh = slots[before == 0]
        kept = fresh[: self._room(owner)]
        self._count("unretained_slots", len(fresh) - len(kept))
        if len(kept):
            self._manager.prepare_copy(kept)
            self.slots += len(kept)
            self._owned[owner] += len(kept)
        is_earlier = (before > 0) & (before < second)  # vLLM's keys differ by salt: same owner
        self._add((second, owner), np.concatenate((slots[is_earlier], kept)))
        earlier, counts = np.unique(before[is_earlier], return_counts=True)
        for other, count in zip(earlier.tolist(), counts.tolist(), strict=True):
            self._lessen((other, owner), count)

    def _room(self, owner: str) -> int:
        """Return how many more slots an owner may retain."""
        usable = self._manager.usable_slots
        own_room = int(self._max_owner_share * usable) - self._owned[owner]
        return max(0, min(own_room, int(self._max_share * usable) - self.slots))

    def _add(self, terms: Terms, slots: Slots) -> None:
        if not len(slots):
            return
        if terms not in self._leases:
            self._leases[terms] = Lease()
            heapq.heappush(self._ends, terms)
        lease = self._leases[terms]
        lease.parts.append(slots)
        lease.slots += len(slots)
        lease.named += len(slots)
        self._expires_of[slots] = terms[0]

    def _lessen(self, terms: Terms, slots: int) -> None:
        """Subtract lost slots from a lease; a lease without slots has ended."""
        lease = self._leases[terms]
        lease.slots -= slots
        if not lease.slots:
            del self._leases[terms]
        elif lease.named > 2 * lease.slots + MIN_STALE:
            lease.parts, lease.named = [self._own(terms[0], lease.parts)], lease.slots

    def _own(self, second: int, parts: Sequence[Slots]) -> Slots:
        """Return the slots in some parts of a lease that the lease still has."""
        named = np.concatenate(parts)
        own: Slots = named[self._expires_of[named] == second]
        return own

    def expire(self) -> None:
        """Release expired slots, a bounded number per call."""
        if not self._ends:
            return  # true in most steps
        now, left = self._clock(), RELEASED_PER_STEP
        while left and self._ends and self._ends[0][0] <= now:
            if self._ends[0] in self._leases:
                left -= self._let_go(self._ends[0], left)
            else:
                heapq.heappop(self._ends)

    def _let_go(self, terms: Terms, most: int) -> int:
        """Release up to `most` slots of a lease, last ones first; return how many were released."""
        (second, owner), lease = terms, self._leases[terms]
        # As many parts as are needed, since those of decodes have one slot each.
        parts = [lease.parts.pop()]
        named = len(parts[0])
        while named < most and lease.parts:
            parts.append(lease.parts.pop())
            named += len(parts[-1])
        own = self._own(second, parts[::-1])
        gone, rest = own[-most:], own[:-most]
        lease.parts.append(rest)
        lease.named += len(rest) - named
        self._release(gone)
        self._owned[owner] -= len(gone)
        if not self._owned[owner]:
            del self._owned[owner]
        self._lessen(terms, len(gone))
        return len(gone)

    def _release(self, slots: Slots) -> None:
        self._expires_of[slots] = 0
        self.slots -= len(slots)
        self._manager.complete_load(slots)

    def drop(self) -> None:
        """Release all slots and drop pending ones; called before the manager is reset."""
        self._release(np.flatnonzero(self._expires_of).astype(np.int32))
        for table in (self._leases, self._ends, self._owned, self._pending):
            table.clear()

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        held = np.flatnonzero(self._expires_of).astype(np.int32)
        assert not self._manager.idle(held).any(), "a retained slot is not held"
        assert self.slots == len(held) == self._owned.total(), "retained slots are counted wrongly"
        assert self._leases.keys() <= {*self._ends}, "a lease never expires"
        owned: Counter[str] = Counter()
        for (second, owner), lease in self._leases.items():
            owned[owner] += lease.slots
            assert len({*self._own(second, lease.parts).tolist()}) == lease.slots > 0
            assert sum(map(len, lease.parts)) == lease.named <= 2 * lease.slots + MIN_STALE
        assert owned == self._owned, "the slots of an owner are counted wrongly"
