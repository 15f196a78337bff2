"""The life of each block in the host cache: stored, read, evicted, dropped.

    unknown --prepare_store--> being stored --complete_store(ok)--> readable --evicted--> unknown
                                    '-------complete_store(failed)------------------------^

Any number of loads can read a key at once. A key is evicted only while no load reads it.

`reset` drops all keys, including keys that a load or store is using. Their slots become orphans
(see `slot_table`) until that operation completes, so operations are completed by slot, not by key.

The keys of one call are in prefix order, and the first is evicted last, because a tail without its
head is useless. `prepare_load` and `prepare_store` set that order. Completions leave it alone,
because a job may complete piece by piece.

Python code runs per key only where a key is given a slot: a prompt has thousands of blocks.

Not thread safe: one scheduler owns it. All operations except `reset` take O(1) amortised time per
key, without a pause to reorganise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.slot_table import SlotTable
from kv_offload.cache.slots import NO_SLOTS, Key, Mask, MissingKeyError, Runs, Slots, distinct


@dataclass(frozen=True, slots=True)
class Change:
    """Slots whose keys became readable or were lost; None stands for all slots."""

    slots: Slots | None
    readable: bool


class ChangeLog:
    """Pending changes, oldest first.

    A slot appears once per change, and by the time a change is read it may hold another key.
    """

    def __init__(self) -> None:
        self.changes: deque[Change] = deque()
        self.restored: set[int] = set()
        """Slots whose keys another process left. The consumer of the changes removes them."""

    def became_readable(self, slots: Slots) -> None:
        """Record that the keys of these slots can now be loaded."""
        if len(slots):
            self.changes.append(Change(slots, readable=True))

    def lost(self, slots: Slots | None) -> None:
        """Record that these slots, or all, have lost their keys, readable or not."""
        if slots is None or len(slots):
            self.changes.append(Change(slots, readable=False))


class CacheManager:
    """Maps keys to the slots 0..`num_slots` - 1 and decides what is stored, loaded and evicted."""

    def __init__(self, policy: EvictionPolicy) -> None:
        """Take ownership of `policy`, which is new; `num_slots` is its capacity."""
        self.num_slots = num_slots = policy.capacity
        self.evictions = 0
        """Keys evicted since the start; a reset does not count."""
        self.stored_slots = 0
        """Slots whose key has become readable since the start."""
        self.left_to_peers = 0
        """Keys that were offered and not stored since the start, because a peer has them."""
        self.adopted_slots = 0
        """Slots that had a key at the start, left by an earlier process."""
        self.changes: ChangeLog | None = None
        """Set by the consumer of the changes."""
        self.on_peer_uses: Callable[[Slots], None] | None = None
        """Set by the consumer: gets distinct slots that peers have used, the most recent last."""
        self._table = SlotTable(num_slots)
        self.policy = policy
        """Ranks the slots. Code outside this class may only count uses and query it."""
        self.reads_runs = policy.reads_runs
        """True if the runs of offered keys are used."""
        self.forgotten = 0
        """Count of keys evicted or dropped, and of resets. While it is unchanged, readable keys
        stay readable."""
        # By slot: the value of `forgotten` when the slot last lost a key.
        self._forgotten_at = np.zeros(num_slots, np.int64)

    @property
    def usable_slots(self) -> int:
        """Slots below this may be given out; all slots unless `limit_slots` was called."""
        return self._table.usable_slots

    def limit_slots(self, usable_slots: int) -> None:
        """Give out only slots below `usable_slots`; no slot above was given out before."""
        given_out = self._table.given_out
        assert given_out <= usable_slots <= self.num_slots, f"{given_out} slots were given out"
        self._table.usable_slots = usable_slots

    @property
    def slots_in_use(self) -> int:
        """Slots that are not free: readable, being stored, or orphans."""
        return self._table.slots_in_use

    def keep_their_keys(self, slots: Slots, since: int) -> bool:
        """Return whether all slots still have the keys that they had when `forgotten` was `since`.

        Keys that were readable then are readable now. Takes a few nanoseconds per slot.
        """
        return not (self._forgotten_at[slots] > since).any()

    def __contains__(self, key: Key) -> bool:
        """Return whether a key has a slot, readable or not. Changes nothing."""
        return key in self._table

    def slot_numbers(self, keys: Sequence[Key]) -> list[int]:
        """Return the slot of each key, -1 for an unknown key. Changes nothing."""
        return self._table.slot_numbers(keys)

    def find(self, keys: Sequence[Key]) -> Slots:
        """Return the slot of each key as an array; faster than `slot_numbers` for many keys."""
        return self._table.find(keys)

    def readable(self, keys: Sequence[Key]) -> Mask:
        """Return for each key whether it can be loaded now. Changes nothing, not even recency."""
        return self.holds(self._table.find(keys))

    def lacks(self, keys: Sequence[Key]) -> Mask:
        """Return for each key whether it must be read from a lower tier. Changes nothing."""
        lacking: Mask = self._table.find(keys) < 0
        return lacking

    def reserve(self, keys: Sequence[Key]) -> bool:
        """Return whether keys that this step found readable stay readable until its end."""
        return True

    def owned(self, slots: Slots) -> Slots:
        """Return those of a load's slots that are in this engine's memory."""
        return slots

    def holds(self, slots: Slots) -> Mask:
        """Return for each slot of `find` whether its key can be loaded from it now."""
        # A missing key has slot -1, which indexes the last slot; the second term excludes it.
        return self._table.not_written(slots) & (slots >= 0)

    def readable_slots(self) -> dict[Key, int]:
        """Return all keys that can be loaded now, with their slots, in O(keys). For tests."""
        found = list(self._table.items())
        readable = self._table.not_written(np.array([slot for _, slot in found], np.int32))
        return dict(compress(found, readable.tolist()))

    def prepare_load(self, keys: Sequence[Key]) -> Slots:
        """Return the slots of `keys`, in order, and hold them against eviction.

        Counts as an access. The caller owns one hold per key, repeated or not, until
        `complete_load`. Raises `MissingKeyError` if a key is not readable; then nothing is held.
        """
        slots = self._table.find(keys)
        readable = self.holds(slots)
        if not readable.all():
            key = keys[int(readable.argmin())]
            raise MissingKeyError(f"{key!r} is not readable: look it up in the same step")
        self._table.start_loads(slots)
        self.policy.use(distinct(slots)[::-1])
        return slots

    def restore(self, keys: Sequence[Key], slots: Slots, end: int) -> None:
        """Take over distinct new keys, which are readable, from an earlier process.

        The least recently used key comes first. All slots below `end` are usable. `slots` and the
        other slots below `end` that were not given out are given out now.
        """
        self._table.restore(slots, keys, end)
        self.policy.add(slots[::-1], keys[::-1])
        if self.changes is not None:
            self.changes.restored.update(slots.tolist())
            self.changes.became_readable(slots)

    def readable_keys(self, slots: Slots) -> list[Key | None]:
        """Return the key of each slot, None if it cannot be loaded.

        All slots must have been given out.
        """
        keys = self._table.keys_of(slots)
        readable = self._table.not_written(slots).tolist()
        return [key if ok else None for key, ok in zip(keys, readable, strict=True)]

    def keys_of(self, slots: Slots) -> list[Key | None]:
        """Return the key of each slot, readable or not; None if it has none.

        All slots must have been given out. A reset drops the keys of slots that a store is still
        writing.
        """
        return self._table.keys_of(slots)

    def prepare_copy(self, slots: Slots) -> None:
        """Hold distinct slots with readable keys until `complete_load`. This is not an access."""
        self._table.start_loads(slots)

    def idle(self, slots: Slots) -> Mask:
        """Return for each slot whether nothing writes it or holds it against eviction."""
        return self._table.are_idle(slots)

    def count_peer_uses(self) -> None:
        """Count peers' uses of slots since the last call, as loads here are counted."""

    def forget(self, slots: Slots) -> None:
        """Drop the keys of distinct slots, none of which is being stored.

        Slots that a load reads become free when it ends.
        """
        self.policy.discard(slots)
        self._table.forget(slots)
        self._forget_by(slots)

    def _forget_by(self, slots: Slots) -> None:
        """Record that these slots have lost their keys."""
        self.forgotten += len(slots)
        self._forgotten_at[slots] = self.forgotten
        if self.changes is not None:
            self.changes.lost(slots)

    def complete_load(self, slots: Slots) -> None:
        """End one load of each slot, successful or not. Raises `MisuseError`."""
        self.policy.release(self._table.end_loads(slots))

    def offer(self, keys: Sequence[Key], runs: Runs, along: Slots = NO_SLOTS) -> tuple[Slots, Mask]:
        """Call `prepare_store` for those of `keys` that the policy finds worth a slot.

        `runs` groups the keys by prompt, in order; required if the policy `reads_runs`. Returns the
        slots, and for each key whether it was worth one.
        """
        free = self._count_free(len(keys))
        parents: Sequence[int] = ()
        if self.policy.reads_runs:
            parents = self._table.parent_slots(runs)
        worth = self.policy.admit(keys, runs, free, parents)
        if not worth.all():
            keys = [*compress(keys, worth.tolist())]
        return self._give_slots(keys, along), worth

    def prepare_store(self, keys: Sequence[Key], along: Slots = NO_SLOTS) -> Slots:
        """Give slots to distinct keys that have none, first to last, evicting others as needed.

        Returns the slots; if no more slots are free or can be evicted, the last keys get none. New
        keys are not readable, and their slots are given to no other key, until `complete_store`.
        `along` names the slots that already hold blocks of the same prefixes: they are not evicted,
        and count as accessed, more recently than `keys`.
        """
        self._count_free(len(keys))
        return self._give_slots(keys, along)

    def _count_free(self, wanted: int) -> int:
        """Return how many slots are free; if too few, let the policy count uses by peers."""
        free = self.usable_slots - self.slots_in_use
        if wanted > free:
            self.count_peer_uses()
        return free

    def _give_slots(self, keys: Sequence[Key], along: Slots) -> Slots:
        """Do the work of `prepare_store`. No slot is freed between the policy's answer and this."""
        if not len(along):
            return self._take_slots(keys)
        along = distinct(along)
        guarded = along[self._table.not_written(along)]
        self._table.start_loads(guarded)
        slots = self._take_slots(keys)
        self.policy.use(along[::-1])
        self.policy.release(self._table.end_loads(guarded))
        return slots

    def _take_slots(self, keys: Sequence[Key]) -> Slots:
        """Give slots to the first of `keys`: free slots, then the slots of evicted keys."""
        free = self._table.take_free(keys)
        if len(free):
            self.policy.add(free, keys[: len(free)])
            keys = keys[len(free) :]
        if not len(keys):
            return free
        victims = self.policy.replace(keys, self._table.readers)
        self._table.replace(victims, keys[: len(victims)])
        self.evictions += len(victims)
        self._forget_by(victims)
        return np.concatenate((free, victims)) if len(free) else victims

    def complete_store(self, slots: Slots, *, ok: bool = True) -> None:
        """End the store of each slot: its key becomes readable, or the slot free if it failed.

        Raises `MisuseError`.
        """
        owned = self._table.end_stores(slots)
        if ok:
            self.policy.release(owned)
            self.stored_slots += len(owned)
            if self.changes is not None:
                self.changes.became_readable(owned)
        else:
            self._table.forget(owned)
            self.policy.discard(owned)

    def reset(self) -> None:
        """Drop all keys; slots of a running load or store stay in use until it completes.

        Takes the time to free the keys: 0.1 s for 1,000,000.
        """
        self.forgotten += 1
        self._forgotten_at[: self._table.given_out] = self.forgotten
        self._table.clear()
        self.policy.clear()
        if self.changes is not None:
            self.changes.lost(None)

    def close(self) -> None:
        """Release resources when the engine shuts down; no method is called afterwards."""

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming the first broken invariant, in O(num_slots)."""
        self.policy.check_integrity(self._table.readers)
        self._table.check_integrity()
        owned = sorted(slot for _, slot in self._table.items())
        assert self.policy.resident() == owned, "the policy ranks other slots than those with a key"
