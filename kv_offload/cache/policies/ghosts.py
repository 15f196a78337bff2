"""Keys that were evicted and are remembered for a while."""

from __future__ import annotations

from kv_offload.cache.key_map import KeyMap
from kv_offload.cache.policies.recency import RecencyList
from kv_offload.cache.slots import Key


class GhostList:
    """Keys from the least to the most recent, without slots."""

    __slots__ = ("_free", "_key_of", "_order", "_places")

    def __init__(self) -> None:
        self._places = KeyMap()
        self._order = RecencyList()  # of places, which are numbered as slots are
        self._key_of: list[Key] = []  # by place
        self._free: list[int] = []

    def append(self, key: Key) -> None:
        """Add a key that is not in the list, as the most recent."""
        if self._free:
            place = self._free.pop()
            self._key_of[place] = key
        else:
            place = len(self._key_of)
            self._key_of.append(key)
        self._places[key] = place
        self._order.append(place, held=False)

    def remove(self, key: Key) -> None:
        """Take a key out of the list. Raises `KeyError` where it is not in the list."""
        place = self._places.pop(key)
        self._order.remove(place)
        self._free.append(place)

    def pop_oldest(self) -> None:
        """Take out the least recent key; the list must not be empty."""
        place = self._order.pop_oldest()
        self._places.pop(self._key_of[place])
        self._free.append(place)

    def keys(self) -> list[Key]:
        """Return the keys from the least to the most recent."""
        return [self._key_of[place] for place in self._order.slots()]

    @property
    def length(self) -> int:
        """How many keys there are."""
        return self._order.length

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def check_integrity(self) -> None:
        """Check all invariants, in O(n). Raises `AssertionError` naming the first broken."""
        self._order.check_integrity()
        assert self._places.get_all(self.keys()) == self._order.slots(), "a ghost is lost"
        assert len(self._places) == self.length, "a ghost has no place"
