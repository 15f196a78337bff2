"""Leases on slots: one owner retains them, with one priority, until the same second."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_offload.cache.slots import Slots

MIN_COMPACTED = 64
"""A heap with fewer entries is not purged of ended leases."""


@dataclass(slots=True, eq=False)
class Lease:
    """Slots that are held until `expires`, in seconds of the monotonic clock.

    A lease without slots has ended. `parts` holds `named` slots, which may include slots that have
    since moved to other leases.
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
        """Sort key that decides which of two leases gets a contested slot or the last room."""
        return self.priority, self.expires


class LeaseHeap:
    """A heap of leases in a given order. Each ended lease is dropped in O(1) amortised time."""

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
        """Return the first lease that has not ended; None if there is none."""
        while self._entries and not self._entries[0][2].slots:
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def __len__(self) -> int:
        return len(self._entries)
