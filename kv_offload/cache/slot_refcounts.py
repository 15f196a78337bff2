"""Counts of the loads and stores running on each slot, from `prepare_*` to `complete_*`.

Any number of loads may read a slot at once, or one store writes it.
"""

from __future__ import annotations

import numpy as np

from kv_offload.cache.slots import Mask, MisuseError, Slots

WRITTEN = -1
"""Replaces the number of readers while a store writes the slot."""


class SlotRefcounts:
    """Counts the loads and stores of each slot, and refuses to end one that is not running."""

    def __init__(self, num_slots: int) -> None:
        # Zeros from the system take no memory until they are written.
        self._readers = np.zeros(num_slots, np.int32)

    def start_loads(self, slots: Slots) -> Slots:
        """Begin one load of each slot; return the slots that had none, each once, in order.

        Raises `MisuseError` for a slot that a store is writing; nothing is changed.
        """
        before = self._readers[slots]
        if (before == WRITTEN).any():
            raise MisuseError(
                f"loads of slots {slots[before == WRITTEN].tolist()} were begun while a store "
                "writes them: load what is readable"
            )
        idle = distinct(slots[before == 0])
        if len(idle) == len(slots):
            self._readers[slots] = 1
        else:
            np.add.at(self._readers, slots, 1)
        return idle

    def end_loads(self, slots: Slots) -> Slots:
        """End one load of each slot; return the slots without any load left, each once.

        Raises `MisuseError` for a slot with no running load; nothing is changed.
        """
        ended, counts = np.unique(slots, return_counts=True)
        left = self._readers[ended] - counts
        if (left < 0).any():
            raise MisuseError(
                f"loads of slots {ended[left < 0].tolist()} were completed more often than "
                "prepared: complete every prepared load once"
            )
        self._readers[ended] = left
        idle: Slots = ended[left == 0]
        return idle

    def start_stores(self, slots: Slots) -> None:
        """Begin a store to each slot, which has no load and no store running."""
        self._readers[slots] = WRITTEN

    def end_stores(self, slots: Slots) -> None:
        """End the store of each slot. Raises `MisuseError` if one has none; nothing is changed."""
        written = self._readers[slots] == WRITTEN
        if not written.all() or len({*slots.tolist()}) < len(slots):
            raise MisuseError(
                f"stores to slots {sorted(slots.tolist())} were completed, but only stores to "
                f"{sorted({*slots[written].tolist()})} run: complete every prepared store once"
            )
        self._readers[slots] = 0

    def not_written(self, slots: Slots) -> Mask:
        """Return for each slot whether no store is writing it."""
        not_written: Mask = self._readers[slots] != WRITTEN
        return not_written

    def are_idle(self, slots: Slots) -> Mask:
        """Return for each slot whether it is neither read nor written."""
        idle: Mask = self._readers[slots] == 0
        return idle

    def busy(self, count: int) -> Mask:
        """Return for each of the first `count` slots whether it is read or written."""
        busy: Mask = self._readers[:count] != 0
        return busy

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        assert (self._readers >= WRITTEN).all(), "a slot has fewer than no readers"


def distinct(slots: Slots) -> Slots:
    """Return each slot once, in order of first occurrence."""
    if np.all(slots[1:] > slots[:-1]):
        return slots  # the slots of most prefixes are ascending
    _, first = np.unique(slots, return_index=True)
    return slots if len(first) == len(slots) else slots[np.sort(first)]
