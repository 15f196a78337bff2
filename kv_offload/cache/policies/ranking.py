"""Slots in buckets, and the buckets in the order in which they give victims."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies.density import AGES, CLASSES, OLD, HitDensity
from kv_offload.cache.policies.prefixes import PrefixOrder
from kv_offload.cache.slots import NO_SLOTS, Slots

SLACK_ENTRIES = 4096
"""How many stale entries are never worth a sweep."""

QUEUED_SLOTS = 4096
"""How many slots of a bucket come into the queue at a time: a step pays for so many, and a bucket
may have an eighth of all."""

NEVER = 1 << 62
"""An epoch that does not come."""

WINDOW_SLOTS = 64
"""How many slots a search for victims looks at, beyond twice those that it wants."""


class Ranking:
    """Entries of slots, by bucket in the order of access. Only those that `bucket_of` confirms are
    live; a slot that moved has left a stale one. Stale entries are swept bucket by bucket, as
    entries are added, so that there are about two entries a slot.

    Between two calls of `rank` the order of the buckets stays, and the slots of the worst wait in a
    queue. What has to stay for its child (`prefixes`) comes into the queue after that, and
    only once it is wanted: a prompt that grew turn by turn is a chain of a hundred small parts.
    """

    def __init__(self, capacity: int, density: HitDensity) -> None:
        self._density = density
        self._max_entries = 2 * capacity + SLACK_ENTRIES
        self.bucket_of = np.zeros(capacity, np.int64)
        """By slot; 0 where it has no key."""
        self.prefixes = PrefixOrder(self.bucket_of)
        self._entries: dict[int, deque[Slots]] = {}
        self._num_entries = 0
        self._to_sweep: list[int] = []
        self._queue: deque[tuple[int, float, Slots]] = deque()  # with bucket and density
        self._queued = 0
        self._opened = NO_SLOTS
        """The rest of the buckets from which slots came into the queue last."""
        self._opened_from = self.bucket_of[:0]
        self._freed = NO_SLOTS
        """Slots that can leave once all of the queue has. They have entries as well."""
        self._freed_from = self.bucket_of[:0]
        self._order: list[int] = []
        self._densities: dict[int, float] = {}
        self._at = 0
        self._recent_from = NEVER
        self._accesses = 0
        self._accessed = np.zeros(capacity, np.int64)  # by slot, its place among all accesses
        self._last_place = np.zeros(capacity, np.int32)  # only within `_distinct`
        self.rank()

    def put(self, slots: Slots) -> None:
        """Add entries, the last the most recent, to the buckets in which the slots are now."""
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
        """Yield the slots of each bucket, in their order."""
        order = np.argsort(buckets, kind="stable")
        slots, buckets = slots[order], buckets[order]
        changes = (np.flatnonzero(buckets[1:] != buckets[:-1]) + 1).tolist()
        for first, end in itertools.pairwise([0, *changes, len(slots)] if len(slots) else []):
            yield int(buckets[first]), slots[first:end]

    def _distinct(self, slots: Slots) -> Slots:
        """Leave out all entries of a slot but the last."""
        places = np.arange(len(slots), dtype=np.int32)
        self._last_place[slots] = places
        distinct: Slots = slots[self._last_place[slots] == places]
        return distinct

    def _add(self, bucket: int, slots: Slots) -> None:
        self._entries.setdefault(bucket, deque()).append(slots)
        self._num_entries += len(slots)

    def _take(self, bucket: int) -> Slots:
        """Take out what is live of a bucket."""
        slots = np.concatenate(self._entries.pop(bucket))
        self._num_entries -= len(slots)
        return self._distinct(slots[self.bucket_of[slots] == bucket])

    def _sweep(self, entries: int) -> None:
        """Drop the stale ones of so many entries, or of a bucket if that has more."""
        while entries > 0 and self._num_entries > self._max_entries:
            if not self._to_sweep:
                self._to_sweep = [*self._entries]
            bucket = self._to_sweep.pop()
            if bucket in self._entries:
                entries -= sum(map(len, self._entries[bucket]))
                if len(live := self._take(bucket)):
                    self._add(bucket, live)

    def rank(self, recent_from: int = NEVER) -> None:
        """Order the buckets by what their slots are worth now, the older first of equals.

        Those from the epoch `recent_from` on come last, and give their slots by the last access.
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
        # All of this epoch, as slots will come.
        before = [bucket for bucket in self._entries if bucket < now]
        buckets = np.array([*before, *range(now, now + CLASSES)])
        densities = self._density.of(buckets)
        recent = buckets // CLASSES >= recent_from
        order = np.lexsort((buckets, np.where(recent, 0, densities), recent))
        self._order = buckets[order].tolist()
        self._densities = dict(zip(self._order, densities[order].tolist(), strict=True))
        self._at = 0
        self._recent_from = recent_from

    def _merge_old(self, first_told_apart: int) -> None:
        """Move what has become too old to be told apart to the buckets of epoch `OLD`."""
        for bucket in sorted(self._entries):
            if bucket >= first_told_apart:
                break
            old = OLD * CLASSES + bucket % CLASSES
            if bucket != old and len(slots := self._take(bucket)):
                self.bucket_of[slots] = old
                self._add(old, slots)

    def _fill_queue(self, count: int) -> None:
        """Have `count` slots wait in the queue, or all of those that can leave."""
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
            end = int(others.argmax()) or len(opened_from)  # the first is of the bucket
            slots, blocked = self.prefixes.split(self._opened[:end])
            self._opened, self._opened_from = self._opened[end:], self._opened_from[end:]
            if len(blocked):
                self._add(bucket, blocked)
            if len(slots):
                self._enqueue(bucket, self._densities[bucket], slots)

    def _open(self) -> None:
        """Take out the next bucket; of recent ones all of an epoch, by their last access."""
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

    def _enqueue(self, bucket: int, density: float, slots: Slots) -> None:
        """Have slots of a bucket leave next."""
        self._queue.append((bucket, density, slots))
        self._queued += len(slots)
        self._free_before(slots)

    def _enqueue_freed(self) -> None:
        """Have what had to stay for the queue leave after it, but for what was used since."""
        slots = self._freed[self.bucket_of[self._freed] == self._freed_from]
        parts = list(self._by_bucket(slots, self.bucket_of[slots]))
        densities = self._density.of(np.array([bucket for bucket, _ in parts], np.int64)).tolist()
        for (bucket, part), density in zip(parts, densities, strict=True):
            self._queue.append((bucket, density, part))
        self._queued += len(slots)
        self._free_before(slots)

    def _free_before(self, slots: Slots) -> None:
        """Take note of what can leave after these slots, which came into the queue last."""
        self._freed = self.prefixes.leave(slots)
        self._freed_from = self.bucket_of[self._freed]

    def _waiting(self) -> list[tuple[int, float, Slots]]:
        """Return what was taken out of buckets and has not left, with bucket and density."""
        opened = self._by_bucket(self._opened, self._opened_from)
        return [
            *self._queue,
            *((bucket, self._densities[bucket], slots) for bucket, slots in opened),
        ]

    def next_density(self, count: int) -> float | None:
        """Return what each of the next `count` victims is worth; None if they are not alike."""
        self._fill_queue(1)
        if self._queue and len(self._queue[0][2]) >= count:
            return self._queue[0][1]
        return None

    def densities(self, count: int) -> list[float]:
        """Return what the next `count` victims are worth; infinity where there are no more."""
        self._fill_queue(count)
        found: list[float] = []
        for _, density, slots in self._queue:
            if len(found) >= count:
                break
            found += [density] * len(slots)
        return (found + [np.inf] * (count - len(found)))[:count]

    def pop(self, count: int, held: NDArray[np.bool_], parked: set[int]) -> list[tuple[int, Slots]]:
        """Take out up to `count` idle slots that are worth least, with their buckets.

        Held slots that are met lose their entry and go to `parked`.
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
            busy = held[live]
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
        assert entries <= 2 * self._max_entries, f"{entries} entries, which nobody sweeps"
        queued = sum(len(slots) for _, _, slots in self._queue)
        assert queued == self._queued, f"{self._queued} slots count as queued, not {queued}"
