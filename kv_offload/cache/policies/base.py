"""The interface of an eviction policy, which ranks slots and picks the next to reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import NO_SLOTS, Key, Runs, Slots
from kv_offload.errors import CapacityError


class EvictionPolicy(ABC):
    """Ranks the slots that have a key: at most `capacity` slots, numbered from 0.

    A held slot is not evicted, because it is being written or read. A new slot is held until its
    first `release`.

    `use` makes the last slot of a call the most recent. `add` and `replace` make the
    first one the most recent: their slots get the keys of a prefix, whose head should outlive its
    tail. `release` leaves the order alone.

    All operations take O(1) amortised time per slot. They trust `CacheManager`: it names each slot
    once, and to all but `add` only slots that have a key. A capacity below 1 is a `CapacityError`.
    """

    reads_runs = False
    """True if `admit` needs the runs of the new keys, and the slots before them.
    """

    has_newly_demotable = False
    """True if `take_newly_demotable` may have something to return."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise CapacityError(f"an eviction policy for {capacity} slots: give it 1 or more")
        self.capacity = capacity

    @abstractmethod
    def add(self, slots: Slots, keys: Sequence[Key]) -> None:
        """Give free slots new keys; the slots are held and the most recent."""

    @abstractmethod
    def replace(self, keys: Sequence[Key]) -> Slots:
        """Evict one key for each new key, `add` the slots for the new keys, and return the slots.

        If too few slots are not held, the keys at the end get none.
        """

    def admit(
        self, keys: Sequence[Key], runs: Runs, free: int, parents: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Say which keys without a slot are worth one; that is an access to all of them.

        Where the policy `reads_runs`, `parents` names the slot of the block before each run,
        -1 where it has none. Otherwise there may be no runs.

        Of a run, nothing after a key that is not worth a slot is worth one either; of one
        that `must` be stored all are. The keys that are worth one are those that `add` and
        `replace` are called for next, in order: `add` for the first `free` of them.
        """
        return np.ones(len(keys), bool)

    def should_demote(self, slots: Slots) -> NDArray[np.bool_]:
        """Say which slots with a key are likely enough used again to be written to a tier below."""
        return np.ones(len(slots), bool)

    def take_newly_demotable(self) -> Slots:
        """Return slots that have become worth keeping since the last call, by an access."""
        return NO_SLOTS

    def catch_up(self) -> None:  # noqa: B027 (most have nothing to do)
        """Do what waits, if there was no access since the last call: called once a step."""

    @abstractmethod
    def use(self, slots: Slots) -> None:
        """Count an access to slots, held or not, and make them the most recent.

        Until a slot's first `release` this is the access that added it, and is not counted again.
        """

    @abstractmethod
    def keep(self, slots: Slots) -> None:
        """Keep slots that are not held from being evicted until `release`: this is no access."""

    @abstractmethod
    def release(self, slots: Slots) -> None:
        """Let held slots be evicted again. This is not an access."""

    @abstractmethod
    def discard(self, slots: Slots) -> None:
        """Forget slots, held or not, and their keys, as if they had never been added."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots, held ones included, and everything learned from their keys."""

    @abstractmethod
    def resident(self) -> dict[int, bool]:
        """Return all slots that have a key, and whether they are held, in O(capacity)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(capacity)."""
