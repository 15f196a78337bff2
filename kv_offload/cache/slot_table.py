"""The slots of a cache: the key of each, and the loads and stores that are running on it.

A slot has a key, or it is

- unused: it never had a key;
- free: it lost its key because the store failed, or to `forget` or `clear`;
- an orphan: it lost its key while a load or store was running. A lookup never finds an orphan, and
  it gets no new key until that load or store has ended and the slot is freed.

Any number of loads may read a slot at once, or one store writes it: from `prepare_*` of the manager
to `complete_*`.

Memory grows with the slots that were used, not with `num_slots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from kv_offload.cache.slots import NO_SLOTS, Key, Mask, MisuseError, Readers, Runs, Slots, distinct

RUN_SLOTS = 16
"""Number of keys that one lookup finds if their slots are consecutive; otherwise it finds one.

A lookup reads memory that is not in the CPU's caches. With a million known keys on an EPYC, a
prefix of 2,048 keys took 0.17 ms by runs and 0.70 ms key by key. With slots in random order it
takes 0.87 ms by runs (November 2026)."""

RUN_GROWTH = 4
"""After a run of consecutive or unknown keys, the next attempt tries this many times as many."""

SHARD_KEYS = 16_384
"""Average number of keys per dict, at most. A dict whose keys come and go is rebuilt occasionally,
which would hold up every request: for 60 ms with 1,000,000 keys, for 1 ms with this many (CPython
3.11). More dicts would not fit into the CPU's caches: a new prompt of 512 keys, with 1,000,000 keys
in memory, took 0.67 ms with 64 dicts and 0.84 ms with 256 (November 2026, on an EPYC)."""


class KeyMap:
    """Maps keys to ints like a dict, sharded over dicts that are small enough to be rebuilt."""

    __slots__ = ("_mask", "_shards")

    def __init__(self, most_keys: int) -> None:
        """Make enough dicts for `most_keys`; with more keys the dicts only grow."""
        shards = 1 << (max(0, most_keys - 1) // SHARD_KEYS).bit_length()
        self._mask = shards - 1
        self._shards: tuple[dict[Key, int], ...] = tuple({} for _ in range(shards))

    def get(self, key: Key) -> int:
        """Return the value of a key, -1 if it is unknown."""
        return self._shards[hash(key) & self._mask].get(key, -1)

    def get_all(self, keys: Sequence[Key]) -> list[int]:
        """Return the value of each key, -1 for unknown keys."""
        shards, mask = self._shards, self._mask
        return [shards[hash(key) & mask].get(key, -1) for key in keys]

    def add_all(self, keys: Sequence[Key], values: Sequence[int]) -> None:
        """Map each key to its value; the keys are distinct and unknown."""
        shards, mask = self._shards, self._mask
        for key, value in zip(keys, values, strict=True):
            shards[hash(key) & mask][key] = value

    def remove_all(self, keys: Sequence[Key]) -> None:
        """Remove keys, which are distinct and known."""
        shards, mask = self._shards, self._mask
        for key in keys:
            del shards[hash(key) & mask][key]

    def rename_all(self, key_of: list[Any], values: Sequence[int], keys: Sequence[Key]) -> None:
        """Rename the keys of `values` to new, distinct `keys`; updates `key_of` (value to key)."""
        shards, mask = self._shards, self._mask
        for key, value in zip(keys, values, strict=True):
            gone = key_of[value]
            del shards[hash(gone) & mask][gone]
            shards[hash(key) & mask][key] = value
            key_of[value] = key

    def items(self) -> Iterator[tuple[Key, int]]:
        """Iterate over all (key, int) pairs, in no order."""
        for shard in self._shards:
            yield from shard.items()


WRITTEN = -1
"""Replaces the number of readers while a store writes the slot."""

ONE = np.int32(1)
"""NumPy adds a number of the array's own type in 2 us for 512 slots, and another in 50 us."""


def begin_reads(readers: Readers, slots: Slots) -> None:
    """Count one more reader of each slot; a slot can be named more than once."""
    np.add.at(readers, slots, ONE)


def end_reads(readers: Readers, slots: Slots) -> Slots:
    """Count one reader less of each slot; return the slots that have none left, each once.

    Raises `MisuseError` for a slot with no reader; nothing is changed.
    """
    np.subtract.at(readers, slots, ONE)
    left = readers[slots]
    if (left < 0).any():
        begin_reads(readers, slots)
        raise MisuseError(
            f"loads of slots {sorted({*slots[left < 0].tolist()})} were completed more often than "
            "prepared: complete every prepared load once"
        )
    return distinct(slots[left == 0])


