"""Remembers the blocks that did not fit packed slots, and notices if they are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_offload.cache.prefix import SlotKey

REMEMBERED_KEYS = 1 << 16
"""Maximum keys of refused blocks; the oldest are dropped. With more, stores are usually paused."""

TRIED_BLOCKS = 512
"""After this many blocks it is clear whether the KV of a model fits packed slots."""

RECENT_BLOCKS = 1 << 14
"""At this number both counts are halved, so that earlier blocks lose half their weight with every
8,192. With a far smaller number, a few unusual prompts in a row would pause stores."""

MAX_SHARE = 0.01
"""Maximum share of refused blocks. With more, prefixes end too early to be useful."""


@dataclass(eq=False, repr=False)
class Refusals:
    """The keys of refused blocks, and their share of the recent blocks."""

    keys: OrderedDict[SlotKey, None] = field(default_factory=OrderedDict)
    """Keys of blocks that are not tried again; `StoreChoice` reads them."""
    _tried: int = 0
    _refused: int = 0

    @property
    def share(self) -> float:
        """The share of the recent blocks that were refused."""
        return self._refused / self._tried if self._tried else 0.0

    @property
    def are_too_many(self) -> bool:
        """True if enough blocks were tried, and too many refused for storing to pay off."""
        return self._tried >= TRIED_BLOCKS and self.share > MAX_SHARE

    def count(self, tried: int, refused: Sequence[SlotKey | None]) -> None:
        """Count the blocks of a store that has ended, and do not try the refused ones again."""
        self._tried += tried
        self._refused += len(refused)
        if self._tried >= RECENT_BLOCKS:
            self._tried //= 2
            self._refused //= 2
        self.keys.update({key: None for key in refused if key is not None})
        while len(self.keys) > REMEMBERED_KEYS:
            self.keys.popitem(last=False)

    def start_over(self) -> None:
        """Try every block again, and count from zero."""
        self.keys.clear()
        self._tried = self._refused = 0
