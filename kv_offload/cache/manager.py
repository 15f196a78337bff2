"""Which block is in which slot of the host cache: the scheduler's side, in pure Python.

    unknown --prepare_store--> being stored --complete_store(ok)--> readable --evicted--> unknown
                                    '-------complete_store(failed)------------------------^

A readable key may have any number of loads running; it is evicted only when it has none. `reset`
forgets all keys at once, also those under a running load or store: their slots are orphans, which
nobody can look up and nobody else is given, until the operation on them is completed. Operations
are therefore completed by slot, not by key.

Keys of one call are in prefix order, and recency is set so that the first of them is evicted last:
a tail without its head is useless. It is set when an operation is prepared, where the order of all
its keys is known, and not when it is completed, because a job that was cut into slices completes
piece by piece, head first.

Whole prefixes go in and out as batches, since a prompt has thousands of blocks: what is known of
slots is in arrays, and only giving a slot to a key takes Python code per key. Of keys that follow
each other in slots that do, which is how they are given, only one in `RUN_SLOTS` is looked up.

Not thread safe: one scheduler owns it. All operations but `reset` take O(1) amortised time per key,
without a pause to reorganise, and memory grows with the slots that were used, not with `num_slots`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.policies import EvictionPolicy, Key, Slots
from kv_offload.cache.policies.key_map import KeyMap
from kv_offload.errors import CapacityError, KVOffloadError

SlotNumbers: TypeAlias = Slots | Sequence[int]
"""What a caller may name slots by."""

NO_SLOTS: Slots = np.empty(0, np.int32)

RUN_SLOTS = 16
"""Keys that are found by one look-up where their slots follow each other, else by one each.

