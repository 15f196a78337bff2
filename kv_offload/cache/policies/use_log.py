"""An order by recency kept as a log of uses: whole batches at once, in arrays."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import NO_SLOTS, Slots

CHUNK_ENTRIES = 1024
"""Room of a chunk at least: batches share one, so that single uses are no arrays of their own."""

SLACK_ENTRIES = 4096
"""Stale entries that are not worth dropping."""

WINDOW_ENTRIES = 64
"""Entries looked at in the search of a victim, or as many as are wanted."""

Times = NDArray[np.int64]
"""When slots were used, shape `(n,)`, counted in uses."""


class _Chunk:
    """Slots with the time of their use, from the older to the newer: a stretch of two arrays."""

    __slots__ = ("_first", "_last", "_slots", "_times")

    def __init__(self, room: int) -> None:
        self._slots: Slots = np.empty(room, np.int32)
        self._times: Times = np.empty(room, np.int64)
        self._first = self._last = 0

    def append(self, slots: Slots, times: Times) -> int:
        """Add the first of some entries, as many as there is room for; return their number."""
        first = self._last
        self._last = last = min(first + len(slots), len(self._slots))
        self._slots[first:last] = slots[: last - first]
        self._times[first:last] = times[: last - first]
        return last - first

    def oldest(self, count: int) -> tuple[Slots, Times]:
        """Return slots and times of the oldest entries, `count` or all, as views."""
        part = slice(self._first, min(self._first + count, self._last))
        return self._slots[part], self._times[part]

    def drop(self, count: int) -> None:
        """Drop the oldest entries; there must be so many."""
        self._first += count

    def __len__(self) -> int:
        return self._last - self._first


class UseLog:
    """Slots from the least to the most recent. A use is appended; a slot's last entry counts.

    What an earlier entry said is stale and dropped when it is met: at the old end while a victim is
    searched, or by `append`, which visits twice the entries that it adds once more than half of the
    log is stale. So memory stays within twice the slots, and nothing is ever reorganised at once.

    A held slot that is met at the old end is parked: it has no entry until it is used or put back.

    For `capacity` slots from 0 upwards. Apart from the two that append, slots given are in the log,
    each once.
    """

    def __init__(self, capacity: int) -> None:
        # Zeros from the system take no memory until they are written.
        self._time = np.zeros(capacity, np.int64)  # of the last use; 0: not in the log
        self._parked: set[int] = set()
        self._now = 1
        # All entries of `_visited` are older than all of `_chunks`.
        self._visited: deque[_Chunk] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._entries = 0
        self.length = 0
        """How many slots there are, parked ones included."""

    def append(self, slots: Slots) -> None:
        """Make slots the most recent, the last of them most; of a repeated one the last counts."""
        before = self._time[slots]
        if np.count_nonzero(before) < len(slots):
            self.length += len(np.unique(slots[before == 0]))
        if self._parked:
            self._parked.difference_update(slots.tolist())
        self._append(slots)
        if self._entries > 2 * self.length + SLACK_ENTRIES:
            self._drop_stale(2 * len(slots))

    def append_new(self, slots: Slots) -> None:
        """Do as `append` with slots that are not in the log, each given once."""
        self.length += len(slots)
        self._append(slots)

    def _append(self, slots: Slots) -> None:
        times = np.arange(self._now, self._now + len(slots))
        self._now += len(slots)
        self._time[slots] = times
        self._push(self._chunks, slots, times)

    def remove(self, slots: Slots) -> None:
        """Take slots out."""
        self._time[slots] = 0
        self._parked.difference_update(slots.tolist())
        self.length -= len(slots)

    def pop_oldest(self, count: int, held: NDArray[np.bool_]) -> Slots:
        """Take out up to `count` of the least recent slots for which `held[slot]` is False."""
        victims: list[Slots] = []
        while count and self._entries:
            chunks = self._visited or self._chunks
            slots, times = chunks[0].oldest(count)
            passed = len(slots)
            live = self._time[slots] == times
            # Mostly the oldest of all were neither used since nor are they held.
            if np.count_nonzero(live) < passed or np.count_nonzero(held[slots]):
                slots, times = chunks[0].oldest(max(count, WINDOW_ENTRIES))
                live = self._time[slots] == times
                idle = live & ~held[slots]
                wanted = np.flatnonzero(idle)[:count]
                passed = len(slots) if len(wanted) < count else int(wanted[-1]) + 1
                self._parked.update(slots[:passed][(live & ~idle)[:passed]].tolist())
                slots = slots[wanted]
            self._drop_oldest(chunks, passed)
            victims.append(slots)
            count -= len(slots)
        slots = victims[0] if len(victims) == 1 else np.concatenate([NO_SLOTS, *victims])
        # None of them is parked: what is parked has no entry.
        self._time[slots] = 0
        self.length -= len(slots)
        return slots

    def put_back(self, slots: Slots) -> None:
        """Return those of the slots that are parked to the old end, in the order of their use."""
        if not self._parked:
            return
        parked = np.array([slot for slot in slots.tolist() if slot in self._parked], np.int32)
        if not len(parked):
            return
        self._parked.difference_update(parked.tolist())
        times = self._time[parked]
        order = np.argsort(times)
        chunk = _Chunk(len(parked))
        self._entries += chunk.append(parked[order], times[order])
        (self._visited or self._chunks).appendleft(chunk)

    def slots(self) -> Slots:
        """Return the slots that are not parked, from the least to the most recent, in O(n)."""
        live = [self._live(chunk)[0] for chunk in (*self._visited, *self._chunks)]
        return np.concatenate([NO_SLOTS, *live])

    def check_integrity(self) -> None:
        """Check all invariants, in O(n). Raises `AssertionError` naming the first broken."""
        listed = self.slots()
        parked = self._parked
        known = np.flatnonzero(self._time)
        assert len(np.unique(listed)) == len(listed), "a slot has two entries"
        assert sorted([*listed, *parked]) == [*known], "a slot is lost, or listed and parked"
        assert len(known) == self.length, f"{self.length} slots are counted, {len(known)} known"
        entries = sum(map(len, (*self._visited, *self._chunks)))
        assert entries == self._entries, f"{self._entries} entries are counted, {entries} kept"

    def _live(self, chunk: _Chunk) -> tuple[Slots, Times]:
        slots, times = chunk.oldest(len(chunk))
        live = self._time[slots] == times
        return slots[live], times[live]

    def _push(self, chunks: deque[_Chunk], slots: Slots, times: Times) -> None:
        self._entries += len(slots)
        if chunks:
            taken = chunks[-1].append(slots, times)
            slots, times = slots[taken:], times[taken:]
        if len(slots):
            chunk = _Chunk(max(len(slots), CHUNK_ENTRIES))
            chunk.append(slots, times)
            chunks.append(chunk)

    def _drop_oldest(self, chunks: deque[_Chunk], count: int) -> None:
        self._entries -= count
        chunks[0].drop(count)
        if not chunks[0]:
            chunks.popleft()

    def _drop_stale(self, count: int) -> None:
        """Visit the next chunks, at least `count` entries of them or all, and keep what is live."""
        while count > 0:
            if not self._chunks:
                self._chunks, self._visited = self._visited, self._chunks
                return
            chunk = self._chunks[0]
            count -= len(chunk)
            slots, times = self._live(chunk)
            self._drop_oldest(self._chunks, len(chunk))
            self._push(self._visited, slots, times)
