"""Evict by recency or by frequency, in a balance that follows the workload (ARC).

N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4. The names are the paper's: T1 has the keys used once, T2 those used more often; B1 and B2
remember as ghosts the keys that were evicted from them; L1 is T1 with B1, L2 is T2 with B2; c is
the capacity; p is the size that T1 should have.

Without holds the victims are those of the paper. What holds and discarded keys add to it:
- Where all keys of the list that REPLACE chooses are held, the other list gives the victim.
- The cache may evict before it has c keys (after a reset some slots are busy for a while), so the
  paper's |B1| + |B2| <= c no longer follows from its other invariants and is enforced.
"""

from __future__ import annotations

from collections import OrderedDict

from kv_offload.policies.base import EvictionPolicy, Key
from kv_offload.policies.recency import RecencyList


class ARCPolicy(EvictionPolicy):
    """Two lists by recency with a ghost list each. Keeps reused prefixes through scans of new ones.

    Remembers up to `2 * capacity` keys. `use` of a resident key is the paper's hit; so is `hold`.
    A held key of T1 is therefore one that has not been released since it was added.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.clear()

    def clear(self) -> None:
        """See `EvictionPolicy.clear`."""
        self._t1 = RecencyList()
        self._t2 = RecencyList()
        self._b1: OrderedDict[Key, None] = OrderedDict()  # from the oldest to the newest ghost
        self._b2: OrderedDict[Key, None] = OrderedDict()
        self._target = 0.0  # p

    def add(self, key: Key) -> None:
        """See `EvictionPolicy.add`."""
        self._admit(key, evict=False)

    def replace(self, key: Key) -> Key | None:
        """See `EvictionPolicy.replace`."""
        if not self._t1.evictable and not self._t2.evictable:
            return None
        return self._admit(key, evict=True)

    def _admit(self, key: Key, *, evict: bool) -> Key | None:
        """Run the paper's cases II to IV; without `evict` there is a free place and no REPLACE."""
        t1, b1, b2 = self._t1, self._b1, self._b2
        home = self._t2
        victim: Key | None = None
        if key in b1:  # case II: T1 was too small
            self._target = min(self._target + max(1.0, len(b2) / len(b1)), self.capacity)
            del b1[key]
            if evict:
                victim = self._evict(t1_at_target=False)
        elif key in b2:  # case III: T2 was too small
            self._target = max(self._target - max(1.0, len(b1) / len(b2)), 0.0)
            del b2[key]
            if evict:
                victim = self._evict(t1_at_target=True)
        else:  # case IV: never seen, or forgotten
            home = t1
            if len(t1) == self.capacity:
                victim = t1.pop_oldest()  # L1 is full of T1 alone: the victim leaves no ghost
            else:
                if len(t1) + len(b1) == self.capacity:
                    b1.popitem(last=False)
                elif len(self) + len(b1) + len(b2) == 2 * self.capacity:
                    b2.popitem(last=False)
                if evict:
                    victim = self._evict(t1_at_target=False)
        home.append(key, held=True)
        return victim

    def _evict(self, *, t1_at_target: bool) -> Key:
        """Run the paper's REPLACE: move the oldest key of T1 or T2 to its ghosts.

        `t1_at_target` says whether T1 gives the victim even when it has just its target size.
        """
        t1, t2 = self._t1, self._t2
        from_t1 = len(t1) > self._target or (t1_at_target and len(t1) == self._target)
        if (from_t1 and t1.evictable) or not t2.evictable:
            victim, ghosts = t1.pop_oldest(), self._b1
        else:
            victim, ghosts = t2.pop_oldest(), self._b2
        ghosts[victim] = None
        if len(self._b1) + len(self._b2) > self.capacity:
            (self._b2 or self._b1).popitem(last=False)
        return victim

    def use(self, key: Key) -> None:
        """See `EvictionPolicy.use`; the paper's case I."""
        if key not in self._t1:
            self._t2.refresh(key)
        elif self._t1.is_held(key):
            self._t1.refresh(key)
        else:
            self._t1.remove(key)
            self._t2.append(key, held=False)

    def hold(self, key: Key) -> None:
        """See `EvictionPolicy.hold`; the paper's case I."""
        self.use(key)
        self._t2.hold(key)

    def release(self, key: Key) -> None:
        """See `EvictionPolicy.release`."""
        self._list_of(key).release(key)

    def discard(self, key: Key) -> None:
        """See `EvictionPolicy.discard`; it leaves no ghost."""
        self._list_of(key).remove(key)

    def is_held(self, key: Key) -> bool:
        """See `EvictionPolicy.is_held`."""
        return self._list_of(key).is_held(key)

    def _list_of(self, key: Key) -> RecencyList:
        return self._t1 if key in self._t1 else self._t2

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def check_integrity(self) -> None:
        """See `EvictionPolicy.check_integrity`."""
        capacity, b1, b2 = self.capacity, len(self._b1), len(self._b2)
        self._t1.check_integrity()
        self._t2.check_integrity()
        keys = [*self._t1.keys(), *self._t2.keys(), *self._b1, *self._b2]
        assert len(set(keys)) == len(keys), "a key is in two of T1, T2, B1 and B2"
        assert len(self) <= capacity, f"{len(self)} keys exceed capacity {capacity}"
        assert len(self._t1) + b1 <= capacity, f"L1 exceeds capacity {capacity}"
        assert b1 + b2 <= capacity, f"{b1 + b2} ghosts exceed capacity {capacity}"
        assert 0 <= self._target <= capacity, f"target {self._target} is outside 0..{capacity}"
