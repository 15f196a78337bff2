"""Leases on slots: what one owner retains with one priority until the same second."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_offload.cache.slots import Slots

MIN_COMPACTED = 64
"""A heap with fewer entries is not searched for leases that have ended."""


@dataclass(slots=True, eq=False)
class Lease:
    """Slots that are held until `expires`, in seconds of the monotonic clock.

    It has ended once it has no slot. `parts` may also name slots that have moved to other leases:
    they have `named` slots in all.
    """

    number: int
    owner: str | None
    priority: int
    expires: int
    parts: list[Slots] = field(default_factory=list)
    slots: int = 0
    named: int = 0

    @property
    def strength(self) -> tuple[int, int]:
        """By which leases that want the same slot or the same room are compared."""
        return self.priority, self.expires


class LeaseHeap:
    """Leases by an order. Those that have ended drop out in O(1) amortised time each."""

    def __init__(self, order: Callable[[Lease], tuple[int, ...]]) -> None:
        self._order = order
        self._entries: list[tuple[tuple[int, ...], int, Lease]] = []
        self._compact_at = MIN_COMPACTED

    def add(self, lease: Lease) -> None:
        """Add a lease that has slots."""
        if len(self._entries) >= self._compact_at:
            self._entries = [entry for entry in self._entries if entry[2].slots]
            heapq.heapify(self._entries)
            self._compact_at = max(MIN_COMPACTED, 2 * len(self._entries))
        heapq.heappush(self._entries, (self._order(lease), lease.number, lease))

    def first(self) -> Lease | None:
        """Return the first lease that has not ended."""
        while self._entries and not self._entries[0][2].slots:
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def __len__(self) -> int:
        return len(self._entries)
