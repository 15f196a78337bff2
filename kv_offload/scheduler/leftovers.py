"""What ended requests left behind without a budget to store it: a bounded queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_LEFTOVER_SLOTS = 1 << 16
"""Slots that wait at most; then the oldest are dropped, whose blocks the engine reuses first."""


@dataclass(slots=True)
class StoreCursor:
    """How far the stores of one request have been planned: one slot index per group."""

    request_id: str
    next_slot: list[int]


@dataclass(slots=True)
class Leftover:
    """The blocks of an ended request from `cursor` on, up to `end_slot` in each group.

    Nobody holds them: each is stored only if the engine's pool still knows it under its key.
    """

    cursor: StoreCursor
    end_slot: Sequence[int]
    end_tokens: int
    hashes: Sequence[bytes]
    block_ids: Sequence[Sequence[int]]

    @property
    def slots_left(self) -> int:
        """Slots that have been neither planned nor skipped."""
        return sum(
            max(0, end - at) for end, at in zip(self.end_slot, self.cursor.next_slot, strict=True)
        )


class Leftovers:
    """Leftovers from the oldest to the newest."""

    def __init__(self) -> None:
        self._queue: deque[Leftover] = deque()
        self._slots_left: deque[int] = deque()
        self.slots = 0
        """Slots that wait, over all."""

    def add(self, leftover: Leftover) -> int:
        """Queue one; return how many slots of the oldest were dropped to make room."""
        slots = leftover.slots_left
        if not slots:
            return 0
        self._queue.append(leftover)
        self._slots_left.append(slots)
        self.slots += slots
        dropped = 0
        while self.slots > MAX_LEFTOVER_SLOTS:
            self._queue.popleft()
            oldest = self._slots_left.popleft()
            self.slots -= oldest
            dropped += oldest
        return dropped

    def settle(self, planned: int) -> bool:
        """Update the first `planned` after their cursors moved; say whether any did."""
        counted = [self._slots_left.popleft() for _ in range(planned)]
        entries = [self._queue.popleft() for _ in range(planned)]
        before = self.slots
        for leftover, slots in zip(reversed(entries), reversed(counted), strict=True):
            left = leftover.slots_left
            self.slots += left - slots
            if left:
                self._queue.appendleft(leftover)
                self._slots_left.appendleft(left)
        return self.slots < before

    def clear(self) -> int:
        """Drop all; return how many slots they had."""
        dropped, self.slots = self.slots, 0
        self._queue.clear()
        self._slots_left.clear()
        return dropped

    def __iter__(self) -> Iterator[Leftover]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)
