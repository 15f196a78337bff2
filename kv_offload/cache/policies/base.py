"""The interface of an eviction policy, which ranks slots and picks the next to reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kv_offload.cache.slots import NO_SLOTS, Key, Mask, Readers, Runs, Slots
from kv_offload.errors import CapacityError


class EvictionPolicy(ABC):
    """Ranks the slots that have a key: at most `capacity` slots, numbered from 0.

    `readers`, shape `(capacity,)`, is not 0 for slots that are being read or written, which are not
    evicted.

    `use` makes the last slot of a call the most recent, `add` and `replace` the first one: the head
    of a prefix should outlive its tail.

    All operations take O(1) amortised time per slot. They rely on `CacheManager` to name each slot
    once, and to name only slots that have a key, except in `add`. Raises `CapacityError` for a
    capacity below 1.
    """

    reads_runs = False
    """True if `admit` needs the runs of the new keys, and the slots of their parents."""

    has_newly_demotable = False
    """True if `take_newly_demotable` may have something to return."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise CapacityError(f"an eviction policy for {capacity} slots: give it 1 or more")
        self.capacity = capacity

    @abstractmethod
    def add(self, slots: Slots, keys: Sequence[Key]) -> None:
        """Give new keys to free slots, which become the most recent."""

    @abstractmethod
    def replace(self, keys: Sequence[Key], readers: Readers) -> Slots:
        """Evict one key for each new key, `add` the slots for the new keys, and return the slots.

        If too few slots can be evicted, the last keys get none.
        """

    def admit(self, keys: Sequence[Key], runs: Runs, free: int, parents: Sequence[int]) -> Mask:
        """Return which keys without a slot are worth one; this is an access to all of them.

        If the policy `reads_runs`, `parents` names the slot of the block before each run, -1 if
        there is none. If a key of a run is not worth a slot, neither are the keys after it; all
        keys of a run that `must` be stored are. Next, `add` and `replace` are called for the worthy
        keys in order, `add` for the first `free` of them.
        """
        return np.ones(len(keys), bool)

    def should_demote(self, slots: Slots) -> Mask:
        """Return which slots with a key are likely enough to be reused to be worth demoting."""
        return np.ones(len(slots), bool)

    def take_newly_demotable(self) -> Slots:
        """Return slots that an access since the last call may have made worth demoting.

        Takes O(capacity), a few nanoseconds per hundred slots.
        """
        return NO_SLOTS

    def catch_up(self) -> None:  # noqa: B027 (most have nothing to do)
        """Do deferred work if there was no access since the last call; called once a step."""

    @abstractmethod
    def use(self, slots: Slots) -> None:
        """Count an access to slots and make them the most recent."""

    @abstractmethod
    def release(self, slots: Slots) -> None:
        """Consider slots again that are no longer read or written; not an access."""

    @abstractmethod
    def discard(self, slots: Slots) -> None:
        """Drop slots and their keys, as if they had never been added."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all slots, and everything learned from their keys."""

    @abstractmethod
    def resident(self) -> list[int]:
        """Return the slots with a key, ascending, in O(capacity)."""

    @abstractmethod
    def check_integrity(self, readers: Readers) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(capacity)."""
