"""Counts escapes in the headers of sampled tiles, to show how close KV is to not fitting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_swap.layout import KVLayout
from kv_swap.packing.format import HEADER, KIND_RAW, MAIN_BYTES
from kv_swap.packing.slots import place_tiles

SAMPLED_TILES = 251
"""One in this many tiles is sampled: 0.8 us for a slot of 128 tiles in jobs of 64 and of 512, with
cold caches (two busy cores, November 2026). All tiles took 2.0 to 2.6 us, and any job at least 30
us with NumPy. The number is prime, so every tile of a slot has its turn, however many there are."""

_FIELDS = dict(HEADER.fields or {})
_KIND = MAIN_BYTES + _FIELDS["kind"][1]
_ESCAPES = MAIN_BYTES + _FIELDS["escapes"][1]


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts of a sample: `raw_tiles` of its `tiles` are raw; the others have `escapes` in all."""

    tiles: int
    escapes: int
    raw_tiles: int


class TileSampler:
    """Samples every `SAMPLED_TILES`th tile of a packed layout's slots, counted over all calls."""

    def __init__(self, layout: KVLayout) -> None:
        tiles = place_tiles(layout, range(len(layout.regions)))
        self._offsets = [tile.slot_offset_bytes for tile in tiles]
        # Tiles to skip before the next sample.
        self._passed = 0

    def sample(self, arena: NDArray[np.uint8], slots: NDArray[np.int32]) -> Sample:
        """Return counts for some tiles of `slots`, of shape `(n,)`, which must hold packed blocks.

        `arena` is uint8 of shape `(num_slots, slot_bytes)`, in host memory.
        """
        offsets, tiles_of_slot = self._offsets, len(self._offsets)
        tiles = escapes = raw_tiles = 0
        end = len(slots) * tiles_of_slot
        for place in range(self._passed, end, SAMPLED_TILES):
            row, tile = divmod(place, tiles_of_slot)
            slot, offset = slots.item(row), offsets[tile]
            tiles += 1
            if arena.item(slot, offset + _KIND) == KIND_RAW:
                raw_tiles += 1
            else:
                escapes += arena.item(slot, offset + _ESCAPES)
        self._passed = (self._passed - end) % SAMPLED_TILES
        return Sample(tiles, escapes, raw_tiles)