class SlotTable:
    """Key and readers of the slots 0..`num_slots` - 1; `CacheManager` decides what happens to them.

    Refuses to end a load or store that is not running.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.usable_slots = num_slots
        """Only slots below this are given out. Never below `given_out`."""
        self._slot_of = KeyMap(num_slots)
        self._key_of: list[Any] = []  # keys by slot; None if free or an orphan
        self._free: list[int] = []
        self._num_orphans = 0
        # Zeros from the system take no memory until they are written.
        self.readers: Readers = np.zeros(num_slots, np.int32)

    @property
    def given_out(self) -> int:
        """Number of slots given out so far; the slots from here on are unused."""
        return len(self._key_of)

    @property
    def slots_in_use(self) -> int:
        """Number of slots that have a key, and orphans."""
        return self.given_out - len(self._free)

    def items(self) -> Iterator[tuple[Key, int]]:
        """Iterate over all keys and their slots, in no order."""
        return self._slot_of.items()

    def __contains__(self, key: Key) -> bool:
        """Return whether a key has a slot."""
        return self._slot_of.get(key) >= 0

    def slot_numbers(self, keys: Sequence[Key]) -> list[int]:
        """Return the slot of each key, -1 for a key that has none."""
        return [*chain.from_iterable(self._look_up(keys))]

    def parent_slots(self, runs: Runs) -> list[int]:
        """Return the slot of each run's parent key; -1 if it has none."""
        get = self._slot_of.get
        return [-1 if run.parent is None else get(run.parent) for run in runs]

    def find(self, keys: Sequence[Key]) -> Slots:
        """Return the slot of each key as an array; faster than `slot_numbers` for many keys."""
        found = (
            np.arange(part.start, part.stop, dtype=np.int32)
            if isinstance(part, range)
            else np.array(part, np.int32)
            for part in self._look_up(keys)
        )
        return np.concatenate([NO_SLOTS, *found])

    def _look_up(self, keys: Sequence[Key]) -> Iterator[range | list[int]]:
        """Yield the slots of all keys in order, part by part."""
        first, count = 0, RUN_SLOTS
        while first < len(keys):
            part = keys[first : first + count]
            first += count
            slot = self._slot_of.get(part[0])
            if slot >= 0 and self._key_of[slot : slot + len(part)] == part:
                count *= RUN_GROWTH
                yield range(slot, slot + len(part))
                continue
            slots = self._slot_of.get_all(part)
            # After an unknown key, hardly any key is known.
            count = count * RUN_GROWTH if slots[0] < 0 and slots[-1] < 0 else RUN_SLOTS
            yield slots

    def take_free(self, keys: Sequence[Key]) -> Slots:
        """Give free and unused slots to the first of `keys`, which are distinct and new.

        A store to each of these slots begins.
        """
        slots = NO_SLOTS
        if self._free:
            reused = [self._free.pop() for _ in range(min(len(self._free), len(keys)))]
            for slot, key in zip(reused, keys, strict=False):
                self._key_of[slot] = key
            slots = np.array(reused, np.int32)
        if len(slots) < len(keys) and self.given_out < self.usable_slots:
            first = self.given_out
            self._key_of += keys[len(slots) :][: self.usable_slots - first]
            slots = np.concatenate((slots, np.arange(first, self.given_out, dtype=np.int32)))
        if len(slots):
            self._slot_of.add_all(keys[: len(slots)], slots.tolist())
            self.readers[slots] = WRITTEN
        return slots

    def restore(self, slots: Slots, keys: Sequence[Key], end: int) -> None:
        """Give out all slots below `end`: `slots` to distinct new `keys`; the others are free.

        `slots` are unused.
        """
        first = self.given_out
        self._key_of += [None] * (end - first)
        for slot, key in zip(slots.tolist(), keys, strict=True):
            self._key_of[slot] = key
        self._slot_of.add_all(keys, slots.tolist())
        free = [slot for slot in range(end - 1, first - 1, -1) if self._key_of[slot] is None]
        self._free = free + self._free

    def keys_of(self, slots: Slots) -> list[Key | None]:
        """Return the key of each slot, None if it has none."""
        key_of = self._key_of
        return [key_of[slot] for slot in slots.tolist()]

    def replace(self, slots: Slots, keys: Sequence[Key]) -> None:
        """Drop the keys of idle `slots` and give the slots to `keys`, which are distinct and new.

        A store to each slot begins.
        """
        self._slot_of.rename_all(self._key_of, slots.tolist(), keys)
        self.readers[slots] = WRITTEN

    def forget(self, slots: Slots) -> None:
        """Drop the keys of `slots`, which become free, or orphans while they are not idle."""
        named = slots.tolist()
        self._slot_of.remove_all([self._key_of[slot] for slot in named])
        for slot in named:
            self._key_of[slot] = None
        idle = slots[self.are_idle(slots)]
        self._free += idle.tolist()
        self._num_orphans += len(slots) - len(idle)

    def clear(self) -> None:
        """Drop all keys."""
        idle = self.readers[: self.given_out] == 0
        self._num_orphans = int((~idle).sum())
        self._slot_of = KeyMap(self.num_slots)
        self._key_of = [None] * self.given_out
        # Slots are given out from the end of this list, so a prefix gets consecutive slots.
        self._free = np.flatnonzero(idle)[::-1].tolist()

    # -- loads and stores ----------------------------------------------------------------------

    def start_loads(self, slots: Slots) -> None:
        """Begin one load of each slot; a slot can be named more than once.

        Raises `MisuseError` for a slot that a store is writing; nothing is changed.
        """
        written = ~self.not_written(slots)
        if written.any():
            raise MisuseError(
                f"loads of slots {slots[written].tolist()} were begun while a store writes them: "
                "load what is readable"
            )
        begin_reads(self.readers, slots)

    def end_loads(self, slots: Slots) -> Slots:
        """End one load of each slot; return the slots that are idle now and have a key, each once.

        Raises `MisuseError` for a slot with no running load; nothing is changed.
        """
        return self._free_orphans(end_reads(self.readers, slots))

    def end_stores(self, slots: Slots) -> Slots:
        """End the store of each slot; return the slots that have a key.

        Raises `MisuseError` for a slot with no running store; nothing is changed.
        """
        written = self.readers[slots] == WRITTEN
        if not written.all() or len({*slots.tolist()}) < len(slots):
            raise MisuseError(
                f"stores to slots {sorted(slots.tolist())} were completed, but only stores to "
                f"{sorted({*slots[written].tolist()})} run: complete every prepared store once"
            )
        self.readers[slots] = 0
        return self._free_orphans(slots)

    def _free_orphans(self, slots: Slots) -> Slots:
        """Free the orphans among slots that are idle now, and return the others."""
        if not self._num_orphans:
            return slots
        owned = np.array([self._key_of[slot] is not None for slot in slots.tolist()], bool)
        freed = slots[~owned].tolist()
        self._num_orphans -= len(freed)
        self._free += freed
        others: Slots = slots[owned]
        return others

    def not_written(self, slots: Slots) -> Mask:
        """Return for each slot whether no store is writing it."""
        not_written: Mask = self.readers[slots] != WRITTEN
        return not_written

    def are_idle(self, slots: Slots) -> Mask:
        """Return for each slot whether it is neither read nor written."""
        idle: Mask = self.readers[slots] == 0
        return idle

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        known = dict(self.items())
        for key, slot in known.items():
            assert 0 <= slot < self.given_out, f"slot {slot} is used that was never given out"
            assert self._key_of[slot] == key, f"slot {slot} of {key!r} is {self._key_of[slot]!r}'s"
        assert self.given_out <= self.usable_slots <= self.num_slots, "a slot does not exist"
        without_key = {slot for slot, key in enumerate(self._key_of) if key is None}
        orphans = without_key - {*self._free}
        assert len(orphans) == self._num_orphans, "orphans are not counted right"
        all_slots = [*known.values(), *orphans, *self._free]
        assert sorted(all_slots) == list(range(self.given_out)), "a slot is lost or has two owners"
        assert without_key >= {*self._free}, "a slot without a key has a name"
        busy = {*np.flatnonzero(self.readers).tolist()}
        assert orphans <= busy, "an orphan has no running operation"
        assert busy <= {*known.values()} | orphans, "a busy slot has no key and is no orphan"
        assert (self.readers >= WRITTEN).all(), "a slot has fewer than no readers"
