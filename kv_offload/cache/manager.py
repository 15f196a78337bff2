"""The life of each block in the host cache: stored, read, evicted, forgotten.

    unknown --prepare_store--> being stored --complete_store(ok)--> readable --evicted--> unknown
                                    '-------complete_store(failed)------------------------^

Any number of loads can read a key at once. A key is evicted only when no load reads it.

`reset` forgets all keys, also keys that a load or a store is using. Their slots become orphans (see
`index`) until it is completed. So operations are completed by slot, not by key.

The keys of one call are in prefix order, and the first of them is evicted last: a tail without its
head is useless. `prepare_load` and `prepare_store` set that order. Completions leave it alone,
because a job may complete piece by piece.

Python code runs per key only where a key is given a slot: a prompt has thousands of blocks.

`MisuseError` says that a load or a store does not run which is completed; nothing is changed.

Not thread safe: one scheduler owns it. All operations but `reset` take O(1) amortised time per key,
without a pause to reorganise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.changes import ChangeLog
from kv_offload.cache.index import SlotIndex
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.slot_refcounts import SlotRefcounts, distinct
from kv_offload.cache.slots import NO_SLOTS, Key, MissingKeyError, Runs, Slots


class CacheManager:
    """Maps keys to the slots 0..`num_slots` - 1 and decides what is stored, loaded and evicted."""

    def __init__(self, policy: EvictionPolicy) -> None:
        """Own `policy`, which is new; `num_slots` is its capacity."""
        self.num_slots = num_slots = policy.capacity
        self.evictions = 0
        """Keys evicted since the start; a reset does not count."""
        self.stored_slots = 0
        """Slots whose key has become readable since the start."""
        self.adopted_slots = 0
        """Slots that had a key at the start, from a process before this one."""
        self.changes: ChangeLog | None = None
        """Set by whoever follows what is readable."""
        self._index = SlotIndex(num_slots)
        self._policy = policy
        self._running = SlotRefcounts(num_slots)  # those on orphans too
        self.forgotten = 0
        """Keys evicted or forgotten, and resets. Until it changes, readable keys stay readable."""
        # The value of `forgotten` when each slot last lost a key.
        self._forgotten_at = np.zeros(num_slots, np.int64)

    @property
    def reads_runs(self) -> bool:
        """True if the policy reads the runs of keys that are offered."""
        return self._policy.reads_runs

    @property
    def usable_slots(self) -> int:
        """Slots from 0 on that are given out; all of them unless `limit_slots` was called."""
        return self._index.usable_slots

    def limit_slots(self, usable_slots: int) -> None:
        """Give out slots below `usable_slots` only; no other slot was given out before."""
        given_out = self._index.given_out
        assert given_out <= usable_slots <= self.num_slots, f"{given_out} slots were given out"
        self._index.usable_slots = usable_slots

    @property
    def slots_in_use(self) -> int:
        """Slots that are not free: readable, being stored, or orphans."""
        return self._index.slots_in_use

    def keep_their_keys(self, slots: Slots, since: int) -> bool:
        """Say whether slots have the keys that they had when `forgotten` was `since`.

        A key that was readable then is readable now. Takes some nanoseconds a slot.
        """
        return not (self._forgotten_at[slots] > since).any()

    def __contains__(self, key: Key) -> bool:
        """Say whether a key has a slot, readable or not. Changes nothing."""
        return key in self._index

    def slot_numbers(self, keys: Sequence[Key]) -> list[int]:
        """Return the slot of each key, -1 for a key that is not known. Changes nothing."""
        return self._index.slot_numbers(keys)

    def find(self, keys: Sequence[Key]) -> Slots:
        """Do as `slot_numbers`, but return an array: faster for many keys."""
        return self._index.find(keys)

    def readable(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        """Say for each key whether it can be loaded now. Changes nothing, recency included."""
        return self._readable(self._index.find(keys))

    def _readable(self, slots: Slots) -> NDArray[np.bool_]:
        # -1, which is no slot, finds what is known of the last one.
        return self._running.not_written(slots) & (slots >= 0)

    def readable_slots(self) -> dict[Key, int]:
        """Return all keys that can be loaded now, with their slots, in O(keys). For tests."""
        found = list(self._index.items())
        readable = self._running.not_written(np.array([slot for _, slot in found], np.int32))
        return dict(compress(found, readable.tolist()))

    def prepare_load(self, keys: Sequence[Key]) -> Slots:
        """Return the slots of `keys`, in order, and hold them against eviction.

        Counts as an access. The caller owns one hold per key, repeated or not, until
        `complete_load`. Raises `MissingKeyError` where one is not readable; then it holds none.
        """
        slots = self._index.find(keys)
        readable = self._readable(slots)
        if not readable.all():
            key = keys[int(readable.argmin())]
            raise MissingKeyError(f"{key!r} is not readable: look it up in the same step")
        idle = self._running.start_loads(slots)
        # Some may be repeated or have other readers.
        accessed = idle if len(idle) == len(slots) else distinct(slots)
        self._policy.use(accessed[::-1])
        self._policy.keep(idle)
        return slots

    def restore(self, keys: Sequence[Key], slots: Slots, end: int) -> None:
        """Take over what another manager knew: distinct new keys that are readable.

        The least recently used comes first. All slots below `end` are usable, and `slots` and the
        others that were not given out are given out now.
        """
        self._index.restore(slots, keys, end)
        self._policy.add(slots[::-1], keys[::-1])
        self._policy.release(slots)
        if self.changes is not None:
            self.changes.were_restored(slots)

    def readable_keys(self, slots: Slots) -> list[Key]:
        """Return the key of each slot, which was given out; None where none can be loaded."""
        keys = self._index.keys_of(slots)
        readable = self._running.not_written(slots).tolist()
        return [key if ok else None for key, ok in zip(keys, readable, strict=True)]

    def keys_of(self, slots: Slots) -> list[Key]:
        """Return the key of each slot, readable or not, which was given out; None if it has none.

        A reset takes the keys of slots that a store still writes.
        """
        return self._index.keys_of(slots)

    def prepare_copy(self, slots: Slots) -> None:
        """Hold distinct slots with readable keys until `complete_load`. This is not an access."""
        self._policy.keep(self._running.start_loads(slots))

    def idle(self, slots: Slots) -> NDArray[np.bool_]:
        """Say for each slot whether nothing holds it against eviction, or writes it."""
        return self._running.are_idle(slots)

    def busy_slots(self, slots: Slots) -> NDArray[np.bool_]:
        """Say for each slot whether something holds it against eviction, or writes it."""
        busy: NDArray[np.bool_] = self._running.busy(self.num_slots)[slots]
        return busy

    def use(self, slots: Slots) -> None:
        """Count an access to distinct slots that have a key, the last of them the most recent."""
        self._policy.use(slots)

    def should_demote(self, slots: Slots) -> NDArray[np.bool_]:
        """Say which slots with a key are worth a write to a tier below, as the policy sees it."""
        return self._policy.should_demote(slots)

    @property
    def has_newly_demotable(self) -> bool:
        """True if `take_newly_demotable` may have something to return."""
        return self._policy.has_newly_demotable

    def take_newly_demotable(self) -> Slots:
        """Return slots that were used again since the last call, where `should_demote` may differ.

        Takes O(num_slots), some nanoseconds a hundred slots.
        """
        return self._policy.take_newly_demotable()

    def forget(self, slots: Slots) -> None:
        """Forget the keys of distinct slots; those that a load reads are free once it ends.

        None of them is being stored.
        """
        idle = self._running.idle(slots)
        self._policy.discard(slots)
        self._index.forget(idle)
        self._index.disown(slots[~np.isin(slots, idle)])
        self._forget_by(slots)

    def set_aside(self, slots: Slots) -> None:
        """Forget the keys of distinct slots, and give these to no other until `complete_load`.

        None of them is being stored. A reset leaves them where they are.
        """
        self.prepare_copy(slots)
        self.forget(slots)

    def _forget_by(self, slots: Slots) -> None:
        """Take note that these slots lost their keys."""
        self.forgotten += len(slots)
        self._forgotten_at[slots] = self.forgotten
        if self.changes is not None:
            self.changes.lost(slots)

    def complete_load(self, slots: Slots) -> None:
        """End one load of each slot, whether it failed or not. Raises `MisuseError`."""
        idle = self._running.end_loads(slots)
        self._policy.release(self._index.free_orphans(idle))

    def catch_up(self) -> None:
        """Let the policy do what waits, where a step had no access; called once a step."""
        self._policy.catch_up()

    def offer(
        self, keys: Sequence[Key], runs: Runs, along: Slots = NO_SLOTS
    ) -> tuple[Slots, NDArray[np.bool_]]:
        """Do as `prepare_store` for those of `keys` that the policy finds worth a slot.

        `runs` says of which prompts the keys are, in order, if the policy `reads_runs`. Returns the
        slots, and for each key whether it was worth one.
        """
        free = self._index.usable_slots - self._index.slots_in_use
        policy = self._policy
        parents: Sequence[int] = ()
        if policy.reads_runs:
            parents = self._index.parent_slots(runs)
        worth = policy.admit(keys, runs, free, parents)
        if not worth.all():
            keys = [*compress(keys, worth.tolist())]
        return self.prepare_store(keys, along), worth

    def prepare_store(self, keys: Sequence[Key], along: Slots = NO_SLOTS) -> Slots:
        """Give slots to distinct keys that have none, first to last, evicting others as needed.

        Returns the slots; if no more are free and none can be evicted, the last keys get none. New
        keys are not readable, and their slots are given to no other, until `complete_store`.
        `along` names the slots of the same prefixes that are known. They are not evicted, and count
        as accessed, more recently than `keys`.
        """
        guarded = NO_SLOTS
        if len(along):
            along = distinct(along)
            guarded = self._running.idle(along)
            self._policy.keep(guarded)
        slots = self._take_slots(keys)
        self._running.start_stores(slots)
        if len(along):
            self._policy.use(along[::-1])
            self._policy.release(guarded)
        return slots

    def _take_slots(self, keys: Sequence[Key]) -> Slots:
        """Give slots to the first of `keys`: free slots, then the slots of evicted keys."""
        free = self._index.take_free(keys)
        if len(free):
            self._policy.add(free, keys[: len(free)])
            keys = keys[len(free) :]
        if not len(keys):
            return free
        victims = self._policy.replace(keys)
        self._index.replace(victims, keys[: len(victims)])
        self.evictions += len(victims)
        self._forget_by(victims)
        return np.concatenate((free, victims)) if len(free) else victims

    def complete_store(self, slots: Slots, *, ok: bool = True) -> None:
        """End the store of each slot: its key becomes readable, or its slot free where it failed.

        Raises `MisuseError`.
        """
        self._running.end_stores(slots)
        owned = self._index.free_orphans(slots)
        if ok:
            self._policy.release(owned)
            self.stored_slots += len(owned)
            if self.changes is not None:
                self.changes.became_readable(owned)
        else:
            self._index.forget(owned)
            self._policy.discard(owned)

    def reset(self) -> None:
        """Forget all keys; slots under a running load or store stay in use until it completes.

        Takes the time to free the keys: 0.1 s where there are 1,000,000.
        """
        self.forgotten += 1
        self._forgotten_at[: self._index.given_out] = self.forgotten
        self._index.clear(self._running.busy(self._index.given_out))
        self._policy.clear()
        if self.changes is not None:
            self.changes.lost_all()

    def close(self) -> None:
        """End when the engine shuts down; no method is called afterwards."""

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        for part in (self._policy, self._index, self._running):
            part.check_integrity()
        running = {*np.flatnonzero(self._running.busy(self.num_slots)).tolist()}
        owned = {slot for _, slot in self._index.items()}
        orphans = self._index.orphans()
        assert orphans <= running, "an orphan has no running operation"
        assert running <= owned | orphans, "a busy slot has no key and is no orphan"
        held = {slot: slot in running for slot in owned}
        assert self._policy.resident() == held, "what the policy ranks or holds is wrong"
