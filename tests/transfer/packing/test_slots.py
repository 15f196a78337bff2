"""Whole slots: where tiles and raw parts lie, and who gets the pool."""

from __future__ import annotations

import numpy as np
import pytest
from kv_swap.layout import KVLayout, Packing
from kv_swap.packing.format import PACKED_TILE_BYTES, POOL_ENTRY_BYTES, TILE_BYTES
from kv_swap.packing.slots import SlotPacker, place_tiles
from kv_swap.packing.tiles import pack_tiles
from numpy.typing import NDArray

from tests.support.packed_kv import normal_tiles, packed_cache, random_tiles

KIB = 1 << 10


def mixed_layout(num_pages: int = 64) -> KVLayout:
    """Packed pages with and without a rest, and raw ones between and of less than a tile."""
    pages = [32 * KIB + 48, 8 * KIB, 64 * KIB, 512, *[16 * KIB] * num_pages]
    packings = [Packing(16), Packing(16), Packing(8, 256), None, *[Packing(128)] * num_pages]
    return packed_cache(2, pages, packings)[0]


def normal_pages(layout: KVLayout, count: int) -> dict[int, NDArray[np.uint8]]:
    found = {}
    for index, region in enumerate(layout.regions):
        tiles = -(-region.page_bytes // TILE_BYTES) * count
        data = normal_tiles(tiles, seed=index).reshape(count, -1)
        found[index] = np.ascontiguousarray(data[:, : region.page_bytes])
    return found


def empty_slots(layout: KVLayout, count: int) -> NDArray[np.uint8]:
    return np.zeros((count, layout.slot_bytes), np.uint8)


def check_unpacks(
    layout: KVLayout, slots: NDArray[np.uint8], pages: dict[int, NDArray[np.uint8]]
) -> None:
    found = {index: np.full_like(page, 0xEE) for index, page in pages.items()}
    SlotPacker(layout).unpack(slots, found)
    for index, page in pages.items():
        np.testing.assert_array_equal(found[index], page)


def test_pages_come_back_each_in_its_slot():
    layout = mixed_layout()
    pages = normal_pages(layout, 5)
    slots = empty_slots(layout, 5)
    assert not SlotPacker(layout).pack(pages, slots).any()
    check_unpacks(layout, slots, pages)
    # Slots that moved; some regions only.
    some = {index: pages[index][::-1] for index in (0, 1, 7)}
    check_unpacks(layout, slots[::-1].copy(), some)


def test_a_page_is_its_tiles_and_the_raw_rest():
    layout = mixed_layout()
    pages = normal_pages(layout, 1)
    slots = empty_slots(layout, 1)
    SlotPacker(layout).pack(pages, slots)
    region = layout.regions[0]
    first = region.slot_offset_bytes
    (tile, *_) = place_tiles(layout, [0])
    np.testing.assert_array_equal(
        slots[0, first : first + PACKED_TILE_BYTES],
        pack_tiles(pages[0][:, :TILE_BYTES], tile.columns)[0][0],
    )
    rest = first + 2 * PACKED_TILE_BYTES
    np.testing.assert_array_equal(slots[0, rest : rest + 48], pages[0][0, -48:])
    raw = layout.regions[1].slot_offset_bytes
    np.testing.assert_array_equal(slots[0, raw : raw + 8 * KIB], pages[1][0])
    assert not slots[0, layout.pool_offset_bytes :].any()


def spoil(layout: KVLayout, pages: dict[int, NDArray[np.uint8]], row: int, count: int) -> None:
    """Make the last tiles of a block random, so that they must be raw."""
    tiles = list(place_tiles(layout, pages))[-count:] if count else []
    for tile, data in zip(tiles, random_tiles(max(count, 1), row), strict=False):
        first = tile.page_offset_bytes
        pages[tile.region][row, first : first + TILE_BYTES] = data


def test_raw_tiles_take_the_pool_in_their_order_and_more_are_refused():
    layout = mixed_layout()
    assert layout.num_tiles == 70
    assert layout.pool_entries == 2
    pages = normal_pages(layout, 4)
    for row in range(4):
        spoil(layout, pages, row, row)
    slots = empty_slots(layout, 4)
    assert SlotPacker(layout).pack(pages, slots).tolist() == [False, False, False, True]
    whole = {index: page[:3] for index, page in pages.items()}
    check_unpacks(layout, slots[:3].copy(), whole)
    pool = slots[:, layout.pool_offset_bytes :].reshape(4, 2, POOL_ENTRY_BYTES)
    assert pool.any(axis=2)[:3].tolist() == [[False, False], [True, False], [True, True]]
    # In the order of the tiles: the last but one has the first entry.
    np.testing.assert_array_equal(pool[2, 0], pages[len(pages) - 2][2, -POOL_ENTRY_BYTES:])


def test_equal_blocks_have_equal_slots():
    layout = mixed_layout()
    pages = normal_pages(layout, 2)
    spoil(layout, pages, 0, 2)
    for page in pages.values():
        page[1] = page[0]
    slots = empty_slots(layout, 2)
    SlotPacker(layout).pack(pages, slots)
    np.testing.assert_array_equal(slots[0], slots[1])


def test_a_slot_that_was_never_packed_is_refused():
    layout = mixed_layout()
    pages = normal_pages(layout, 1)
    with pytest.raises(ValueError, match="no packed KV"):
        SlotPacker(layout).unpack(empty_slots(layout, 1), pages)


def test_an_entry_beyond_the_pool_is_refused():
    layout = mixed_layout()
    pages = normal_pages(layout, 1)
    spoil(layout, pages, 0, 1)
    slots = empty_slots(layout, 1)
    SlotPacker(layout).pack(pages, slots)
    last = list(place_tiles(layout, pages))[-1]
    slots[0, last.slot_offset_bytes + 12292] = 2
    with pytest.raises(ValueError, match="entry 2 of a pool of 2 entries"):
        SlotPacker(layout).unpack(slots, pages)
