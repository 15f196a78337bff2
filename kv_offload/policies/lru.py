"""Evict the key that was used least recently."""

from __future__ import annotations

from kv_offload.policies.base import EvictionPolicy, Key
from kv_offload.policies.recency import RecencyList


class LRUPolicy(EvictionPolicy):
    """One list by recency. Cheapest, and right where reuse comes soon or not at all."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clear()

    def clear(self) -> None:
        """See `EvictionPolicy.clear`."""
        self._recency = RecencyList()

    def add(self, slot: int, key: Key) -> None:
        """See `EvictionPolicy.add`; the key does not matter."""
        self._recency.append(slot, held=True)

    def replace(self, key: Key) -> int | None:
        """See `EvictionPolicy.replace`; the key does not matter."""
        if not self._recency.evictable:
            return None
        slot = self._recency.pop_oldest()
        self.add(slot, key)
        return slot

    def use(self, slot: int) -> None:
        """See `EvictionPolicy.use`."""
        self._recency.refresh(slot)

    def hold(self, slot: int) -> None:
        """See `EvictionPolicy.hold`."""
        self._recency.hold(slot)
        self._recency.refresh(slot)

    def release(self, slot: int) -> None:
        """See `EvictionPolicy.release`."""
        self._recency.release(slot)

    def discard(self, slot: int) -> None:
        """See `EvictionPolicy.discard`."""
        self._recency.remove(slot)

    def resident(self) -> dict[int, bool]:
        """See `EvictionPolicy.resident`."""
        return self._recency.holds()

    def check_integrity(self) -> None:
        """See `EvictionPolicy.check_integrity`."""
        self._recency.check_integrity()
        slots = self._recency.length
        assert slots <= self.capacity, f"{slots} slots exceed capacity {self.capacity}"
