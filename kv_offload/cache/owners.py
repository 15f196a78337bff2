"""Which tenant owns each slot, how many slots each tenant has, and in which order it used them.

A tenant is the requests of one `cache_salt`; "" stands for those without one. vLLM's keys are the
same without a salt and with an empty one, and differ by salt, so a key has one owner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slots import NO_SLOTS, Mask, Slots

WINDOWS = 64, 256, 1024, 4096
"""A search for the oldest slots of an owner reads as many entries of its log at a time, or as many
as are wanted. If all of these slots are held, later searches read the rest."""


@dataclass(slots=True, eq=False)
class Share:
    """The slots of one owner.

    `log[first:end]` has an entry for each use. The last entry of a slot is live.
    """

    owner: str
    number: int
    log: Slots
    slots: int = 0
    first: int = 0
    end: int = 0


class Owners:
    """The owners of a manager's slots. All operations take O(1) amortised time per slot."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        # By slot, 0 for none; zeros from the system take no memory until they are written.
        self._share_of = np.zeros(manager.num_slots, np.int64)
        # By slot with an owner: its live entry in the owner's log.
        self._entry_of = np.zeros(manager.num_slots, np.int64)
        self._shares: dict[str, Share] = {}
        self._by_number: dict[int, Share] = {}
        self._next_number = 1

    def slots_of(self, owner: str) -> int:
        """Return how many slots an owner has."""
        return self._shares[owner].slots if owner in self._shares else 0

    def split(self, slots: Slots) -> Iterator[tuple[Share | None, Mask]]:
        """Yield each owner of `slots`, and which of them it has; None for slots without one."""
        numbers = self._share_of[slots]
        for number in np.unique(numbers).tolist():
            yield self._by_number.get(number), numbers == number

    def give(self, owner: str, slots: Slots) -> None:
        """Give distinct slots to an owner, which uses them now, the last one last."""
        if not len(slots):
            return
        self.take(slots)
        share = self._shares.get(owner)
        if share is None:
            share = Share(owner, self._next_number, NO_SLOTS)
            self._shares[owner] = self._by_number[share.number] = share
            self._next_number += 1
        share.slots += len(slots)
        self._share_of[slots] = share.number
        self._append(share, slots)

    def use(self, slots: Slots) -> None:
        """Note that slots were used by their owners, the last one last."""
        for share, its in self.split(slots):
            if share is not None:
                self._append(share, slots[its])

    def _append(self, share: Share, slots: Slots) -> None:
        if share.end + len(slots) > len(share.log):
            live = share.log[share.first : share.end][self._live(share, share.first, share.end)]
            share.log = np.empty(2 * (len(live) + len(slots)) + WINDOWS[0], np.int32)
            share.first = share.end = 0
            self._append(share, live)
        entries = slice(share.end, share.end + len(slots))
        share.log[entries] = slots
        self._entry_of[slots] = np.arange(entries.start, entries.stop)
        share.end = entries.stop

    def _live(self, share: Share, first: int, end: int) -> Mask:
        """Return which of an owner's entries are live."""
        slots = share.log[first:end]
        live: Mask = self._share_of[slots] == share.number
        live &= self._entry_of[slots] == np.arange(first, end)
        return live

    def take(self, slots: Slots) -> None:
        """Take distinct slots from their owners, if they have any."""
        numbers, counts = np.unique(self._share_of[slots], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number:
                share = self._by_number[number]
                share.slots -= count
                if not share.slots:
                    del self._shares[share.owner], self._by_number[number]
        self._share_of[slots] = 0

    def take_oldest(self, owner: str, count: int) -> Slots:
        """Take up to `count` idle slots from an owner, the least recently used first."""
        share, taken = self._shares[owner], [NO_SLOTS]
        for window in WINDOWS:
            if not count or not share.slots:
                break
            first, end = share.first, min(share.first + max(count, window), share.end)
            slots, live = share.log[first:end], self._live(share, first, end)
            idle = live & self._manager.idle(slots)
            wanted = np.flatnonzero(idle)[:count]
            passed = int(wanted[-1]) + 1 if len(wanted) == count else len(slots)
            share.first += passed
            # Held slots are read again after all others.
            self._append(share, slots[:passed][(live & ~idle)[:passed]])
            taken.append(slots[wanted])
            self.take(taken[-1])
            count -= len(wanted)
        return np.concatenate(taken)

    def clear(self) -> None:
        """Take all slots from their owners."""
        self._share_of[:] = 0
        self._shares.clear()
        self._by_number.clear()

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a count is wrong or a slot has no live entry."""
        numbers, counts = np.unique(self._share_of[self._share_of > 0], return_counts=True)
        found = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        assert found == {n: share.slots for n, share in self._by_number.items()}
        assert self._shares == {share.owner: share for share in self._by_number.values()}
        for share in self._shares.values():
            assert self._live(share, share.first, share.end).sum() == share.slots, "a slot is lost"
