"""A bounded queue of ended requests' blocks that the budget could not store yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kv_offload.scheduler.request import StoreCursor
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.candidates import StoreCandidates

MAX_BACKLOG_SLOTS = 1 << 16
"""Maximum waiting slots. Above it the oldest are dropped: the engine reuses their blocks first."""


@dataclass(slots=True)
class BacklogEntry:
    """The blocks of an ended request from its cursor on, up to `end_slot` in each group.

    Nothing pins these blocks: each is stored only if the engine's pool still knows it under its
    key. `slots` is how many were left at the last count.
    """

    cursor: StoreCursor
    end_slot: list[int]
    end_tokens: int
    slots: int = 0

    def count(self) -> int:
        """Return how many slots have been neither planned nor skipped, and remember it."""
        pairs = zip(self.end_slot, self.cursor.next_slot, strict=True)
        self.slots = sum(max(0, end - at) for end, at in pairs)
        return self.slots


class StoreBacklog:
    """Holds the entries from the oldest to the newest."""

    def __init__(self, candidates: StoreCandidates, statistics: Statistics) -> None:
        self._candidates = candidates
        self._statistics = statistics
        self._queue: deque[BacklogEntry] = deque()
        self._examined = 0
        self.slots = 0
        """Slots that wait, in all entries."""

    def keep(self, cursor: StoreCursor, end_tokens: int) -> int:
        """Take over the cursor of an ended request; return how many of its slots wait."""
        entry = BacklogEntry(cursor, self._candidates.end_slots(cursor, end_tokens), end_tokens)
        if entry.count():
            self._queue.append(entry)
            self.slots += entry.slots
        while self.slots > MAX_BACKLOG_SLOTS:
            oldest = self._queue.popleft().slots
            self.slots -= oldest
            self._statistics.skipped("no_budget", oldest)
        return entry.slots

    def examine(self, slots_left: int) -> None:
        """Examine at most `slots_left` slots, the oldest first, before running requests."""
        self._examined = 0
        candidates = self._candidates
        withheld = max(0, candidates.examinable - max(0, slots_left))
        candidates.examinable -= withheld
        for entry in self._queue:
            if not candidates.examinable:
                break
            self._examined += 1
            candidates.examine(entry.cursor, entry.end_tokens)
        candidates.examinable += withheld

    def forget_chosen(self, *, resting: bool) -> None:
        """Remove the chosen slots from the examined entries.

        `resting`: nothing is computed, loaded or stored, so no GPU block will become free by
        itself. If nothing could be planned then, the backlog is dropped, so that the engine rests.
        """
        if not self._queue:
            return
        before = self.slots
        entries = [self._queue.popleft() for _ in range(self._examined)]
        for entry in reversed(entries):
            counted = entry.slots
            self.slots += entry.count() - counted
            if entry.slots:
                self._queue.appendleft(entry)
        if self.slots == before and resting:
            self.drop()

    def drop(self) -> None:
        """Drop all entries, and count their slots as skipped."""
        self._statistics.skipped("no_budget", self.slots)
        self.slots = 0
        self._queue.clear()