A look-up meets memory that the CPU's caches do not have. On an EPYC, with a million keys known, a
prefix of 2,048 took 0.17 ms so and 0.70 ms key by key; 0.87 ms where its slots are in no order
(November 2026)."""

RUN_GROWTH = 4
"""How many times as many keys are compared at once where those before were found by one look-up."""


class MissingKeyError(KVOffloadError, KeyError):
    """A load was asked for a key that is not readable."""


class MisuseError(KVOffloadError, RuntimeError):
    """The calling code is wrong: it broke a rule that is documented where this is raised."""


class StorePlan(NamedTuple):
    """What `prepare_store` decided about its keys."""

    keys: Sequence[Key]
    """The keys that are to be written, in the order in which they were given."""
    slots: Slots
    """Where, one for each of `keys`."""
    known: int
    """Keys skipped because they are readable, being stored or repeated."""
    no_room: int
    """Keys at the end skipped because every slot that could be evicted is held."""
    evicted: int
    """Keys that were evicted to make room."""


class CacheManager:
    """Maps keys to the slots 0..`num_slots` - 1 and decides what is stored, loaded and evicted."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        """Manage `num_slots` slots, all free.

        `policy` must be new and made for `num_slots` slots, and belongs to the manager afterwards.

        Raises `CapacityError` for fewer than 1 slot and `MisuseError` for another policy.
        """
        if num_slots < 1:
            raise CapacityError(f"a host cache of {num_slots} slots: give it memory for 1 or more")
        if policy.capacity != num_slots or policy.resident():
            raise MisuseError(
                f"the policy is for {policy.capacity} slots and ranks {len(policy.resident())}: "
                f"give a manager of {num_slots} slots a new one for {num_slots}"
            )
        self._num_slots = num_slots
        self._usable_slots = num_slots
        self._policy = policy
        self._evictions = 0
        self._resets = 0
        self._slot_of = KeyMap()  # known keys, readable or being stored
        # Running operations. Those on orphans, whose key was forgotten, are still here.
        self._writing: set[int] = set()
        # By slot; zeros from the system take no memory until they are written.
        self._readers = np.zeros(num_slots, np.int32)
        self._orphan = np.zeros(num_slots, bool)
        self._num_orphans = 0
        # What `forgotten` was after the last eviction from each slot, and after the last reset.
        self._forgotten_at = np.zeros(num_slots, np.int64)
        self._reset_at = 0
        # For the slots that were used since the last reset; all beyond are free, or orphans.
        self._key_of: list[Key] = []  # None where the slot is free or an orphan
        self._free: list[int] = []  # the free ones among them

    @property
    def num_slots(self) -> int:
        """Slots in total."""
        return self._num_slots

    @property
    def usable_slots(self) -> int:
        """Slots from 0 on that are given out; all of them unless `limit_slots` was called."""
        return self._usable_slots

    def limit_slots(self, usable_slots: int) -> None:
        """Give out slots below `usable_slots` only, until the next call.

        Raises `MisuseError` beyond `num_slots`, and if a slot at or above it was given out.
        """
        if not len(self._key_of) <= usable_slots <= self._num_slots:
            raise MisuseError(
                f"a limit of {usable_slots} slots: {len(self._key_of)} of {self._num_slots} were "
                "given out, name a number between"
            )
        self._usable_slots = usable_slots

    @property
    def slots_in_use(self) -> int:
        """Slots that are not free: readable, being stored, or orphans."""
        return len(self._slot_of) + self._num_orphans

    @property
    def evictions(self) -> int:
        """Keys evicted since the start; `reset` neither counts nor clears them."""
        return self._evictions

    @property
    def forgotten(self) -> int:
        """Keys evicted and resets since the start: while it is the same, readable keys stay so."""
        return self._evictions + self._resets

    def keep_their_keys(self, slots: Slots, since: int) -> bool:
        """Say whether slots have the keys that they had when `forgotten` was `since`.

        A key that was readable then is readable now. Takes some nanoseconds a slot.
        """
        return since >= self._reset_at and not (self._forgotten_at[slots] > since).any()

    def lookup(self, key: Key) -> bool:
        """Say whether a key can be loaded now. Changes nothing, recency included."""
        return bool(self.readable([key])[0])

    def is_known(self, key: Key) -> bool:
        """Say whether a key is readable or being stored. Changes nothing, recency included."""
        return key in self._slot_of

    def slot_numbers(self, keys: Sequence[Key]) -> list[int]:
        """Return the slots of `keys`, -1 for those that are not known. Changes nothing."""
        found: list[int] = []
        for first in range(0, len(keys), RUN_SLOTS):
            found += self._slots_of_run(keys[first : first + RUN_SLOTS])
        return found

    def find(self, keys: Sequence[Key]) -> Slots:
        """Return what `slot_numbers` does, as an array, which for many keys is sooner made."""
        found, first, count = [NO_SLOTS], 0, RUN_SLOTS
        while first < len(keys):
            slots = self._slots_of_run(keys[first : first + count])
            first += count
            if isinstance(slots, range):
                found.append(np.arange(slots.start, slots.stop, dtype=np.int32))
                count *= RUN_GROWTH
            else:
                found.append(np.array(slots, np.int32))
                count = RUN_SLOTS
        return np.concatenate(found)

    def _slots_of_run(self, keys: Sequence[Key]) -> range | list[int]:
        slot = self._slot_of.get(keys[0])
        if slot >= 0 and self._key_of[slot : slot + len(keys)] == keys:
            return range(slot, slot + len(keys))
        return self._slot_of.get_all(keys)

    def readable(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        """Say for each key whether it can be loaded now. Changes nothing, recency included."""
        slots = self.find(keys)
        return self._not_written(slots) & (slots >= 0)

    def touch(self, keys: Iterable[Key]) -> None:
        """Count an access to every known key and make the first of `keys` the most recent.

        Unknown keys are ignored. For a policy that counts accesses, once per request is right.
        """
        slots = self.find(tuple(keys))
        self._policy.use(slots[slots >= 0][::-1])

    def prepare_load(self, keys: Sequence[Key]) -> Slots:
        """Return the slots of `keys`, in order, held against eviction; all or nothing.

        Counts as an access, as `touch`. The caller owns one hold per key, repeated keys included,
        until `complete_load`.

        Raises `MissingKeyError` for a key that is not readable; nothing is changed.
        """
        slots = self.find(keys)
        readable = self._not_written(slots) & (slots >= 0)
        if not readable.all():
            key = keys[int(readable.argmin())]
            raise MissingKeyError(f"{key!r} is not readable: look it up in the same step")
        idle = _distinct(slots[self._readers[slots] == 0])
        self._policy.hold(idle[::-1])
        if len(idle) == len(slots):
            self._readers[slots] = 1
        else:
            # Some are named twice, or others read them too: for those, and for the order of all.
            self._policy.use(slots[::-1])
            np.add.at(self._readers, slots, 1)
        return slots

    def complete_load(self, slots: SlotNumbers) -> None:
        """End one load of each slot, whether it failed or not; the last one lifts the hold.

        Raises `MisuseError` for a slot that has no load running; nothing is changed.
        """
        ended, counts = np.unique(np.asarray(slots, np.int32), return_counts=True)
        left = self._at(self._readers, ended) - counts
        if (left < 0).any():
            at = int((left < 0).argmax())
            raise MisuseError(
                f"{counts[at]} loads of slot {ended[at]} completed, but {left[at] + counts[at]} "
                "are running: complete every prepared load once"
            )
        self._readers[ended] = left
        idle = ended[left == 0]
        orphan = self._orphan[idle]
        self._give_back(idle[orphan])
        self._policy.release(idle[~orphan])

    def prepare_store(self, keys: Sequence[Key], along: Slots = NO_SLOTS) -> StorePlan:
        """Give slots to the keys that are not known, first to last, evicting others as needed.

        No key of `keys` is evicted. Known ones are touched, so pass the whole run of a prefix that
        is at hand, or the slots of what was found known already as `along`: they count as more
        recent than `keys`. The accepted ones are not readable, and their slots not given to
        anybody else, until `complete_store`.
        """
        found = self.find(keys)
        new = list(dict.fromkeys(compress(keys, (found < 0).tolist())))
        known = np.concatenate((along, found[found >= 0]))
        plan = self.prepare_new(new, known)
        if len(known) > len(along):
            # The order of all, with what is new between what was known.
            used = self.find(keys)
            self._policy.use(np.concatenate((along, used[used >= 0]))[::-1])
        return plan._replace(known=len(keys) - len(new))

    def prepare_new(self, keys: Sequence[Key], along: Slots = NO_SLOTS) -> StorePlan:
        """Do as `prepare_store` with keys that the caller knows to be distinct and not known."""
        guarded = NO_SLOTS
        if len(along):
            idle = self._not_written(along) & (self._readers[along] == 0)
            guarded = _distinct(along[idle])
            self._policy.hold(guarded[::-1])
        evictions_before = self._evictions
        slots = self._take_slots(keys)
        self._writing.update(slots.tolist())
        if len(along):
            self._policy.use(along[::-1])
            self._policy.release(guarded)
        return StorePlan(
            keys[: len(slots)],
            slots,
            known=0,
            no_room=len(keys) - len(slots),
            evicted=self._evictions - evictions_before,
        )

    def complete_store(self, slots: SlotNumbers, *, ok: bool = True) -> None:
        """End the store of each slot: its key becomes readable, or its slot free where it failed.

        Raises `MisuseError` for a slot that has no store running; nothing is changed.
        """
        owned = np.asarray(slots, np.int32)
        names = owned.tolist()
        ended = set(names)
        if len(ended) < len(names) or not ended <= self._writing:
            self._refuse_to_complete(names)
        self._writing -= ended
        if self._num_orphans:
            orphan = self._orphan[owned]
            self._give_back(owned[orphan])
            owned = owned[~orphan]
        if ok:
            self._policy.release(owned)
        else:
            self._forget_keys(owned.tolist())
            self._policy.discard(owned)
            self._give_back(owned)

    def reset(self) -> None:
        """Forget all keys; slots under a running load or store stay in use until it completes.

        Takes the time to free the keys: 0.1 s where there are 1,000,000.
        """
        self._resets += 1
        self._reset_at = self.forgotten
        used = slice(len(self._key_of))
        busy = self._readers[used] > 0
        busy[[slot for slot in self._writing if slot < len(busy)]] = True
        self._num_orphans += int((busy & ~self._orphan[used]).sum())
        self._orphan[used] |= busy
        self._slot_of = KeyMap()
        self._policy.clear()
        self._key_of.clear()
        self._free.clear()

    def _refuse_to_complete(self, slots: Sequence[int]) -> NoReturn:
        counts = Counter(slots)
        slot = min(s for s, count in counts.items() if count > 1 or s not in self._writing)
        raise MisuseError(
            f"{counts[slot]} stores to slot {slot} completed, but {int(slot in self._writing)} is "
            "running: complete every prepared store once"
        )

    def _at(self, by_slot: NDArray[Any], slots: Slots) -> NDArray[Any]:
        """Return what is said of slots that a caller named; 0 of those that do not exist."""
        exists = (slots >= 0) & (slots < self._num_slots)
        return np.where(exists, by_slot[np.where(exists, slots, 0)], 0)

    def _not_written(self, slots: Slots) -> NDArray[np.bool_]:
        """Say of each slot that no store to it runs: if it has a key, that is readable."""
        if len(slots) > len(self._writing):
            # The slots of a prefix mostly lie together, apart from those that are given out now.
            lowest, highest = int(slots.min()), int(slots.max())
            writing = [slot for slot in self._writing if lowest <= slot <= highest]
        else:
            writing = list(self._writing.intersection(slots.tolist()))
        return ~np.isin(slots, writing) if writing else np.ones(len(slots), bool)

    def _forget_keys(self, slots: Sequence[int]) -> None:
        self._slot_of.remove_all([self._key_of[slot] for slot in slots])

    def _take_slots(self, keys: Sequence[Key]) -> Slots:
        """Make slots resident with new keys; fewer than keys if the others are all held."""
        if not len(keys):
            return NO_SLOTS
        free = NO_SLOTS
        if self._free:
            reused = [self._free.pop() for _ in range(min(len(self._free), len(keys)))]
            self._name(reused, keys)
            free = np.array(reused, np.int32)
        if len(free) < len(keys) and len(self._key_of) < self._usable_slots:
            free = np.concatenate((free, self._take_unused(keys[len(free) :])))
        if len(free):
            named = keys[: len(free)]
            self._policy.add(free, named)
            self._slot_of.add_all(named, free.tolist())
            keys = keys[len(free) :]
        if not len(keys):
            return free
        victims = self._policy.replace(keys)
        self._slot_of.rename_all(self._key_of, victims.tolist(), keys[: len(victims)])
        self._evictions += len(victims)
        self._forgotten_at[victims] = self.forgotten
        return np.concatenate((free, victims)) if len(free) else victims

    def _name(self, slots: Sequence[int], keys: Sequence[Key]) -> None:
        key_of = self._key_of
        for slot, key in zip(slots, keys, strict=False):
            key_of[slot] = key

    def _take_unused(self, keys: Sequence[Key]) -> Slots:
        """Give the keys slots that were not used since the last reset, as far as there are any."""
        first = len(self._key_of)
        if not self._num_orphans:
            self._key_of.extend(keys[: max(0, self._usable_slots - first)])
            return np.arange(first, len(self._key_of), dtype=np.int32)
        slots: list[int] = []
        for slot in range(first, self._usable_slots):
            if len(slots) == len(keys):
                break
            if self._orphan[slot]:
                self._key_of.append(None)
            else:
                self._key_of.append(keys[len(slots)])
                slots.append(slot)
        return np.array(slots, np.int32)

    def _give_back(self, slots: Slots) -> None:
        self._num_orphans -= int(self._orphan[slots].sum())
        self._orphan[slots] = False
        free = slots[slots < len(self._key_of)].tolist()
        self._name(free, [None] * len(free))
        self._free.extend(free)

    def check_integrity(self) -> None:
        """Check all invariants, in O(num_slots).

        Raises `AssertionError` naming the first that is broken.
        """
        self._policy.check_integrity()
        known = dict(self._slot_of.items())
        reading = self._readers > 0
        writing = np.zeros(len(reading), bool)
        writing[list(self._writing)] = True
        running = writing | reading
        assert not (writing & reading).any(), "a slot is read while it is written"
        assert not (self._orphan & ~running).any(), "an orphan has no running operation"
        assert int(self._orphan.sum()) == self._num_orphans, "orphans are not counted right"
        assert (self._readers >= 0).all(), "a slot has fewer than no readers"

        for key, slot in known.items():
            assert 0 <= slot < len(self._key_of), f"slot {slot} is used that was never given out"
            assert self._key_of[slot] == key, f"slot {slot} of {key!r} is {self._key_of[slot]!r}'s"
        owned = set(known.values())
        assert {*np.flatnonzero(running & ~self._orphan).tolist()} <= owned, "a busy slot has none"
        assert len(self._key_of) <= self._usable_slots <= self._num_slots, "a slot does not exist"
        orphans = np.flatnonzero(self._orphan[: len(self._key_of)]).tolist()
        all_slots = [*known.values(), *orphans, *self._free]
        assert sorted(all_slots) == list(range(len(self._key_of))), (
            "a slot is lost or has two owners"
        )
        held = {slot: bool(running[slot]) for slot in known.values()}
        assert self._policy.resident() == held, "what the policy ranks or holds is wrong"
        named = {slot for slot, key in enumerate(self._key_of) if key is not None}
        assert named == owned, "a slot without a key has a name"


def _distinct(slots: Slots) -> Slots:
    """Return each slot once, in the order in which they come first."""
    if np.all(slots[1:] > slots[:-1]):
        return slots  # as those of most prefixes are
    _, first = np.unique(slots, return_index=True)
    return slots if len(first) == len(slots) else slots[np.sort(first)]
