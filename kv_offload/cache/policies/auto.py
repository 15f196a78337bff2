"""Evicts by recency, or by hit density once the traffic shows that this brings more hits.

`rivals` decides which rule leads. While recency leads, everything is stored and the least recently
used block is evicted. While hit density leads, a block is stored only if it is worth more than the
block evicted for it. The worth of a block is learned from the traffic (`density`), also from keys
without a slot (`history`). Slots of the same class and age share a bucket, and the worst buckets
give the victims (`ranking`), no block before its child (`prefixes`).

A step pays for a few array operations. Other work is deferred to a step without an access, or until
too many accesses are pending. The buckets are ranked again after each epoch of accesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.policies.density import CLASSES, LENGTH_EDGES, NEXT_CLASS, Buckets, HitDensity
from kv_offload.cache.policies.history import Hashes, History, hash_keys
from kv_offload.cache.policies.prefixes import FIRST
from kv_offload.cache.policies.ranking import Ranking
from kv_offload.cache.policies.rivals import Rivals
from kv_offload.cache.slots import NO_SLOTS, Key, Mask, Readers, Runs, Slots

NOTED_ACCESSES, NOTED_OF_CAPACITY, MAX_NOTED_ACCESSES = 512, 64, 4096
"""Number of pending accesses at which the next access processes them: one per `NOTED_OF_CAPACITY`
slots, within the other two bounds. Processing 4,096 takes up to a millisecond of a step."""

QUIET_SHARE = 2
"""A step without an access processes the pending ones if they are at least 1 / `QUIET_SHARE` of
that number."""

MIN_EPOCH, EPOCHS_OF_CAPACITY = 64, 8
"""Minimum accesses per epoch, since ranking the buckets takes a fraction of a millisecond; and the
epochs in which as many blocks are accessed as there are slots."""

MIN_MEMORY, MEMORY_OF_CAPACITY = 100_000, 8
"""Accesses for which evidence counts: the first, or the second per slot if that is more."""

HISTORY_OF_CAPACITY = 8
"""Keys without a slot that are remembered, per slot, at 16 bytes each."""

_FOLLOWS = -2
"""Stands for a parent that is the preceding key of the same call."""


class AutoPolicy(EvictionPolicy):
    """Recency, or hit density with admission. A declined key still counts as accessed."""

    reads_runs = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._epoch_accesses = max(MIN_EPOCH, capacity // EPOCHS_OF_CAPACITY)
        self._max_noted = min(
            MAX_NOTED_ACCESSES, max(NOTED_ACCESSES, capacity // NOTED_OF_CAPACITY)
        )
        memory = max(MIN_MEMORY, MEMORY_OF_CAPACITY * capacity)
        self._density = HitDensity(memory / self._epoch_accesses)
        self._rivals = Rivals(capacity, self._density, self._epoch_accesses)
        self.clear()

    def clear(self) -> None:
        self._density.clear()
        self._rivals.clear()
        self._ranking = Ranking(self.capacity, self._density)
        self._bucket_of = self._ranking.bucket_of
        self._hash_of = np.zeros(self.capacity, np.uint64)
        self._newly_demotable = np.zeros(self.capacity, bool)
        self.has_newly_demotable = False
        self._parked: set[int] = set()
        self._history = History(HISTORY_OF_CAPACITY, self.capacity)
        # Hashes, buckets and parents from `admit`, for the next calls of `add` and `replace`.
        self._admitted: tuple[Hashes, Buckets, NDArray[np.int64]] | None = None
        self._last_added = FIRST
        self._found = 0  # accesses in this epoch to keys that had a slot
        self._accesses = self._noted = self._noted_before = 0
        self._begun: list[Buckets] = []
        self._ended: list[Buckets] = []
        self._lost: list[Buckets] = []
        self._moved: list[Slots] = []
        self._gone: list[tuple[Hashes, Buckets]] = []

    # -- accesses ------------------------------------------------------------------------------

    def admit(self, keys: Sequence[Key], runs: Runs, free: int, parents: Sequence[int]) -> Mask:
        if not len(keys):
            return np.ones(0, bool)
        self._advance()
        sizes, tokens, must, *_ = zip(*runs, strict=True)
        classes, before = LENGTH_EDGES.searchsorted(tokens, side="right"), np.array(parents)
        if len(runs) < len(keys):
            counts = np.array(sizes)
            classes = classes.repeat(counts)
            before = np.full(len(keys), _FOLLOWS)
            before[np.cumsum(counts) - counts] = parents
        hashes = hash_keys(keys)
        known = self._history.take(hashes)
        if known.any():
            seen = known > 0
            classes[seen] = NEXT_CLASS[known[seen] % CLASSES]
            self._ended.append(known[seen])
        buckets = classes + self._density.epoch * CLASSES
        self._begun.append(buckets)
        self._count(len(keys))
        if self._rivals.see_new(known > 0):
            self._rerank()
        if free >= len(keys) or self._rivals.stores_all:
            self._admitted = hashes, buckets, before
            return np.ones(len(keys), bool)
        worth = self._worth_a_slot(classes, free)
        if any(must):
            worth |= np.array(must).repeat(sizes)
        if not worth.all():
            if len(runs) < len(keys):
                _cut_runs(worth, np.array(sizes))
            declined = ~worth
            self._gone.append((hashes[declined], buckets[declined]))
            hashes, buckets, before = hashes[worth], buckets[worth], before[worth]
        if len(hashes):
            self._admitted = hashes, buckets, before
        return worth

    def _worth_a_slot(self, classes: NDArray[np.int64], free: int) -> Mask:
        """Return which new blocks are worth more than their victims."""
        density = self._density.new[classes]
        wanted = len(classes) - free
        leaving = self._ranking.next_density(wanted)
        if leaving is not None:
            worth: Mask = density > leaving
            worth[:free] = True
            return worth
        each = self._ranking.densities(wanted)
        if each[-1] == np.inf:  # all ranked slots have left or changed their bucket
            self._rerank()
            each = self._ranking.densities(wanted)
        worth = np.ones(len(classes), bool)
        taken = 0
        for place, value in enumerate(density[free:].tolist(), start=free):
            if value > each[taken]:
                taken += 1
            else:
                worth[place] = False
        return worth

    def add(self, slots: Slots, keys: Sequence[Key]) -> None:
        self._history.touch(len(slots))
        self._give(slots, keys)

    def _give(self, slots: Slots, keys: Sequence[Key]) -> None:
        if self._admitted is None:
            hashes, buckets = self._known(keys)
            before = np.full(len(slots), FIRST)
        else:
            (hashes, buckets, before), count = self._admitted, len(slots)
            self._admitted = None
            if count < len(hashes):
                self._admitted = hashes[count:], buckets[count:], before[count:]
                hashes, buckets, before = hashes[:count], buckets[:count], before[:count]
            if count:
                before = self._slots_before(slots, before)
        self._ranking.prefixes.link(slots, before)
        self._hash_of[slots] = hashes
        self._bucket_of[slots] = buckets
        self._newly_demotable[slots] = False
        self._moved.append(slots[::-1])

    def _slots_before(self, slots: Slots, before: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the parent slot of each of `slots`, from the last call of `admit`."""
        follows = before == _FOLLOWS
        if follows.any():
            previous = np.empty_like(slots)
            previous[0], previous[1:] = self._last_added, slots[:-1]
            before = np.where(follows, previous, before)
        self._last_added = slots[-1]
        return before

    def _known(self, keys: Sequence[Key]) -> tuple[Hashes, Buckets]:
        """Return hashes and buckets of keys that `admit` did not see; not an access."""
        hashes = hash_keys(keys)
        buckets = self._history.take(hashes)
        if (new := buckets == 0).any():
            buckets[new] = self._density.epoch * CLASSES
            self._begun.append(buckets[new])
        return hashes, buckets

    def replace(self, keys: Sequence[Key], readers: Readers) -> Slots:
        popped = self._ranking.pop(len(keys), readers, self._parked)
        missing = len(keys) - sum(len(slots) for _, slots in popped)
        if missing:
            self._rerank()
            popped += self._ranking.pop(missing, readers, self._parked)
        for bucket, slots in popped:
            self._gone.append((self._hash_of[slots], np.full(len(slots), bucket)))
        # Sorted, so that consecutive keys usually get consecutive slots.
        victims: Slots = np.sort(np.concatenate([NO_SLOTS, *(slots for _, slots in popped)]))
        if len(victims):
            if self._admitted is not None:
                before = self._admitted[2]
                evicted = self._bucket_of[np.maximum(before, 0)] == 0
                before[(before >= 0) & evicted] = FIRST  # the parent was evicted for these keys
            self._give(victims, keys[: len(victims)])
        if self._admitted is not None:
            self._gone.append(self._admitted[:2])
            self._admitted = None
        return victims

    def use(self, slots: Slots) -> None:
        self._advance()
        if self._rivals.see_known():
            self._rerank()
        self._found += len(slots)
        old = self._bucket_of[slots]
        classes = old % CLASSES
        self._newly_demotable[slots] = self.has_newly_demotable = True
        new = NEXT_CLASS[classes] + self._density.epoch * CLASSES
        self._bucket_of[slots] = new
        self._ended.append(old)
        self._begun.append(new)
        self._moved.append(slots)
        self._count(len(slots))

    def release(self, slots: Slots) -> None:
        if self._parked and (back := self._parked.intersection(slots.tolist())):
            self._parked -= back
            self._moved.append(np.array(sorted(back), np.int32))

    def discard(self, slots: Slots) -> None:
        self._lost.append(self._bucket_of[slots])
        self._bucket_of[slots] = 0
        self._newly_demotable[slots] = False
        self._parked.difference_update(slots.tolist())

    # -- deferred work ---------------------------------------------------------------------------

    def _count(self, accesses: int) -> None:
        self._accesses += accesses
        self._noted += accesses

    def _advance(self) -> None:
        """End the epoch if it is over, or process pending accesses if there are enough."""
        if self._accesses >= self._epoch_accesses:
            self._take_in()
            for _ in range(self._accesses // self._epoch_accesses):
                self._rivals.end_epoch(self._found)
                self._found = 0
                self._density.next_epoch()
            self._accesses %= self._epoch_accesses
            self._density.compute()
            self._rivals.begin_epoch()
            self._rank()
        elif self._noted >= self._max_noted:
            self._take_in()

    def catch_up(self) -> None:
        if self._noted == self._noted_before and self._noted >= self._max_noted // QUIET_SHARE:
            self._take_in()
        self._noted_before = self._noted

    def _rank(self) -> None:
        self._ranking.rank(self._rivals.recent_from)

    def _rerank(self) -> None:
        self._take_in()
        self._rank()

    def _take_in(self) -> None:
        if self._gone:
            hashes, buckets = zip(*self._gone, strict=True)
            forgotten = self._history.put(np.concatenate(hashes), np.concatenate(buckets))
            self._lost.append(forgotten)
        none = np.empty(0, np.int64)
        lives = (np.concatenate([none, *part]) for part in (self._begun, self._ended, self._lost))
        self._density.count(*lives)
        if self._moved:
            self._ranking.put(np.concatenate(self._moved))
        for notes in (self._gone, self._begun, self._ended, self._lost, self._moved):
            notes.clear()
        self._noted = 0

    # -- the tier below ------------------------------------------------------------------------

    def should_demote(self, slots: Slots) -> Mask:
        if self._rivals.stores_all:
            return super().should_demote(slots)
        return self._density.likely(self._bucket_of[slots])

    def take_newly_demotable(self) -> Slots:
        newly_demotable = np.flatnonzero(self._newly_demotable).astype(np.int32)
        self._newly_demotable[newly_demotable] = self.has_newly_demotable = False
        return newly_demotable

    def resident(self) -> list[int]:
        slots: list[int] = np.flatnonzero(self._bucket_of > 0).tolist()
        return slots

    def check_integrity(self, readers: Readers) -> None:
        slots = self.resident()
        assert self._parked <= {*slots}, "a slot without a key is parked"
        assert readers[[*self._parked]].all(), "an idle slot is parked"
        listed = {*self._ranking.slots(), *np.concatenate([NO_SLOTS, *self._moved]).tolist()}
        lost = {*slots} - listed - self._parked
        assert not lost, f"slots {sorted(lost)} can never be evicted"
        self._ranking.check_integrity()
        noted = [sum(map(len, notes)) for notes in (self._begun, self._ended, self._lost)]
        lives = self._density.lives + noted[0] - noted[1] - noted[2]
        watched = len(slots) + len(self._history) + sum(len(hashes) for hashes, _ in self._gone)
        assert lives == watched, f"{lives} lives go on of {watched} keys that are watched"


def _cut_runs(worth: Mask, counts: NDArray[np.int64]) -> None:
    """Decline all keys of a run after its first declined key."""
    places = np.arange(len(worth))
    last_declined = np.maximum.accumulate(np.where(worth, -1, places))
    first_of_run = np.repeat(np.cumsum(counts) - counts, counts)
    worth &= last_declined < first_of_run
