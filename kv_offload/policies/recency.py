"""A list of keys by recency in which single keys can be held: the part that policies share."""

from __future__ import annotations

from collections import OrderedDict

from kv_offload.policies.base import Key


class RecencyList:
    """Keys from the least to the most recent; a held key keeps its place but is not popped.

    A held key that is found at the old end is parked beside the list, so that a search for a victim
    passes it once and not again each time: O(1) amortised per operation. When it is released it
    returns to the old end, where it was; only several parked keys may change places among
    themselves, and they do not if the most recent of them is released first.
    """

    __slots__ = ("_held", "_listed", "_parked")

    def __init__(self) -> None:
        self._listed: OrderedDict[Key, bool] = OrderedDict()  # the value: is the key held?
        self._held = 0  # how many keys in `_listed` are
        self._parked: set[Key] = set()  # all of them held

    def append(self, key: Key, *, held: bool) -> None:
        """Add a key that is not in the list, as the most recent."""
        self._listed[key] = held
        self._held += held

    def refresh(self, key: Key) -> None:
        """Make a key the most recent. Raises `KeyError` where it is not in the list."""
        if key in self._parked:
            self._parked.remove(key)
            self.append(key, held=True)
        else:
            self._listed.move_to_end(key)

    def hold(self, key: Key) -> None:
        """Keep a key, which must not be held, from being popped. Raises `KeyError` as `refresh`."""
        self._held += not self._listed[key]
        self._listed[key] = True

    def release(self, key: Key) -> None:
        """Let a held key be popped again. Raises `KeyError` where it is not in the list."""
        if key in self._parked:
            self._parked.remove(key)
            self._listed[key] = False
            self._listed.move_to_end(key, last=False)
        elif self._listed[key]:
            self._listed[key] = False
            self._held -= 1

    def remove(self, key: Key) -> None:
        """Take a key out of the list. Raises `KeyError` where it is not in the list."""
        if key in self._parked:
            self._parked.remove(key)
        else:
            self._held -= self._listed.pop(key)

    def pop_oldest(self) -> Key:
        """Take out the least recent key that is not held. Needs `evictable` to be above 0."""
        while True:
            key, held = self._listed.popitem(last=False)
            if not held:
                return key
            self._parked.add(key)
            self._held -= 1

    def is_held(self, key: Key) -> bool:
        """Say whether a key is held. Raises `KeyError` where it is not in the list."""
        return key in self._parked or self._listed[key]

    @property
    def evictable(self) -> int:
        """How many keys are not held."""
        return len(self._listed) - self._held

    def __contains__(self, key: Key) -> bool:
        return key in self._listed or key in self._parked

    def __len__(self) -> int:
        return len(self._listed) + len(self._parked)

    def keys(self) -> list[Key]:
        """Copy the keys, from the least to the most recent; parked ones first, in no order."""
        return [*self._parked, *self._listed]

    def check_integrity(self) -> None:
        """Check all invariants, in O(n). Raises `AssertionError` naming the first broken."""
        held = sum(self._listed.values())
        assert self._held == held, f"{self._held} listed keys counted as held, but {held} are"
        both = self._parked & self._listed.keys()
        assert not both, f"both listed and parked: {sorted(map(repr, both))}"
