"""Evict by recency or by frequency, in a balance that follows the workload (ARC).

N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4. The names are the paper's: T1 has what was used once, T2 what was used more often; B1 and
B2 remember as ghosts the keys that were evicted from them; L1 is T1 with B1, L2 is T2 with B2; c is
the capacity; p is the size that T1 should have.

Without holds the victims are the ones that the paper names. What holds and discards add to it:
- Where all slots of the list that REPLACE chooses are held, the other list gives the victim.
- The cache may evict before c slots are resident (after a reset some are busy for a while), so the
  paper's |B1| + |B2| <= c no longer follows from its other invariants and is enforced.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kv_offload.cache.key_map import KeyMap
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.policies.recency import RecencyList
from kv_offload.cache.slots import Key, Slots


class ARCPolicy(EvictionPolicy):
    """Two lists by recency with a ghost list each. Keeps reused prefixes through scans of new ones.

    `use` is the paper's hit, but for a held slot of T1, which was mostly not released since its
    `add`.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clear()

    def clear(self) -> None:
        self._t1, self._t2 = RecencyList(), RecencyList()
        self._key_of: list[Key] = []  # by slot; what is not resident does not matter
        # Ghosts have no slots. They have places, which are numbered as slots are.
        self._b1, self._b2 = RecencyList(), RecencyList()
        self._place_of = KeyMap(self.capacity)
        self._ghost_at: list[Key] = []  # by place
        self._free_places: list[int] = []
        self._target = 0.0  # p

    def add(self, slots: Slots, keys: Sequence[Key]) -> None:
        entered = slots.tolist()
        for slot, key in zip(entered, keys, strict=True):
            home, _ = self._enter(key)
            self._insert(home, slot, key)
        self._head_first(entered)

    def replace(self, keys: Sequence[Key]) -> Slots:
        slots = []
        for key in keys:
            if not self._t1.evictable and not self._t2.evictable:
                break
            home, from_b2 = self._enter(key)
            # Case IV with L1 full of T1 alone is the only one in which the victim has no ghost.
            with_ghost = home is self._t2 or self._t1.length < self.capacity
            slot = self._evict(from_b2, with_ghost)
            self._insert(home, slot, key)
            slots.append(slot)
        self._head_first(slots)
        return np.array(slots, np.int32)

    def _head_first(self, slots: Sequence[int]) -> None:
        """Make the first of some new slots the most recent of them."""
        if len(slots) > 1:
            for slot in reversed(slots):
                self._list_of(slot).refresh(slot)

    def _enter(self, key: Key) -> tuple[RecencyList, bool]:
        """Do all of the paper's cases II to IV but REPLACE.

        Returns the list that the key belongs to, and whether it was in B2.
        """
        t1, b1, b2 = self._t1, self._b1, self._b2
        place = self._place_of.get(key)
        if place < 0:  # case IV: never seen, or forgotten
            l1 = t1.length + b1.length
            if l1 == self.capacity:
                if b1.length:
                    self._forget(b1.pop_oldest())
            elif l1 + self._t2.length + b2.length == 2 * self.capacity:
                self._forget(b2.pop_oldest())
            return t1, False
        from_b2 = place in b2
        if from_b2:  # case III: T2 was too small
            self._target = max(self._target - max(1.0, b1.length / b2.length), 0.0)
            b2.remove(place)
        else:  # case II: T1 was too small
            self._target = min(self._target + max(1.0, b2.length / b1.length), self.capacity)
            b1.remove(place)
        self._forget(place)
        return self._t2, from_b2

    def _evict(self, from_b2: bool, with_ghost: bool) -> int:
        """Run the paper's REPLACE for a key that was in B2 or not; return the slot it empties."""
        t1, t2 = self._t1, self._t2
        t1_first = t1.length > self._target or (from_b2 and t1.length == self._target)
        if (t1_first and t1.evictable) or not t2.evictable:
            slot, ghosts = t1.pop_oldest(), self._b1
        else:
            slot, ghosts = t2.pop_oldest(), self._b2
        if with_ghost:
            self._remember(ghosts, self._key_of[slot])
            if self._b1.length + self._b2.length > self.capacity:
                self._forget((self._b2 if self._b2.length else self._b1).pop_oldest())
        return slot

    def _remember(self, ghosts: RecencyList, key: Key) -> None:
        if self._free_places:
            place = self._free_places.pop()
            self._ghost_at[place] = key
        else:
            place = len(self._ghost_at)
            self._ghost_at.append(key)
        self._place_of.add_all((key,), (place,))
        ghosts.append(place, held=False)

    def _forget(self, place: int) -> None:
        """Forget the ghost of a place that is in no list any more."""
        self._place_of.remove_all((self._ghost_at[place],))
        self._free_places.append(place)

    def _insert(self, home: RecencyList, slot: int, key: Key) -> None:
        if slot >= len(self._key_of):
            self._key_of.extend([key] * (slot + 1 - len(self._key_of)))
        self._key_of[slot] = key
        home.append(slot, held=True)

    def use(self, slots: Slots) -> None:  # the paper's case I
        for slot in slots.tolist():
            if slot not in self._t1:
                self._t2.refresh(slot)
            elif self._t1.is_held(slot):
                self._t1.refresh(slot)
            else:
                self._t1.remove(slot)
                self._t2.append(slot, held=False)

    def keep(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self._list_of(slot).hold(slot)

    def release(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self._list_of(slot).release(slot)

    def discard(self, slots: Slots) -> None:  # leaves no ghost
        for slot in slots.tolist():
            self._list_of(slot).remove(slot)

    def _list_of(self, slot: int) -> RecencyList:
        return self._t1 if slot in self._t1 else self._t2

    def resident(self) -> dict[int, bool]:
        return self._t1.holds() | self._t2.holds()

    def check_integrity(self) -> None:
        for part in (self._t1, self._t2, self._b1, self._b2):
            part.check_integrity()
        t1, t2, b1, b2 = (part.length for part in (self._t1, self._t2, self._b1, self._b2))
        slots = self.resident()
        assert len(slots) == t1 + t2, "a slot is in T1 and in T2"
        places = [*self._b1.slots(), *self._b2.slots()]
        ghosts = {self._ghost_at[place]: place for place in places}
        keys = [*(self._key_of[slot] for slot in slots), *ghosts]
        assert len({*keys}) == t1 + t2 + b1 + b2, "a key is in two of T1, T2, B1 and B2"
        assert dict(self._place_of.items()) == ghosts, "a ghost is lost"
        assert len(self._ghost_at) == len(places) + len(self._free_places), "a place is lost"
        assert t1 + t2 <= self.capacity, f"{t1 + t2} slots exceed capacity {self.capacity}"
        assert t1 + b1 <= self.capacity, f"L1 has {t1 + b1} keys and exceeds {self.capacity}"
        assert b1 + b2 <= self.capacity, f"{b1 + b2} ghosts exceed capacity {self.capacity}"
        assert 0 <= self._target <= self.capacity, f"p is {self._target}, not 0..{self.capacity}"
