"""How often prefixes are used: what is used once may not be worth host memory."""

from __future__ import annotations

from collections import OrderedDict

from kv_offload.cache.prefix import SlotKey

TRACKED_PREFIXES = 1 << 20
"""Keys whose uses are counted for `store_after_uses`; the least recently used are forgotten."""


class UseCounter:
    """Counts how often a key was computed or reused, for a bounded number of keys."""

    def __init__(self, capacity: int = TRACKED_PREFIXES) -> None:
        self._capacity = capacity
        self._uses: OrderedDict[SlotKey, int] = OrderedDict()

    def count(self, key: SlotKey) -> int:
        """Add one use and return the new number of uses."""
        uses = self._uses.pop(key, 0) + 1
        self._uses[key] = uses
        if len(self._uses) > self._capacity:
            self._uses.popitem(last=False)
        return uses
