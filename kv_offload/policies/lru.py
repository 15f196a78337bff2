"""Evict the key that was used least recently."""

from __future__ import annotations

from kv_offload.policies.base import EvictionPolicy, Key
from kv_offload.policies.recency import RecencyList


class LRUPolicy(EvictionPolicy):
    """One list by recency. Cheapest, and right where reuse comes soon or not at all."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recency = RecencyList()

    def add(self, key: Key) -> None:
        """See `EvictionPolicy.add`."""
        self._recency.append(key, held=True)

    def replace(self, key: Key) -> Key | None:
        """See `EvictionPolicy.replace`."""
        if not self._recency.evictable:
            return None
        victim = self._recency.pop_oldest()
        self.add(key)
        return victim

    def use(self, key: Key) -> None:
        """See `EvictionPolicy.use`."""
        self._recency.refresh(key)

    def hold(self, key: Key) -> None:
        """See `EvictionPolicy.hold`."""
        self._recency.hold(key)
        self._recency.refresh(key)

    def release(self, key: Key) -> None:
        """See `EvictionPolicy.release`."""
        self._recency.release(key)

    def discard(self, key: Key) -> None:
        """See `EvictionPolicy.discard`."""
        self._recency.remove(key)

    def clear(self) -> None:
        """See `EvictionPolicy.clear`."""
        self._recency = RecencyList()

    def is_held(self, key: Key) -> bool:
        """See `EvictionPolicy.is_held`."""
        return self._recency.is_held(key)

    def __len__(self) -> int:
        return len(self._recency)

    def check_integrity(self) -> None:
        """See `EvictionPolicy.check_integrity`."""
        assert len(self) <= self.capacity, f"{len(self)} keys exceed capacity {self.capacity}"
        self._recency.check_integrity()
