"""Blocks that did not fit packed slots: which ones, and whether there are too many of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_offload.cache.prefix import SlotKey

REMEMBERED_KEYS = 1 << 16
"""Keys of refused blocks; the oldest are forgotten. With more of them stores are mostly paused."""

TRIED_BLOCKS = 512
"""After so many it shows whether the KV of a model fits packed slots."""

RECENT_BLOCKS = 1 << 14
"""So many count at most. Whenever they are reached, both counts are halved: with each 8,192 blocks
those before count half as much. Far fewer would pause stores for a few odd prompts in a row."""

MAX_SHARE = 0.01
"""Share of the recent blocks. With more refused, prefixes end too early to be of use."""


@dataclass(eq=False, repr=False)
class Refusals:
    """Remembers the keys of refused blocks, and counts how many of the recent blocks these are."""

    keys: OrderedDict[SlotKey, None] = field(default_factory=OrderedDict)
    """Keys of blocks that are not to be tried again. The choice of what is stored reads it."""
    _tried: int = 0
    _refused: int = 0

    @property
    def share(self) -> float:
        """The share of the recent blocks that were refused."""
        return self._refused / self._tried if self._tried else 0.0

    @property
    def are_too_many(self) -> bool:
        """True if enough blocks were tried, and too many of them refused, for storing to pay."""
        return self._tried >= TRIED_BLOCKS and self.share > MAX_SHARE

    def count(self, tried: int, refused: int) -> None:
        """Count the blocks of a store that has ended."""
        self._tried += tried
        self._refused += refused
        if self._tried >= RECENT_BLOCKS:
            self._tried //= 2
            self._refused //= 2

    def remember(self, keys: Iterable[SlotKey]) -> None:
        """Have blocks with these keys not tried again."""
        self.keys.update(dict.fromkeys(keys))
        while len(self.keys) > REMEMBERED_KEYS:
            self.keys.popitem(last=False)

    def forget_keys(self) -> None:
        """Have every block tried again."""
        self.keys.clear()

    def begin_anew(self) -> None:
        """Have every block tried again, and count from now on only."""
        self.forget_keys()
        self._tried = self._refused = 0
