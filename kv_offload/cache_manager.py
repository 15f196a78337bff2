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

Not thread safe: one scheduler owns it. All operations but `reset` take O(1) amortised time per key,
without a pause to reorganise, and memory grows with the slots that were used, not with `num_slots`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv_offload.errors import CapacityError, KVOffloadError
from kv_offload.policies import EvictionPolicy, Key
from kv_offload.policies.key_map import KeyMap


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
        self._stored = KeyMap()  # readable keys -> slot
        self._storing: dict[Key, int] = {}
        # Running operations by slot. Those on orphans, whose key was forgotten, are still here.
        self._writes: set[int] = set()
        self._readers: dict[int, int] = {}  # slot -> number of loads, where there are any
        self._orphans: set[int] = set()
        # By slot, for those that were used since the last reset; all beyond are free, or orphans.
        self._key_of: list[Key] = []
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
            slot = self._stored.get(key)
            if slot is None:
                slot = self._storing.get(key)
            if slot is not None:
                self._policy.use(slot)

    def prepare_load(self, keys: Sequence[Key]) -> list[int]:
        """Return the slots of `keys`, in order, held against eviction; all or nothing.

        Counts as an access, as `touch`. The caller owns one hold per key, repeated keys included,
        until `complete_load`.

        Raises `MissingKeyError` for a key that is not readable; nothing is changed.
        """
        slots = []
        for key in keys:
            slot = self._stored.get(key)
            if slot is None:
                raise MissingKeyError(f"{key!r} is not readable: look it up in the same step")
            slots.append(slot)
        for slot in reversed(slots):
            readers = self._readers.get(slot, 0)
            if readers:
                self._policy.use(slot)
            else:
                self._policy.hold(slot)
            self._readers[slot] = readers + 1
        return slots

    def complete_load(self, slots: Sequence[int]) -> None:
        """End one load of each slot, whether it failed or not; the last one lifts the hold.

        Raises `MisuseError` for a slot that has no load running; nothing is changed.
        """
        for slot, count in Counter(slots).items():
            if count > self._readers.get(slot, 0):
                raise MisuseError(
                    f"{count} loads of slot {slot} completed, but {self._readers.get(slot, 0)} are "
                    "running: complete every prepared load once"
                )
        for slot in slots:
            self._readers[slot] -= 1
            if self._readers[slot]:
                continue
            del self._readers[slot]
            if slot in self._orphans:
                self._give_back(slot)
            else:
                self._policy.release(slot)

    def prepare_store(self, keys: Sequence[Key]) -> StorePlan:
        """Give slots to the keys that are not known, first to last, evicting others as needed.

        No key of `keys` is evicted. Known ones are touched, so pass the whole run of a prefix that
        is at hand. The accepted ones are not readable, and their slots not given to anybody else,
        until `complete_store`.
        """
        new: dict[Key, None] = {}
        guarded: set[int] = set()
        for key in keys:
            slot = self._stored.get(key)
            if slot is None:
                if key not in self._storing:
                    new[key] = None
            elif slot not in self._readers:
                guarded.add(slot)
        for slot in guarded:
            self._policy.hold(slot)
        accepted: list[tuple[Key, int]] = []
        evictions_before = self._evictions
        for key in new:
            slot = self._take_slot(key)
            if slot is None:
                break
            self._storing[key] = slot
            self._writes.add(slot)
            accepted.append((key, slot))
        self.touch(keys)
        for slot in guarded:
            self._policy.release(slot)
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
        for slot, count in Counter(slots).items():
            if slot not in self._writes or count > 1:
                raise MisuseError(
                    f"{count} stores to slot {slot} completed, but {int(slot in self._writes)} is "
                    "running: complete every prepared store once"
                )
        for slot in slots:
            self._writes.remove(slot)
            if slot in self._orphans:
                self._give_back(slot)
                continue
            key = self._key_of[slot]
            del self._storing[key]
            if ok:
                self._stored[key] = slot
                self._policy.release(slot)
            else:
                self._policy.discard(slot)
                self._give_back(slot)

    def reset(self) -> None:
        """Forget all keys; slots under a running load or store stay in use until it completes.

        Takes the time to free the keys: 0.1 s where there are 1,000,000.
        """
        self._orphans.update(self._writes, self._readers)
        self._stored = KeyMap()
        self._storing.clear()
        self._policy.clear()
        self._key_of.clear()
        self._free.clear()

    def _take_slot(self, key: Key) -> int | None:
        """Make a slot resident with a new key and return it; `None` if all are held."""
        if self._free:
            slot = self._free.pop()
            self._key_of[slot] = key
            self._policy.add(slot, key)
            return slot
        while len(self._key_of) < self._usable_slots:
            slot = len(self._key_of)
            self._key_of.append(key)
            if slot not in self._orphans:
                self._policy.add(slot, key)
                return slot
        victim = self._policy.replace(key)
        if victim is not None:
            self._evictions += 1
            self._stored.pop(self._key_of[victim])
            self._key_of[victim] = key
        return victim

    def _give_back(self, slot: int) -> None:
        self._orphans.discard(slot)
        if slot < len(self._key_of):
            self._free.append(slot)

    def check_integrity(self) -> None:
        """Check all invariants, in O(num_slots).

        Raises `AssertionError` naming the first that is broken.
        """
        self._policy.check_integrity()
        stored = dict(self._stored.items())
        running = self._writes | self._readers.keys()
        assert not self._writes & self._readers.keys(), "a slot is read while it is written"
        assert self._orphans <= running, "an orphan has no running operation"
        assert all(count > 0 for count in self._readers.values()), "a read slot has no reader"
        assert not self._storing.keys() & stored.keys(), "a key is readable before it is stored"
        assert {*self._storing.values()} == self._writes - self._orphans, "writes and keys differ"
        assert self._readers.keys() - self._orphans <= {*stored.values()}, "a read slot has no key"

        known = [*stored.items(), *self._storing.items()]
        for key, slot in known:
            assert 0 <= slot < len(self._key_of), f"slot {slot} is used that was never given out"
            assert self._key_of[slot] == key, f"slot {slot} of {key!r} is {self._key_of[slot]!r}'s"
        assert len(self._key_of) <= self._usable_slots <= self._num_slots, "a slot does not exist"
        orphans = [slot for slot in self._orphans if slot < len(self._key_of)]
        owned = [*(slot for _, slot in known), *orphans, *self._free]
        assert sorted(owned) == list(range(len(self._key_of))), "a slot is lost or has two owners"

        held = {slot: slot in running for _, slot in known}
        assert self._policy.resident() == held, "what the policy ranks or holds is wrong"
