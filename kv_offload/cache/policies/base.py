"""What an eviction policy is: it ranks the slots of the host cache and picks the next to reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_offload.cache.slots import Key, Slots
from kv_offload.errors import CapacityError


class EvictionPolicy(ABC):
    """Ranks the resident slots, those that have a key; at most `capacity` slots from 0 upwards.

    A slot becomes resident when its store is prepared. It is held from then on: a slot that is
    being written or read must not be evicted. `release` lets it be evicted.

    Of the slots of one call, the last that `use` or `hold` is given becomes the most recent, but
    the first that `add` or `replace` is: they get keys in prefix order, and a head should outlive
    its tail. `release` does not change the order.

    All operations take O(1) amortised time per slot. They trust their caller, `CacheManager`: it
    names each slot once, and only resident ones to all but `add`.

    Raises `CapacityError` for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise CapacityError(f"an eviction policy for {capacity} slots: give it 1 or more")
        self.capacity = capacity

    @abstractmethod
    def add(self, slots: Slots, keys: Sequence[Key]) -> None:
        """Make free slots resident with new keys, held and the most recent."""

    @abstractmethod
    def replace(self, keys: Sequence[Key]) -> Slots:
        """Evict one key for each new key, `add` the slots for the new keys, and return the slots.

        If too few slots are not held, the keys at the end get none.
        """

    @abstractmethod
    def use(self, slots: Slots) -> None:
        """Count an access to slots, held or not, and make them the most recent.

        Until a slot's first `release` this is the access that added it, and is not counted again.
        """

    @abstractmethod
    def hold(self, slots: Slots) -> None:
        """Do as `use`, and keep slots that are not held from being evicted until `release`."""

    @abstractmethod
    def release(self, slots: Slots) -> None:
        """Let held slots be evicted again. This is not an access."""

    @abstractmethod
    def discard(self, slots: Slots) -> None:
        """Forget slots, held or not, and their keys, as if they had never been added."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots, held ones included, and everything learnt from their keys."""

    @abstractmethod
    def resident(self) -> dict[int, bool]:
        """Return all resident slots and whether they are held, in O(capacity)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(capacity)."""
