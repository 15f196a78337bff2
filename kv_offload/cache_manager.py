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

Not thread safe: one scheduler owns it. All operations take O(1) amortised time per key, and memory
grows with the slots that were ever used at once, not with `num_slots`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kv_offload.errors import CapacityError, KVOffloadError
from kv_offload.policies import EvictionPolicy, Key


class MissingKeyError(KVOffloadError, KeyError):
    """A load was asked for a key that is not readable."""


class MisuseError(KVOffloadError, RuntimeError):
    """The calling code is wrong: it broke a rule that is documented where this is raised."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What `prepare_store` decided about its keys."""

    accepted: tuple[tuple[Key, int], ...]
    """(key, slot) pairs to be written; the keys keep their order."""
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

        `policy` must be new and made for `num_slots` keys, and belongs to the manager afterwards.

        Raises `CapacityError` for fewer than 1 slot and `MisuseError` for another policy.
        """
        if num_slots < 1:
            raise CapacityError(f"a host cache of {num_slots} slots: give it memory for 1 or more")
        if policy.capacity != num_slots or len(policy):
            raise MisuseError(
                f"the policy is for {policy.capacity} keys and has {len(policy)}; "
                f"{num_slots} slots need an empty one for {num_slots}"
            )
        self._num_slots = num_slots
        self._policy = policy
        self._evictions = 0
        self._stored: dict[Key, int] = {}  # readable keys -> slot
        self._storing: set[Key] = set()
        # Slots with a running operation; a forgotten key stays here until it is completed.
        self._writes: dict[int, Key] = {}
        self._reads: dict[int, Key] = {}
        self._readers: dict[int, int] = {}  # number of loads, for the slots in `_reads`
        self._orphans: set[int] = set()
        # All slots from `_fresh` on are free, or orphans; of those below, the free ones are listed.
        self._fresh = 0
        self._free: list[int] = []

    @property
    def num_slots(self) -> int:
        """Slots in total."""
        return self._num_slots

    @property
    def slots_in_use(self) -> int:
        """Slots that are not free: readable, being stored, or orphans."""
        return len(self._stored) + len(self._storing) + len(self._orphans)

    @property
    def evictions(self) -> int:
        """Keys evicted since the start; `reset` neither counts nor clears them."""
        return self._evictions

    def lookup(self, key: Key) -> bool:
        """Say whether a key can be loaded now. Changes nothing, recency included."""
        return key in self._stored

    def is_known(self, key: Key) -> bool:
        """Say whether a key is readable or being stored. Changes nothing, recency included."""
        return key in self._stored or key in self._storing

    def touch(self, keys: Iterable[Key]) -> None:
        """Count an access to every known key and make the first of `keys` the most recent.

        Unknown keys are ignored. For a policy that counts accesses, once per request is right.
        """
        for key in reversed(tuple(keys)):
            if self.is_known(key):
                self._policy.use(key)

    def prepare_load(self, keys: Sequence[Key]) -> list[int]:
        """Return the slots of `keys`, in order, held against eviction; all or nothing.

        Counts as an access, as `touch`. The caller owns one hold per key, repeated keys included,
        until `complete_load`.

        Raises `MissingKeyError` for a key that is not readable; nothing is changed.
        """
        for key in keys:
            if key not in self._stored:
                raise MissingKeyError(f"{key!r} is not readable: look it up in the same step")
        slots = [self._stored[key] for key in keys]
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            if slot in self._reads:
                self._policy.use(key)
                self._readers[slot] += 1
            else:
                self._policy.hold(key)
                self._reads[slot] = key
                self._readers[slot] = 1
        return slots

    def complete_load(self, slots: Sequence[int]) -> None:
        """End one load of each slot, whether it failed or not; the last one lifts the hold.

        Raises `MisuseError` for a slot that has no load running; nothing is changed.
        """
        self._check_running("loads", slots, self._readers)
        for slot in slots:
            self._readers[slot] -= 1
            if self._readers[slot]:
                continue
            del self._readers[slot]
            key = self._reads.pop(slot)
            if slot in self._orphans:
                self._give_back(slot)
            else:
                self._policy.release(key)

    def prepare_store(self, keys: Sequence[Key]) -> StorePlan:
        """Give slots to the keys that are not known, first to last, evicting others as needed.

        No key of `keys` is evicted. Known ones are touched; the accepted ones are not readable, and
        their slots not given to anybody else, until `complete_store`.
        """
        new = dict.fromkeys(key for key in keys if not self.is_known(key))
        guarded = [
            key
            for key in dict.fromkeys(keys)
            if key in self._stored and self._stored[key] not in self._reads
        ]
        for key in guarded:
            self._policy.hold(key)
        accepted: list[tuple[Key, int]] = []
        evictions_before = self._evictions
        for key in new:
            slot = self._take_slot(key)
            if slot is None:
                break
            self._storing.add(key)
            self._writes[slot] = key
            accepted.append((key, slot))
        self.touch(keys)
        for key in guarded:
            self._policy.release(key)
        return StorePlan(
            accepted=tuple(accepted),
            known=len(keys) - len(new),
            no_room=len(new) - len(accepted),
            evicted=self._evictions - evictions_before,
        )

    def complete_store(self, slots: Sequence[int], *, ok: bool = True) -> None:
        """End the store of each slot: its key becomes readable, or its slot free where it failed.

        Raises `MisuseError` for a slot that has no store running; nothing is changed.
        """
        self._check_running("stores", slots, dict.fromkeys(self._writes.keys() & slots, 1))
        for slot in slots:
            key = self._writes.pop(slot)
            if slot in self._orphans:
                self._give_back(slot)
                continue
            self._storing.remove(key)
            if ok:
                self._stored[key] = slot
                self._policy.release(key)
            else:
                self._policy.discard(key)
                self._give_back(slot)

    def reset(self) -> None:
        """Forget all keys; slots under a running load or store stay in use until it completes."""
        self._orphans.update(self._writes, self._reads)
        self._stored.clear()
        self._storing.clear()
        self._policy.clear()
        self._free.clear()
        self._fresh = 0

    def _take_slot(self, key: Key) -> int | None:
        """Make `key` resident in the policy and return a slot for it; `None` if all are held."""
        if self._free:
            self._policy.add(key)
            return self._free.pop()
        while self._fresh < self._num_slots:
            slot = self._fresh
            self._fresh += 1
            if slot not in self._orphans:
                self._policy.add(key)
                return slot
        victim = self._policy.replace(key)
        if victim is None:
            return None
        self._evictions += 1
        return self._stored.pop(victim)

    def _give_back(self, slot: int) -> None:
        self._orphans.discard(slot)
        if slot < self._fresh:
            self._free.append(slot)

    def _check_running(self, what: str, slots: Sequence[int], running: Mapping[int, int]) -> None:
        for slot, count in Counter(slots).items():
            started = running.get(slot, 0)
            if count > started:
                raise MisuseError(
                    f"slot {slot} completes {count} {what}, but {started} are running: "
                    "complete each prepared slot once"
                )

    def check_integrity(self) -> None:
        """Check all invariants, in O(num_slots).

        Raises `AssertionError` naming the first that is broken.
        """
        self._policy.check_integrity()
        writes = {slot: key for slot, key in self._writes.items() if slot not in self._orphans}
        reads = {slot: key for slot, key in self._reads.items() if slot not in self._orphans}
        assert self._storing == set(writes.values()), "keys being stored and slots differ"
        assert len(self._storing) == len(writes), "a key is being stored into two slots"
        assert not self._storing & self._stored.keys(), "a key is readable while it is being stored"
        assert not self._writes.keys() & self._reads.keys(), "a slot is read while it is written"
        for slot, key in reads.items():
            assert self._stored.get(key) == slot, f"slot {slot} is read but {key!r} is not in it"
        assert self._readers.keys() == self._reads.keys(), "reader counts and reads differ"
        assert all(count > 0 for count in self._readers.values()), "a read slot has no reader"
        running = self._writes.keys() | self._reads.keys()
        assert self._orphans <= running, "an orphan has no running operation"

        used = [*self._stored.values(), *writes, *self._orphans]
        below = [slot for slot in (*used, *self._free) if slot < self._fresh]
        assert len(below) == len(set(below)) == self._fresh, "a slot is lost or has two owners"
        beyond = {slot for slot in used if slot >= self._fresh}
        assert beyond <= self._orphans, "a slot is used that was never given out"
        assert all(0 <= slot < self._num_slots for slot in used), "a slot does not exist"

        assert len(self._policy) == len(self._stored) + len(self._storing), "policy: wrong keys"
        for key in self._storing:
            assert self._policy.is_held(key), f"{key!r} could be evicted while it is being stored"
        for key, slot in self._stored.items():
            assert self._policy.is_held(key) == (slot in reads), f"{key!r}: hold and loads differ"
