"""Escapes counted in packed slots: what the packer says of their tiles, one in so many or all."""

from __future__ import annotations

import numpy as np
from kv_swap.layout import KVLayout, Packing
from kv_swap.packing import samples
from kv_swap.packing.format import TILE_BYTES
from kv_swap.packing.samples import SAMPLED_TILES, Sample, TileSampler
from kv_swap.packing.slots import SlotPacker
from numpy.typing import NDArray

from tests.support.packed_kv import packed_cache, random_tiles, tiles_with_escapes

SLOTS = 12
ESCAPES = [7, 0, 20, 3]
"""Of the tiles of a block; those of block n have n % 7 more each."""


def packed_slots() -> tuple[KVLayout, NDArray[np.uint8]]:
    """Slots of 4 tiles among raw pages, of which slot 3 has a raw tile in its second place."""
    pages, packings = [512, 2 * TILE_BYTES, TILE_BYTES + 64, TILE_BYTES], [None, *[Packing(8)] * 3]
    layout = packed_cache(SLOTS, pages, packings)[0]
    counts = [count + block % 7 for block in range(SLOTS) for count in ESCAPES]
    tiles = tiles_with_escapes(counts).reshape(SLOTS, -1, TILE_BYTES)
    tiles[3, 1] = random_tiles(1)[0]
    of_pages = {
        0: np.zeros((SLOTS, 512), np.uint8),
        1: tiles[:, :2].reshape(SLOTS, -1),
        2: np.concatenate([tiles[:, 2], np.zeros((SLOTS, 64), np.uint8)], axis=1),
        3: tiles[:, 3],
    }
    slots = np.zeros((SLOTS, layout.slot_bytes), np.uint8)
    assert not SlotPacker(layout).pack(of_pages, slots).any()
    return layout, slots


def test_escapes_are_those_of_the_slots_that_were_named(monkeypatch):
    monkeypatch.setattr(samples, "SAMPLED_TILES", 1)
    layout, slots = packed_slots()
    sampler = TileSampler(layout)

    def sample(*named: int) -> Sample:
        return sampler.sample(slots, np.array(named, np.int32))

    assert sample(0) == Sample(4, 30, 0)
    assert sample(5, 0) == Sample(8, 30 + 4 * 5 + 30, 0)
    assert sample(3) == Sample(4, 30 + 3 * 3, 1), "without the raw tile"


def test_one_tile_in_so_many_is_looked_at_and_each_has_its_turn(monkeypatch):
    """Whatever the jobs are: their tiles are counted on."""
    monkeypatch.setattr(samples, "SAMPLED_TILES", 5)
    layout, slots = packed_slots()
    sampler = TileSampler(layout)
    jobs = [[0], [1, 2], [3], [4, 5, 6, 7], [8], [9], [10, 11], [0], [1, 2], [3]]
    found = [sampler.sample(slots, np.array(job, np.int32)) for job in jobs]
    passed = np.arange(4 * 16)
    row, tile = passed // 4 % SLOTS, passed % 4
    counts = np.array(ESCAPES)[tile] + row % 7
    raw = (row == 3) & (tile == 1)
    chosen = passed % 5 == 0
    assert sum(sample.tiles for sample in found) == chosen.sum() == 13
    assert sum(sample.raw_tiles for sample in found) == (chosen & raw).sum()
    assert sum(sample.escapes for sample in found) == counts[chosen & ~raw].sum()
    assert len(set(tile[chosen])) == layout.num_tiles


def test_no_number_of_tiles_keeps_one_of_them_from_its_turn():
    assert all(SAMPLED_TILES % divisor for divisor in range(2, 16))
