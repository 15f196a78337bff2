"""Slots that requests asked to retain: held against eviction until they expire.

A slot is in one lease at most. If several requests retain it, the highest priority counts, and
among these the latest expiry. All slots of a key have the same owner, because the salt of a request
is part of its keys.

Retained slots may take a limited share of host memory, and those of one owner a limited share as
well. When the share is full, leases of a lower priority are displaced, the owner's own first. Slots
for which this makes no room are not retained, but stored and loaded as usual.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_offload.cache.leases import Lease, LeaseHeap
from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slot_refcounts import distinct
from kv_offload.cache.slots import Slots
from kv_offload.hints import Keep

MIN_STALE = 64
"""A lease compacts its lists when they name more slots that it has lost than slots it has, plus
this."""

RELEASED_PER_STEP = 1024
"""Maximum number of expired slots that one step releases; the rest follows in later steps."""


def _by_strength() -> LeaseHeap:
    return LeaseHeap(lambda lease: lease.strength)


@dataclass(slots=True, eq=False)
class Owner:
    """The slots that one owner retains."""

    slots: int = 0
    weakest: LeaseHeap = field(default_factory=_by_strength)


class Retention:
    """Holds slots of `manager`, each once, until `expire`, `drop` or a stronger lease releases it.

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
        self._manager = manager
        self._max_share = max_share
        self._max_owner_share = max_owner_share
        self._count = count
        self._clock = clock
        self.slots = 0
        """Number of retained slots."""
        # Lease number by slot, 0 for none; zeros from the system take no memory until they are
        # written.
        self._lease_of = np.zeros(manager.num_slots, np.int64)
        self._next_number = 1
        self._leases: dict[int, Lease] = {}
        self._by_terms: dict[tuple[str | None, int, int], Lease] = {}
        self._soonest = LeaseHeap(lambda lease: (lease.expires,))
        self._weakest = _by_strength()
        self._owners: dict[str | None, Owner] = {}
        self._pending: dict[int, Keep] = {}
        """By slot that is being written: how to retain it once the write has ended."""

    def keep(self, slots: Slots, keep: Keep) -> None:
        """Retain distinct slots that have keys; slots that are being written follow in `stored`."""
        keys = self._manager.readable_keys(slots)
        readable = np.array([key is not None for key in keys], bool)
        for slot in slots[~readable].tolist():
            before = self._pending.get(slot, keep)
            self._pending[slot] = max(before, keep, key=lambda one: (one.priority, one.seconds))
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
        if not len(slots):
            return
        terms = keep.owner, keep.priority, math.ceil(self._clock() + keep.seconds)
        lease = self._by_terms.get(terms) or Lease(self._next_number, *terms)
        held = self._lease_of[slots] > 0
        if held.any():
            self._take_over(slots[held], lease)
        fresh = slots[~held]
        kept = fresh[: self._room(lease, len(fresh))]
        self._count("unretained_slots", len(fresh) - len(kept))
        if len(kept):
            self._manager.prepare_copy(kept)
            self.slots += len(kept)
            self._owners.setdefault(lease.owner, Owner()).slots += len(kept)
            self._add(lease, kept)

    def _take_over(self, slots: Slots, lease: Lease) -> None:
        """Move those of the retained slots whose leases are weaker to `lease`."""
        numbers, which = np.unique(self._lease_of[slots], return_inverse=True)
        others = [self._leases[number] for number in numbers.tolist()]
        # Compare owners as well: slots of two owners come only from a caller that violates the rule
        # on keys.
        is_weaker = [o.owner == lease.owner and o.strength < lease.strength for o in others]
        weaker = np.array(is_weaker)[which]
        counts = np.bincount(which[weaker], minlength=len(others)).tolist()
        if weaker.any():
            self._add(lease, slots[weaker])  # before `_lessen`, which compacts by `_lease_of`
        for other, moved in zip(others, counts, strict=True):
            self._lessen(other, moved)

    def _add(self, lease: Lease, slots: Slots) -> None:
        is_new = not lease.slots
        lease.parts.append(slots)
        lease.slots += len(slots)
        lease.named += len(slots)
        self._lease_of[slots] = lease.number
        if is_new:
            self._next_number += 1
            self._leases[lease.number] = lease
            self._by_terms[lease.owner, lease.priority, lease.expires] = lease
            for heap in (self._soonest, self._weakest, self._owners[lease.owner].weakest):
                heap.add(lease)

    def _lessen(self, lease: Lease, slots: int) -> None:
        """Subtract lost slots from a lease; a lease without slots has ended."""
        lease.slots -= slots
        if slots and not lease.slots:
            lease.parts.clear()
            del self._leases[lease.number]
            del self._by_terms[lease.owner, lease.priority, lease.expires]
        elif lease.named > 2 * lease.slots + MIN_STALE:
            lease.parts = [self._own(lease, lease.parts)]
            lease.named = len(lease.parts[0])

    def _own(self, lease: Lease, parts: Sequence[Slots]) -> Slots:
        """Return the slots in some parts of a lease that the lease still has, each once.

        A slot that moved to a stronger lease and returned is named twice.
        """
        named = np.concatenate(parts)
        return distinct(named[self._lease_of[named] == lease.number])

    def _room(self, lease: Lease, wanted: int) -> int:
        """Return how many of `wanted` new slots a lease may have; displaces weaker leases."""
        usable = self._manager.usable_slots
        owner = self._owners.get(lease.owner, Owner())
        own_room = int(self._max_owner_share * usable) - owner.slots
        if own_room < wanted:
            own_room += self._displace(owner.weakest, lease.priority, wanted - own_room)
        wanted = max(0, min(wanted, own_room))
        room = int(self._max_share * usable) - self.slots
        if room < wanted:
            room += self._displace(self._weakest, lease.priority, wanted - room)
        return max(0, min(wanted, room))

    def _displace(self, weakest: LeaseHeap, priority: int, wanted: int) -> int:
        """Release up to `wanted` slots of a lower priority; return how many were released."""
        displaced = 0
        while displaced < wanted:
            lease = weakest.first()
            if lease is None or lease.priority >= priority:
                break
            displaced += self._let_go(lease, wanted - displaced)
        self._count("displaced_slots", displaced)
        return displaced

    def expire(self) -> None:
        """Release expired slots, a bounded number per call."""
        if not self._leases:
            return  # true in most steps
        now, left = self._clock(), RELEASED_PER_STEP
        while left:
            lease = self._soonest.first()
            if lease is None or lease.expires > now:
                return
            left -= self._let_go(lease, left)

    def _let_go(self, lease: Lease, most: int) -> int:
        """Release up to `most` slots of a lease, last ones first; return how many were released.

        Takes as many parts as are needed to reach `most` slots, since parts from decodes have one
        slot each.
        """
        parts = [lease.parts.pop()]
        named = len(parts[0])
        while named < most and lease.parts:
            parts.append(lease.parts.pop())
            named += len(parts[-1])
        lease.named -= named
        own = self._own(lease, parts[::-1])
        gone = own[-most:]
        if len(gone) < len(own):
            lease.parts.append(own[: -len(gone)])
            lease.named += len(lease.parts[-1])
        self._release(gone)
        owner = self._owners[lease.owner]
        owner.slots -= len(gone)
        self._lessen(lease, len(gone))
        if not owner.slots:
            del self._owners[lease.owner]
        return len(gone)

    def _release(self, slots: Slots) -> None:
        self._lease_of[slots] = 0
        self.slots -= len(slots)
        self._manager.complete_load(slots)

    def drop(self) -> None:
        """Release all slots and drop what is pending; called before the manager is reset."""
        self._release(np.flatnonzero(self._lease_of).astype(np.int32))
        for lease in self._leases.values():
            lease.slots = 0  # the heaps drop a lease without slots
        for table in (self._leases, self._by_terms, self._owners, self._pending):
            table.clear()

    @property
    def named_slots(self) -> int:
        """Length of all leases' lists, including slots that moved on; measures their memory."""
        return sum(lease.named for lease in self._leases.values())

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        numbers, counts = np.unique(self._lease_of[self._lease_of > 0], return_counts=True)
        found = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        leases = self._leases
        assert found == {n: lease.slots for n, lease in leases.items()}, "a lease counts wrongly"
        assert self.slots == sum(found.values()), "retained slots are not counted right"
        for lease in leases.values():
            assert len(self._own(lease, lease.parts)) == lease.slots, "a lease has lost a slot"
            assert sum(map(len, lease.parts)) == lease.named
        for name, owner in self._owners.items():
            own_slots = sum(lease.slots for lease in leases.values() if lease.owner == name)
            assert owner.slots == own_slots > 0, f"slots of {name!r} are not counted right"
        assert {*self._owners} == {lease.owner for lease in leases.values()}
        held = np.flatnonzero(self._lease_of).astype(np.int32)
        assert self._manager.busy_slots(held).all(), "a retained slot is not held"
        assert len(self._by_terms) == len(leases), "a lease is found by no terms, or by two"
