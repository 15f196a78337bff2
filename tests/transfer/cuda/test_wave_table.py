"""Tiles of waves: each wave has exactly the bytes of its regions, and the table is large enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_swap.cuda import swap_bulk, swap_vector
from kv_swap.cuda.swap import cut_tiles
from kv_swap.cuda.wave_table import cut_waves, most_segments
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region

SHAPES = [family.shapes[Direction.LOAD] for family in (swap_bulk.FAMILY, swap_vector.FAMILY)]


def layout_of(page_bytes: list[int]) -> KVLayout:
    offsets = np.cumsum([0, *page_bytes[:-1]]).tolist()
    regions = [
        Region((1 + i) << 24, nbytes, nbytes + 16 * i, offset)
        for i, (nbytes, offset) in enumerate(zip(page_bytes, offsets, strict=True))
    ]
    return KVLayout(4, tuple(regions))


@given(data=st.data(), shape=st.sampled_from(SHAPES))
def test_every_wave_has_the_bytes_of_its_regions(data: st.DataObject, shape: object) -> None:
    sizes = st.sampled_from([16, 48, 512, 4096, 4112, 16_384, 65_552])
    pages = data.draw(st.lists(sizes, min_size=1, max_size=70))
    layout = layout_of(pages)
    wave_of = data.draw(st.lists(st.integers(0, 3), min_size=len(pages), max_size=len(pages)))
    waves = [[i for i, w in enumerate(wave_of) if w == wave] for wave in set(wave_of)]
    table, counts = cut_waves(layout, shape, [wave[::-1] for wave in waves])  # type: ignore[arg-type]
    num_tiles, per_tile = most_segments(layout, shape)  # type: ignore[arg-type]
    assert len(table) == sum(counts) <= num_tiles
    assert table.shape[1] <= per_tile
    words = table.astype(np.int64)
    nbytes, tile_bytes = words[:, :, 3] & 0xFFFFFFFF, words[:, :, 3] >> 32
    assert (tile_bytes == nbytes.sum(axis=1, keepdims=True)).all()
    first = 0
    for wave, count in zip(waves, counts, strict=True):
        rows = words[first : first + count].reshape(-1, 4)
        rows = rows[rows[:, 3] & 0xFFFFFFFF > 0]
        found = sorted(
            (address, stride, offset, size & 0xFFFFFFFF)
            for address, stride, offset, size in rows.tolist()
        )
        for region in (layout.regions[i] for i in wave):
            copied = 0
            while copied < region.page_bytes:
                address, stride, offset, size = found.pop(0)
                assert address == region.address + copied
                assert stride == region.block_stride_bytes
                assert offset == region.slot_offset_bytes + copied
                copied += size
            assert copied == region.page_bytes
        assert not found
        first += count


@pytest.mark.parametrize("shape", SHAPES)
def test_one_wave_of_all_is_the_whole_table(shape: object) -> None:
    layout = layout_of([4096] * 9 + [20_000])
    table, counts = cut_waves(layout, shape, [list(range(10))])  # type: ignore[arg-type]
    np.testing.assert_array_equal(table, cut_tiles(layout, shape))  # type: ignore[arg-type]
    assert counts == [len(table)]
