"""Evict the least recently used key."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.slots import NO_SLOTS, Key, Mask, Readers, Slots

SLACK_ENTRIES = 4096
"""This many stale entries never cause a sweep."""

WINDOW_ENTRIES = 64
"""A search for victims reads this many entries first, at least; then four times as many."""


class LRUPolicy(EvictionPolicy):
    """A single order by recency. The cheapest policy, and right if reuse comes soon or not at all.

    Each use appends an entry to a log, so whole batches are used at once. The last entry of a slot
    is live, its earlier ones are stale. A search for victims drops the entries that it passes. It
    parks slots that are being read or written: they have no entry until they are used or released.

    While the log is long, each use also sweeps a few entries, from the newest to the oldest. The
    sweep compacts the live entries at the new end, and the log then begins with them. So the log is
    never reorganised at once, and has at most 32 bytes per slot.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # Entry i is at i & mask. Between two sweeps the log has at most 2 entries per slot and the
        # slack. It grows by less than 2 per slot, and a third of the slack, until a sweep ends.
        self._mask = (1 << (4 * capacity + 2 * SLACK_ENTRIES).bit_length()) - 1
        self.clear()

    def clear(self) -> None:
        # Memory from the system costs nothing until it is written.
        self._log = np.empty(self._mask + 1, np.int32)
        self._entry_of = np.zeros(self.capacity, np.int64)  # last entry; 0: not resident
        self._parked: dict[int, int] = {}  # slots and their turns, which rise as slots are parked
        self._turns = itertools.count()
        self._next = 1
        # Entries from `_first` to `_unswept` are still to be swept. Those from there to `_swept`
        # are stale, because the sweep has moved their live ones to `_swept` and later.
        self._first = self._unswept = self._swept = 1

    def add(self, slots: Slots, keys: Sequence[Key]) -> None:
        self._append(slots[::-1])

    def replace(self, keys: Sequence[Key], readers: Readers) -> Slots:
        # Sorted, so that consecutive keys usually get consecutive slots.
        slots = np.sort(self._pop_oldest(len(keys), readers))
        self.add(slots, keys)
        return slots

    def use(self, slots: Slots) -> None:
        self._unpark(slots)
        self._append(slots)

    def release(self, slots: Slots) -> None:
        if back := self._unpark(slots):
            self._first -= len(back)
            self._write(self._first, np.array(back, np.int32))

    def discard(self, slots: Slots) -> None:
        self._entry_of[slots] = 0
        self._unpark(slots)

    def _unpark(self, slots: Slots) -> list[int]:
        """Take out those of `slots` that are parked; return them in the order of their parking."""
        if not self._parked:
            return []
        parked = sorted(self._parked.keys() & slots.tolist(), key=self._parked.__getitem__)
        for slot in parked:
            del self._parked[slot]
        return parked

    def _append(self, slots: Slots) -> None:
        self._write(self._next, slots)
        self._next += len(slots)
        if self._next - self._first > 2 * self.capacity + SLACK_ENTRIES:
            self._sweep(4 * len(slots))

    def _write(self, first: int, slots: Slots) -> None:
        entries = np.arange(first, first + len(slots))
        self._log[entries & self._mask] = slots
        self._entry_of[slots] = entries

    def _read(self, first: int, last: int) -> tuple[Slots, Mask]:
        """Return the slots of entries `first` to `last` (exclusive), and which entries are live."""
        entries = np.arange(first, last)
        slots = self._log[entries & self._mask]
        return slots, self._entry_of[slots] == entries

    def _pop_oldest(self, count: int, readers: Readers) -> Slots:
        """Remove from the log up to `count` of the least recent idle slots."""
        victims: list[Slots] = []
        window = max(count, WINDOW_ENTRIES)
        while count and self._first < self._next:
            slots, live = self._read(self._first, min(self._first + window, self._next))
            idle = live & (readers[slots] == 0)
            wanted = np.flatnonzero(idle)[:count]
            passed = len(slots) if len(wanted) < count else int(wanted[-1]) + 1
            if len(wanted) < passed:
                parked = slots[:passed][(live & ~idle)[:passed]].tolist()
                self._parked.update(zip(parked, self._turns, strict=False))
            victims.append(slots[wanted])
            count -= len(wanted)
            window *= 4
            self._first += passed
            self._skip_swept()
        return victims[0] if len(victims) == 1 else np.concatenate([NO_SLOTS, *victims])

    def _sweep(self, count: int) -> None:
        """Compact the live entries among the next `count` towards the newest."""
        if self._unswept == self._first:
            self._unswept = self._swept = self._next
        first = max(self._first, self._unswept - count)
        slots, live = self._read(first, self._unswept)
        moved = slots[live]
        self._unswept = first
        self._swept -= len(moved)
        self._write(self._swept, moved)
        self._skip_swept()

    def _skip_swept(self) -> None:
        if self._unswept <= self._first:
            self._first = self._unswept = self._swept = max(self._first, self._swept)

    def resident(self) -> list[int]:
        slots: list[int] = np.flatnonzero(self._entry_of).tolist()
        return slots

    def order(self) -> Slots:
        """Return the slots that are not parked, from the least to the most recent, in O(n)."""
        slots, live = self._read(self._first, self._next)
        return slots[live]

    def check_integrity(self, readers: Readers) -> None:
        slots = self.resident()
        assert len(slots) <= self.capacity, f"{len(slots)} slots exceed capacity {self.capacity}"
        assert readers[[*self._parked]].all(), "an idle slot is parked"
        listed = [*self.order().tolist(), *self._parked]
        assert sorted(listed) == slots, "a slot is lost, or listed and parked"
        assert self._next - self._first <= len(self._log), "the log has overwritten entries"
        assert self._first <= self._unswept <= self._swept <= self._next, "a sweep went too far"
