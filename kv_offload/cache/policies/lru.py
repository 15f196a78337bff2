"""Evict the key that was used least recently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.policies.use_log import UseLog
from kv_offload.cache.slots import Key, Slots


class LRUPolicy(EvictionPolicy):
    """One order by recency. Cheapest, and right where reuse comes soon or not at all."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clear()

    def clear(self) -> None:
        """See `EvictionPolicy.clear`."""
        self._log = UseLog(self.capacity)
        self._held = np.zeros(self.capacity, bool)

    def add(self, slots: Slots, keys: Sequence[Key]) -> None:
        """See `EvictionPolicy.add`; the keys do not matter."""
        self._log.append_new(slots[::-1])
        self._held[slots] = True

    def replace(self, keys: Sequence[Key]) -> Slots:
        """See `EvictionPolicy.replace`; the keys do not matter."""
        # Sorted, so that keys that follow each other mostly get slots that do.
        slots = np.sort(self._log.pop_oldest(len(keys), self._held))
        self._log.append_new(slots[::-1])
        self._held[slots] = True
        return slots

    def use(self, slots: Slots) -> None:
        """See `EvictionPolicy.use`."""
        self._log.append(slots)

    def hold(self, slots: Slots) -> None:
        """See `EvictionPolicy.hold`."""
        self._log.append(slots)
        self._held[slots] = True

    def release(self, slots: Slots) -> None:
        """See `EvictionPolicy.release`."""
        self._held[slots] = False
        self._log.put_back(slots)

    def discard(self, slots: Slots) -> None:
        """See `EvictionPolicy.discard`."""
        self._held[slots] = False
        self._log.remove(slots)

    def resident(self) -> dict[int, bool]:
        """See `EvictionPolicy.resident`."""
        held = np.flatnonzero(self._held).tolist()
        return dict.fromkeys(self._log.slots().tolist(), False) | dict.fromkeys(held, True)

    def check_integrity(self) -> None:
        """See `EvictionPolicy.check_integrity`."""
        self._log.check_integrity()
        slots = self._log.length
        assert slots <= self.capacity, f"{slots} slots exceed capacity {self.capacity}"
        assert len(self.resident()) == slots, "a held slot is not resident"
