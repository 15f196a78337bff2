"""Changes of host memory in order: keys that became readable, keys that lost their slot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kv_offload.cache.slots import Slots


@dataclass(frozen=True, slots=True)
class Change:
    """Slots whose keys have become readable, or were forgotten; None stands for all slots."""

    slots: Slots | None
    readable: bool


class ChangeLog:
    """Changes that nobody has taken yet, from the oldest to the newest.

    A slot stands in the log each time. What it holds now may be something else.
    """

    def __init__(self) -> None:
        self.changes: deque[Change] = deque()
        self.restored: set[int] = set()
        """Slots whose keys another process has left. Whoever takes the changes removes them."""

    def became_readable(self, slots: Slots) -> None:
        """Take note that the keys of these slots can be loaded from now on."""
        if len(slots):
            self.changes.append(Change(slots, readable=True))

    def were_restored(self, slots: Slots) -> None:
        """Take note that these slots have the keys that another process has left there."""
        self.restored.update(slots.tolist())
        self.became_readable(slots)

    def lost(self, slots: Slots) -> None:
        """Take note that these slots have lost their keys, which may not have been readable."""
        if len(slots):
            self.changes.append(Change(slots, readable=False))

    def lost_all(self) -> None:
        """Take note that all keys were forgotten."""
        self.changes.append(Change(None, readable=False))
