"""Slots in buckets, and the order in which the buckets give victims."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies.density import AGES, CLASSES, OLD, HitDensity
from kv_offload.cache.policies.prefixes import PrefixOrder
from kv_offload.cache.slots import NO_SLOTS, Readers, Slots

SLACK_ENTRIES = 4096
"""This many stale entries never cause a sweep."""

QUEUED_SLOTS = 4096
"""Number of slots of a bucket that are queued at a time, which bounds the cost of a step: a bucket
may have an eighth of all slots."""

NEVER = 1 << 62
"""An epoch that never comes."""

WINDOW_SLOTS = 64
"""Number of slots that a search for victims reads beyond twice the number of victims."""


class Ranking:
    """The slots of each bucket in order of access, and the order of the buckets.

    Only entries that `bucket_of` confirms are live; a slot that moved has left a stale entry. Stale
    entries are swept bucket by bucket as entries are added, so there are about two entries per
    slot.

    Between two calls of `rank` the order of the buckets stays fixed, and the slots of the worst
    buckets wait in a queue. Blocks that have to stay for their child (`prefixes`) are queued after
    it, and only when they are wanted: a prompt that grew over many turns is a chain of a hundred
    small parts.
    """

    def __init__(self, capacity: int, density: HitDensity) -> None:
        self._density = density
        self._max_entries = 2 * capacity + SLACK_ENTRIES
        self.bucket_of = np.zeros(capacity, np.int64)
        """The bucket of each slot; 0 if it has no key."""
        self.prefixes = PrefixOrder(self.bucket_of)
        self._entries: dict[int, deque[Slots]] = {}
        self._num_entries = 0
        self._to_sweep: list[int] = []
        self._queue: deque[tuple[int, float, Slots]] = deque()  # with bucket and density
        self._queued = 0
        self._opened = NO_SLOTS
        """Slots of opened buckets that are not queued yet."""
        self._opened_from = self.bucket_of[:0]
        self._freed = NO_SLOTS
        """Slots that can leave once the whole queue has. They also have entries."""
        self._freed_from = self.bucket_of[:0]
        self._order: list[int] = []
        self._densities: dict[int, float] = {}
        self._at = 0
        self._recent_from = NEVER
        self._accesses = 0
        self._accessed = np.zeros(capacity, np.int64)  # by slot: the number of its last access
        self._last_place = np.zeros(capacity, np.int32)  # used only within `_distinct`
        self.rank()

    def put(self, slots: Slots) -> None:
        """Add entries, the last the most recent, to the current buckets of the slots."""
        slots = self._distinct(slots)
        self._accessed[slots] = np.arange(self._accesses, self._accesses + len(slots))
        self._accesses += len(slots)
        for bucket, part in self._by_bucket(slots, self.bucket_of[slots]):
            if bucket:
                self._add(bucket, part)
        if self._num_entries > self._max_entries:
            self._sweep(4 * len(slots))

    @staticmethod
    def _by_bucket(slots: Slots, buckets: NDArray[np.int64]) -> Iterator[tuple[int, Slots]]:
        """Yield the slots of each bucket, in order."""
        order = np.argsort(buckets, kind="stable")
        slots, buckets = slots[order], buckets[order]
        changes = (np.flatnonzero(buckets[1:] != buckets[:-1]) + 1).tolist()
        for first, end in itertools.pairwise([0, *changes, len(slots)] if len(slots) else []):
            yield int(buckets[first]), slots[first:end]

    def _distinct(self, slots: Slots) -> Slots:
        """Return the slots without repetition, each at its last place."""
        places = np.arange(len(slots), dtype=np.int32)
        self._last_place[slots] = places
        distinct: Slots = slots[self._last_place[slots] == places]
        return distinct

    def _add(self, bucket: int, slots: Slots) -> None:
        self._entries.setdefault(bucket, deque()).append(slots)
        self._num_entries += len(slots)

    def _take(self, bucket: int) -> Slots:
        """Remove a bucket and return its live slots."""
        slots = np.concatenate(self._entries.pop(bucket))
        self._num_entries -= len(slots)
        return self._distinct(slots[self.bucket_of[slots] == bucket])

    def _sweep(self, entries: int) -> None:
        """Drop stale entries among at least this many entries, bucket by bucket."""
        while entries > 0 and self._num_entries > self._max_entries:
            if not self._to_sweep:
                self._to_sweep = [*self._entries]
            bucket = self._to_sweep.pop()
            if bucket in self._entries:
                entries -= sum(map(len, self._entries[bucket]))
                if len(live := self._take(bucket)):
                    self._add(bucket, live)

    def rank(self, recent_from: int = NEVER) -> None:
        """Order the buckets by the current worth of their slots, older ones first among equals.

        Buckets of the epoch `recent_from` and later come last, and give their slots by last access.
        """
        for bucket, _, slots in reversed(self._waiting()):
            self._entries.setdefault(bucket, deque()).appendleft(slots)
            self._num_entries += len(slots)
        self.prefixes.begin(slots for _, _, slots in self._queue)
        self._queue.clear()
        self._queued = 0
        self._opened, self._opened_from = NO_SLOTS, self.bucket_of[:0]
        self._freed, self._freed_from = NO_SLOTS, self.bucket_of[:0]
        now = self._density.epoch * CLASSES
        self._merge_old(now - (AGES - 1) * CLASSES)
        # Include all buckets of this epoch, since slots will be added to them.
        before = [bucket for bucket in self._entries if bucket < now]
        buckets = np.array([*before, *range(now, now + CLASSES)])
        densities = self._density.of(buckets)
        recent = buckets // CLASSES >= recent_from
        order = np.lexsort((buckets, np.where(recent, 0, densities), recent))
        self._order = buckets[order].tolist()
        self._densities = dict(zip(self._order, densities[order].tolist(), strict=True))
        self._at = 0
        self._recent_from = recent_from

    def _merge_old(self, first_distinct: int) -> None:
        """Move slots of ages that are no longer distinguished to the buckets of epoch `OLD`."""
        for bucket in sorted(self._entries):
            if bucket >= first_distinct:
                break
            old = OLD * CLASSES + bucket % CLASSES
            if bucket != old and len(slots := self._take(bucket)):
                self.bucket_of[slots] = old
                self._add(old, slots)

    def _fill_queue(self, count: int) -> None:
        """Queue slots until `count` are waiting, or all that can leave."""
        while self._queued < count:
            if len(self._freed):
                self._enqueue_freed()
                continue
            if not len(self._opened):
                if self._at == len(self._order):
                    break
                self._open()
                continue
            opened_from = self._opened_from[:QUEUED_SLOTS]
            bucket = int(opened_from[0])
            others = opened_from != bucket
            end = int(others.argmax()) or len(opened_from)  # the first slot is in `bucket`
            part = self._opened[:end]
            slots, blocked = self.prefixes.split(part[self.bucket_of[part] != 0])  # 0: discarded
            self._opened, self._opened_from = self._opened[end:], self._opened_from[end:]
            if len(blocked):
                self._add(bucket, blocked)
            if len(slots):
                self._queue.append((bucket, self._densities[bucket], slots))
                self._queued += len(slots)
                self._free_before(slots)

    def _open(self) -> None:
        """Open the next bucket; for recent ones, all of an epoch, ordered by last access."""
        first = self._order[self._at]
        end = self._at + 1
        if first // CLASSES >= self._recent_from:
            end = bisect_left(self._order, (first // CLASSES + 1) * CLASSES, self._at)
        taken = [bucket for bucket in self._order[self._at : end] if bucket in self._entries]
        self._at = end
        if not taken:
            return
        parts = [self._take(bucket) for bucket in taken]
        slots = np.concatenate(parts)
        buckets = np.repeat(taken, [len(part) for part in parts])
        if len(taken) > 1:
            by_access = np.argsort(self._accessed[slots], kind="stable")
            slots, buckets = slots[by_access], buckets[by_access]
        self._opened, self._opened_from = slots, buckets

    def _enqueue_freed(self) -> None:
        """Queue the slots that had to stay for the queue, except those used since."""
        slots = self._freed[self.bucket_of[self._freed] == self._freed_from]
        parts = list(self._by_bucket(slots, self.bucket_of[slots]))
        densities = self._density.of(np.array([bucket for bucket, _ in parts], np.int64)).tolist()
        for (bucket, part), density in zip(parts, densities, strict=True):
            self._queue.append((bucket, density, part))
        self._queued += len(slots)
        self._free_before(slots)

    def _free_before(self, slots: Slots) -> None:
        """Find the slots that can leave after `slots`, which were queued last."""
        self._freed = self.prefixes.leave(slots)
        self._freed_from = self.bucket_of[self._freed]

    def _waiting(self) -> list[tuple[int, float, Slots]]:
        """Return the slots that are queued or in opened buckets, with bucket and density."""
        opened = self._by_bucket(self._opened, self._opened_from)
        return [
            *self._queue,
            *((bucket, self._densities[bucket], slots) for bucket, slots in opened),
        ]

    def next_density(self, count: int) -> float | None:
        """Return the worth of each of the next `count` victims; None if it differs."""
        self._fill_queue(1)
        if self._queue and len(self._queue[0][2]) >= count:
            return self._queue[0][1]
        return None

    def densities(self, count: int) -> list[float]:
        """Return the worth of the next `count` victims; infinity where there are no more."""
        self._fill_queue(count)
        found: list[float] = []
        for _, density, slots in self._queue:
            if len(found) >= count:
                break
            found += [density] * len(slots)
        return (found + [np.inf] * (count - len(found)))[:count]

    def pop(self, count: int, readers: Readers, parked: set[int]) -> list[tuple[int, Slots]]:
        """Remove and return up to `count` of the idle slots that are worth least, by bucket.

        Other slots on the way lose their entry and go to `parked`.
        """
        victims = []
        while count:
            self._fill_queue(count)
            if not self._queue:
                break
            bucket, density, slots = self._queue.popleft()
            self._queued -= len(slots)
            looked_at = 2 * count + WINDOW_SLOTS
            window, rest = slots[:looked_at], slots[looked_at:]
            live = window[self.bucket_of[window] == bucket]
            busy = readers[live] != 0
            if busy.any():
                parked.update(live[busy].tolist())
                live = live[~busy]
            taken, left = live[:count], live[count:]
            rest = np.concatenate((left, rest)) if len(rest) else left
            if len(rest):
                self._queue.appendleft((bucket, density, rest))
                self._queued += len(rest)
            if len(taken):
                victims.append((bucket, taken))
                self.bucket_of[taken] = 0
                self.prefixes.left(taken)
                count -= len(taken)
        return victims

    def slots(self) -> set[int]:
        """Return all slots that have a live entry, in O(entries)."""
        parts = [(bucket, part) for bucket, parts in self._entries.items() for part in parts]
        parts += [(bucket, part) for bucket, _, part in self._waiting()]
        live = [part[self.bucket_of[part] == bucket] for bucket, part in parts]
        return {*np.concatenate([NO_SLOTS, *live]).tolist()}

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(entries)."""
        entries = sum(len(part) for parts in self._entries.values() for part in parts)
        assert entries == self._num_entries, f"{self._num_entries} entries count, not {entries}"
        assert entries <= 2 * self._max_entries, f"{entries} entries, never swept"
        queued = sum(len(slots) for _, _, slots in self._queue)
        assert queued == self._queued, f"{self._queued} slots count as queued, not {queued}"
