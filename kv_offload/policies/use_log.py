"""An order by recency kept as a log of uses: whole batches at once, in arrays."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kv_offload.policies.base import Slots

_CHUNK_ENTRIES = 1024
"""Chunks that shrink are joined up to this size, so that single uses do not stay single arrays."""

_SLACK_ENTRIES = 4096
"""Stale entries that are not worth dropping."""

_WINDOW_ENTRIES = 64
"""Entries looked at in the search of a victim, or as many as are wanted."""

_Chunk = tuple[Slots, NDArray[np.int64]]
"""Slots with the time of their use, shape `(n,)` each, from the older to the newer."""


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
        self._parked = np.zeros(capacity, bool)
        self._now = 1
        # All entries of `_visited` are older than all of `_chunks`.
        self._visited: deque[_Chunk] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._entries = 0
        self.length = 0
        """How many slots there are, parked ones included."""

    def append(self, slots: Slots) -> None:
        """Make slots the most recent, the last of them most; of a repeated one the last counts."""
        times = np.arange(self._now, self._now + len(slots))
        self._now += len(slots)
        before = self._time[slots]
        if np.count_nonzero(before) < len(slots):
            self.length += len(np.unique(slots[before == 0]))
        self._time[slots] = times
        self._parked[slots] = False
        self._push(self._chunks, (slots.copy(), times))
        if self._entries > 2 * self.length + _SLACK_ENTRIES:
            self._drop_stale(2 * len(slots))

    def append_new(self, slots: Slots) -> None:
        """Do as `append` with slots that are not in the log, each given once."""
        times = np.arange(self._now, self._now + len(slots))
        self._now += len(slots)
        self.length += len(slots)
        self._time[slots] = times
        self._push(self._chunks, (slots.copy(), times))

    def remove(self, slots: Slots) -> None:
        """Take slots out."""
        self._time[slots] = 0
        self._parked[slots] = False
        self.length -= len(slots)

    def pop_oldest(self, count: int, held: NDArray[np.bool_]) -> Slots:
        """Take out up to `count` of the least recent slots for which `held[slot]` is False."""
        chunks = self._visited or self._chunks
        if count and chunks and len(chunks[0][0]) > count:
            # What is mostly met: the oldest of all were neither used since nor are they held.
            slots, times = chunks[0]
            met = slots[:count]
            live = np.count_nonzero(self._time[met] == times[:count])
            if live == count and not np.count_nonzero(held[met]):
                chunks[0] = slots[count:], times[count:]
                self._entries -= count
                return self._taken(met)
        victims: list[Slots] = []
        while count and self._entries:
            chunks = self._visited or self._chunks
            slots, times = self._pop(chunks)
            window = max(count, _WINDOW_ENTRIES)
            if len(slots) > window:
                self._push_back(chunks, slots[window:], times[window:])
                slots, times = slots[:window], times[:window]
            slots, times = self._live((slots, times))
            met = slots[:count]
            if not np.count_nonzero(held[met]):
                victims.append(met)
                passed = len(met)
            else:
                idle = np.flatnonzero(~held[slots])[:count]
                passed = len(slots) if len(idle) < count else int(idle[-1]) + 1
                met = slots[:passed]
                self._parked[met[held[met]]] = True
                victims.append(slots[idle])
            if passed < len(slots):
                self._push_back(chunks, slots[passed:], times[passed:])
            count -= len(victims[-1])
        return self._taken(np.concatenate([np.empty(0, np.int32), *victims]))

    def _taken(self, slots: Slots) -> Slots:
        # None of them is parked: what is parked has no entry.
        self._time[slots] = 0
        self.length -= len(slots)
        return slots

    def put_back(self, slots: Slots) -> None:
        """Return those of the slots that are parked to the old end, in the order of their use."""
        is_parked = self._parked[slots]
        if not np.count_nonzero(is_parked):
            return
        parked = slots[is_parked]
        self._parked[parked] = False
        times = self._time[parked]
        order = np.argsort(times)
        self._push_back(self._visited or self._chunks, parked[order], times[order])

    def slots(self) -> Slots:
        """Return the slots that are not parked, from the least to the most recent, in O(n)."""
        live = [self._live(chunk)[0] for chunk in (*self._visited, *self._chunks)]
        return np.concatenate([np.empty(0, np.int32), *live])

    def check_integrity(self) -> None:
        """Check all invariants, in O(n). Raises `AssertionError` naming the first broken."""
        listed = self.slots()
        parked = np.flatnonzero(self._parked)
        known = np.flatnonzero(self._time)
        assert len(np.unique(listed)) == len(listed), "a slot has two entries"
        assert sorted([*listed, *parked]) == [*known], "a slot is lost, or listed and parked"
        assert len(known) == self.length, f"{self.length} slots are counted, {len(known)} known"
        entries = sum(len(slots) for slots, _ in (*self._visited, *self._chunks))
        assert entries == self._entries, f"{self._entries} entries are counted, {entries} kept"

    def _live(self, chunk: _Chunk) -> _Chunk:
        slots, times = chunk
        live = self._time[slots] == times
        if np.count_nonzero(live) == len(slots):
            return chunk
        return slots[live], times[live]

    def _push(self, chunks: deque[_Chunk], chunk: _Chunk) -> None:
        self._entries += len(chunk[0])
        if chunks and len(chunks[-1][0]) + len(chunk[0]) <= _CHUNK_ENTRIES:
            last = chunks.pop()
            chunk = np.concatenate((last[0], chunk[0])), np.concatenate((last[1], chunk[1]))
        if len(chunk[0]):
            chunks.append(chunk)

    def _push_back(self, chunks: deque[_Chunk], slots: Slots, times: NDArray[np.int64]) -> None:
        chunks.appendleft((slots, times))
        self._entries += len(slots)

    def _pop(self, chunks: deque[_Chunk]) -> _Chunk:
        chunk = chunks.popleft()
        self._entries -= len(chunk[0])
        return chunk

    def _drop_stale(self, count: int) -> None:
        """Visit the next chunks, at least `count` entries of them or all, and keep what is live."""
        while count > 0:
            if not self._chunks:
                self._chunks, self._visited = self._visited, self._chunks
                return
            chunk = self._pop(self._chunks)
            count -= len(chunk[0])
            self._push(self._visited, self._live(chunk))
