"""Which slots are being read or written: loads and stores that are prepared and not completed.

Any number of loads may read a slot at once. Only one store writes it, and no load reads it then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import MisuseError, Slots


class RunningOperations:
    """Counts the loads and stores of each slot, and refuses to end one that does not run."""

    def __init__(self, num_slots: int) -> None:
        # Zeros from the system take no memory until they are written.
        self._readers = np.zeros(num_slots, np.int32)
        self._writing: set[int] = set()

    def start_loads(self, slots: Slots) -> Slots:
        """Begin one load of each slot; return the slots that had none, each once, in order."""
        idle = distinct(slots[self._readers[slots] == 0])
        if len(idle) == len(slots):
            self._readers[slots] = 1
        else:
            np.add.at(self._readers, slots, 1)
        return idle

    def end_loads(self, slots: Slots) -> Slots:
        """End one load of each slot, and return the slots that have none left, each once.

        Raises `MisuseError` for a slot that has no load running; nothing is changed.
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
        self._writing.update(slots.tolist())

    def end_stores(self, slots: Slots) -> None:
        """End the store of each slot.

        Raises `MisuseError` for a slot that has no store running; nothing is changed.
        """
        names = slots.tolist()
        ended = set(names)
        if len(ended) < len(names) or not ended <= self._writing:
            raise MisuseError(
                f"stores to slots {sorted(names)} were completed, but only stores to "
                f"{sorted(self._writing & ended)} run: complete every prepared store once"
            )
        self._writing -= ended

    def not_written(self, slots: Slots) -> NDArray[np.bool_]:
        """Say for each slot that no store to it runs. -1, which is no slot, is not written."""
        if len(slots) > len(self._writing):
            # The slots of a prefix mostly lie together, away from those that are given out now.
            lowest, highest = int(slots.min()), int(slots.max())
            writing = [slot for slot in self._writing if lowest <= slot <= highest]
        else:
            writing = list(self._writing.intersection(slots.tolist()))
        return ~np.isin(slots, writing) if writing else np.ones(len(slots), bool)

    def idle(self, slots: Slots) -> Slots:
        """Return the slots that are neither read nor written, in their order."""
        idle: Slots = slots[self.not_written(slots) & (self._readers[slots] == 0)]
        return idle

    def busy(self, count: int) -> NDArray[np.bool_]:
        """Say for each of the first `count` slots whether it is read or written."""
        busy = self._readers[:count] > 0
        busy[[slot for slot in self._writing if slot < count]] = True
        return busy

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        assert (self._readers >= 0).all(), "a slot has fewer than no readers"
        read = self._writing & {*np.flatnonzero(self._readers).tolist()}
        assert not read, "a slot is read while it is written"


def distinct(slots: Slots) -> Slots:
    """Return each slot once, in the order in which they come first."""
    if np.all(slots[1:] > slots[:-1]):
        return slots  # the slots of most prefixes rise
    _, first = np.unique(slots, return_index=True)
    return slots if len(first) == len(slots) else slots[np.sort(first)]
