"""What an eviction policy is: it ranks the slots of the host cache and picks the next to reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_offload.cache.slots import Key, Slots
from kv_offload.errors import CapacityError


class EvictionPolicy(ABC):
    """Ranks the resident slots, those that have a key; at most `capacity` slots from 0 upwards.

    A slot becomes resident through `add` or `replace`, at the moment its store is planned, and is
    held from then on: the policy sees an admission at the time of the access that caused it, and a
    slot that is being written is no victim. `release` makes it a candidate. A slot that is being
    read is held again. Of several slots the one used last is the most recent, and within one call
    the last of `slots`, but the first of those that `add` and `replace` make resident: they come in
    prefix order, and a head should outlive its tail. `release` does not change that order.

    All operations take O(1) amortised time per slot. They trust their caller, `CacheManager`: apart
    from `add`, they are for resident slots only, and only `use` may be given a slot twice.

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
        """Evict the key of a slot that is not held for each new one; `add` and return the slots.

        One call, because the choice of the slot may depend on the key that comes in. Where fewer
        slots can be evicted, the keys at the end get none.
        """

    @abstractmethod
    def use(self, slots: Slots) -> None:
        """Count an access to slots, held or not, and make them the most recent.

        Until a slot's first `release` that access is the one that added it, not counted again.
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
        """Check all invariants, in O(capacity). Raises `AssertionError` naming the first broken."""
