"""Ordered changes of host memory: keys that became readable and keys that lost their slot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kv_offload.cache.slots import Slots


@dataclass(frozen=True, slots=True)
class Change:
    """Slots whose keys became readable or were lost; None stands for all slots."""

    slots: Slots | None
    readable: bool


class ChangeLog:
    """Pending changes, oldest first.

    A slot appears once per change, and by the time a change is read it may hold another key.
    """

    def __init__(self) -> None:
        self.changes: deque[Change] = deque()
        self.restored: set[int] = set()
        """Slots whose keys another process left. The consumer of the changes removes them."""

    def became_readable(self, slots: Slots) -> None:
        """Record that the keys of these slots can now be loaded."""
        if len(slots):
            self.changes.append(Change(slots, readable=True))

    def lost(self, slots: Slots | None) -> None:
        """Record that these slots, or all, have lost their keys, readable or not."""
        if slots is None or len(slots):
            self.changes.append(Change(slots, readable=False))
