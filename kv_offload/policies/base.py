"""What an eviction policy is: it ranks the slots of the host cache and picks the next to reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TypeAlias

from kv_offload.errors import CapacityError

Key: TypeAlias = Hashable
"""The name of a block's contents: opaque and hashable."""


class EvictionPolicy(ABC):
    """Ranks the resident slots, those that have a key; at most `capacity` slots from 0 upwards.

    A slot becomes resident through `add` or `replace`, at the moment its store is planned, and is
    held from then on: the policy sees an admission at the time of the access that caused it, and a
    slot that is being written is no victim. `release` makes it a candidate. A slot that is being
    read is held again. Of several slots the one used last is the most recent; `release` does not
    change that order.

    All operations take O(1) amortised time. They trust their caller, `CacheManager`: apart from
    `add`, they are for resident slots only.

    Raises `CapacityError` for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise CapacityError(f"an eviction policy for {capacity} slots: give it 1 or more")
        self.capacity = capacity

    @abstractmethod
    def add(self, slot: int, key: Key) -> None:
        """Make a free slot resident with a new key, held and the most recent."""

    @abstractmethod
    def replace(self, key: Key) -> int | None:
        """Evict the key of some slot that is not held, `add` the slot with a new key and return it.

        One call, because the choice of the slot may depend on the key that comes in. Returns `None`
        and changes nothing where all resident slots are held.
        """

    @abstractmethod
    def use(self, slot: int) -> None:
        """Count an access to a slot, held or not, and make it the most recent.

        Until its first `release` that access is the one that added it, and is not counted again.
        """

    @abstractmethod
    def hold(self, slot: int) -> None:
        """Do as `use`, and keep a slot that is not held from being evicted until `release`."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Let a held slot be evicted again. This is not an access."""

    @abstractmethod
    def discard(self, slot: int) -> None:
        """Forget a slot, held or not, and its key, as if it had never been added."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all slots, held ones included, and everything learnt from their keys."""

    @abstractmethod
    def resident(self) -> dict[int, bool]:
        """Return all resident slots and whether they are held, in O(capacity)."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Check all invariants, in O(capacity). Raises `AssertionError` naming the first broken."""
