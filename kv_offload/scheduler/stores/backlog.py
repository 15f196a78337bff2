"""A bounded queue of blocks that ended requests left without a budget to store them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kv_offload.scheduler.request import StoreCursor
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.candidates import StoreCandidates

MAX_LEFTOVER_SLOTS = 1 << 16
"""Slots that wait at most; then the oldest are dropped, whose blocks the engine reuses first."""


@dataclass(slots=True)
class Leftover:
    """The blocks of an ended request from its cursor on, up to `end_slot` in each group.

    Nothing keeps these blocks: each is stored only if the engine's pool still knows it under its
    key. `slots` of them were left when the queue last counted.
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
    """StoreBacklog from the oldest to the newest."""

    def __init__(self, candidates: StoreCandidates, statistics: Statistics) -> None:
        self._candidates = candidates
        self._statistics = statistics
        self._queue: deque[Leftover] = deque()
        self._examined = 0
        self.slots = 0
        """Slots that wait, over all."""

    def keep(self, cursor: StoreCursor, end_tokens: int) -> int:
        """Queue what was not chosen of a request that has ended; return its slots.

        The caller gives the cursor away.
        """
        leftover = Leftover(cursor, self._candidates.end_slots(cursor, end_tokens), end_tokens)
        if leftover.count():
            self._queue.append(leftover)
            self.slots += leftover.slots
        while self.slots > MAX_LEFTOVER_SLOTS:
            oldest = self._queue.popleft().slots
            self.slots -= oldest
            self._statistics.skipped("no_budget", oldest)
        return leftover.slots

    def examine(self, slots_left: int) -> None:
        """Have backlog examined, the oldest first, of at most so many slots.

        Called before the running requests are examined: those keep their blocks.
        """
        self._examined = 0
        candidates = self._candidates
        withheld = max(0, candidates.examinable - max(0, slots_left))
        candidates.examinable -= withheld
        for leftover in self._queue:
            if not candidates.examinable:
                break
            self._examined += 1
            candidates.examine(leftover.cursor, leftover.end_tokens)
        candidates.examinable += withheld

    def forget_chosen(self, *, resting: bool) -> None:
        """Forget what was chosen from the backlog that were examined.

        `resting` says that the engine computes, loads and stores nothing, so that no GPU block will
        become free by itself. What could not be planned then never will be: it is dropped and
        counted, so that the engine may rest.
        """
        if not self._queue:
            return
        before = self.slots
        entries = [self._queue.popleft() for _ in range(self._examined)]
        for leftover in reversed(entries):
            counted = leftover.slots
            self.slots += leftover.count() - counted
            if leftover.slots:
                self._queue.appendleft(leftover)
        if self.slots == before and resting:
            self.drop()

    def drop(self) -> None:
        """Store nothing of what waits."""
        self._statistics.skipped("no_budget", self.slots)
        self.slots = 0
        self._queue.clear()
