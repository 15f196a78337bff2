"""The kernels that pack, compiled for a CPU, against the NumPy packer, byte for byte, both ways.

This shows what they compute, that their threads do not wait for each other, and that a copy is
waited for before its memory is used again; not what fences do, nor how fast the kernels are:
tests/gpu/test_packed.py.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.kernel_families import PACKED
from kv_swap.cuda.swap import LIST_BYTES, STATUS_OFFSET_BYTES, write_list
from kv_swap.cuda.tiles import columns_table, cut_packed_tiles
from kv_swap.engine import Direction
from kv_swap.layout import Packing
from kv_swap.packing.format import TILE_BYTES
from kv_swap.packing.slots import SlotPacker
from numpy.typing import NDArray

from tests.support.kernels_on_host import compile_kernels
from tests.support.packed_kv import (
    hostile_tiles,
    normal_tiles,
    packed_cache,
    random_tiles,
    tiles_of_codes,
    tiles_with_escapes,
    tiles_with_zeros,
)
from tests.support.slow import rest_is_slow

KIB = 1 << 10
LOAD, STORE = Direction.LOAD, Direction.STORE


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_kernels(PACKED, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(params=[False, True], ids=["copies at once", "copies late"])
def kernels(compiled: Any, request: pytest.FixtureRequest) -> Any:
    return functools.partial(compiled.launch, int(request.param))


class Bed:
    """A packed cache and its slots, which hold garbage."""

    def __init__(
        self,
        kernels: Any,
        tiles: NDArray[np.uint8],
        pages: list[int],
        packings: list[Packing | None],
    ) -> None:
        self._kernels = kernels
        num_blocks = len(tiles) * TILE_BYTES // sum(pages)
        self.layout, self.storage = packed_cache(num_blocks, pages, packings)
        nbytes = num_blocks * sum(pages)
        self.storage.data[:nbytes] = tiles.reshape(-1)[:nbytes]
        self.before = self.storage.data.copy()
        self.slots = np.random.default_rng(0).integers(
            0, 256, (num_blocks, self.layout.slot_bytes), np.uint8
        )
        self.pairs = np.stack([np.random.default_rng(s).permutation(num_blocks) for s in (1, 2)], 1)
        self.pairs = self.pairs.astype(np.int32)

    def pages(self, memory: NDArray[np.uint8]) -> dict[int, NDArray[np.uint8]]:
        found = {}
        for index, region in enumerate(self.layout.regions):
            first = region.address - self.storage.address
            whole = memory[first : first + self.layout.num_blocks * region.page_bytes]
            found[index] = whole.reshape(-1, region.page_bytes)
        return found

    def launch(self, direction: Direction, pairs: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return what the statuses say."""
        shape = PACKED.shapes[direction]
        listed = np.zeros(LIST_BYTES, np.uint8)
        write_list(listed, pairs)
        table, _ = cut_packed_tiles(self.layout, [range(len(self.layout.regions))])
        columns = columns_table(self.layout)
        failed = self._kernels(
            int(direction is STORE),
            shape.ctas,
            shape.threads,
            ctypes.c_void_p(listed.ctypes.data),
            ctypes.c_void_p(table.ctypes.data),
            len(table),
            ctypes.c_uint64(self.slots.ctypes.data),
            ctypes.c_uint64(self.layout.slot_bytes),
            ctypes.c_void_p(columns.ctypes.data),
            self.layout.pool_entries,
        )
        assert not failed, "threads wait for each other, or not for their copies"
        return listed[STATUS_OFFSET_BYTES : STATUS_OFFSET_BYTES + len(pairs)] != 0

    def check(self) -> int:
        """Store and load; return how many blocks are refused."""
        blocks, slots = self.pairs.T
        chosen = {index: page[blocks] for index, page in self.pages(self.before).items()}
        expected = np.zeros_like(self.slots)
        refused = SlotPacker(self.layout).pack(chosen, expected)
        np.testing.assert_array_equal(self.launch(STORE, self.pairs), refused)
        packed = np.zeros(self.layout.slot_bytes, np.bool_)
        for region in self.layout.regions:
            raw_bytes = 0 if region.raw_part is None else region.raw_part.page_bytes
            first = region.slot_offset_bytes
            packed[first : first + region.slot_page_bytes - raw_bytes] = True
        packed[self.layout.pool_offset_bytes :] = True
        found = self.slots[slots][~refused]
        np.testing.assert_array_equal(found[:, packed], expected[~refused][:, packed])
        self.storage.data[:] = 0xEE
        self.launch(LOAD, self.pairs[~refused])
        loaded, pages = self.pages(self.storage.data), self.pages(self.before)
        for index, region in enumerate(self.layout.regions):
            end = region.num_tiles * TILE_BYTES
            kept = blocks[~refused]
            np.testing.assert_array_equal(loaded[index][kept, :end], pages[index][kept, :end])
            assert (loaded[index][:, end:] == 0xEE).all(), "what is raw is not theirs"
            assert (loaded[index][blocks[refused]] == 0xEE).all()
        return int(refused.sum())


def in_pairs(tiles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Each with another that fits, now before it, now behind it: at most one of both is raw."""
    pairs = np.stack([tiles, normal_tiles(len(tiles), 5)], 1)
    pairs[1::2] = pairs[1::2, ::-1].copy()
    return pairs.reshape(-1, TILE_BYTES)


PACKINGS = [Packing(1), Packing(8), Packing(16, 256), Packing(128), Packing(24), Packing(1, 1)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_tiles_of_all_kinds(kernels, packing):
    tiles = np.concatenate(
        [
            normal_tiles(20),
            tiles_with_escapes(list(range(61))),
            tiles_with_zeros(30),
            tiles_of_codes(100),
            hostile_tiles(),
            random_tiles(3),
        ]
    )
    bed = Bed(kernels, in_pairs(tiles), [2 * TILE_BYTES], [packing])
    assert bed.check() == 0


def test_pages_with_a_rest_and_raw_ones_and_blocks_that_are_refused(kernels):
    normal = normal_tiles(80).reshape(4, 20, TILE_BYTES)
    normal[1, 3] = random_tiles(1)[0]
    normal[2, [4, 12]] = random_tiles(2)
    pages = [32 * KIB + 48, 8 * KIB, 64 * KIB, 512, 48 * KIB]
    packings = [Packing(16), Packing(16), Packing(8, 256), None, Packing(24)]
    bed = Bed(kernels, normal.reshape(-1, TILE_BYTES), pages, packings)
    assert bed.layout.pool_entries == 1
    assert bed.check() == 1


@pytest.mark.parametrize("position", rest_is_slow([0, 7, *range(1, 7)], 2))
def test_every_pattern_at_every_position(kernels, position):
    """Beside values of its exponent or a few more, among groups that escape, and zeros or none."""
    patterns = np.repeat(np.arange(1 << 16, dtype=np.uint16).reshape(512, 128), 8, axis=1)
    steps = np.resize(np.array([0, 3, 11, 14, 15, 15, 2, 9], np.uint16), (512, 1024))
    steps[::2] = np.minimum(steps[::2], 14)
    near = np.minimum((patterns >> 7 & 0xFF) + steps, 255).astype(np.uint16) << 7
    words = np.repeat((near | patterns & 0x807F)[:, :, None], 8, axis=2)
    words[:, :, position] = patterns
    words[:, 5::64, (position + 1) % 8] = 0x0081
    words[::2, 9::128, (position + 2) % 8] = 0
    tiles = words.view(np.uint8).reshape(512, TILE_BYTES)
    bed = Bed(kernels, tiles, [2 * TILE_BYTES], [Packing(1)])
    assert bed.check() == 0


def test_garbage_leads_nowhere(kernels):
    bed = Bed(kernels, normal_tiles(8), [2 * TILE_BYTES], [Packing(16)])
    around = bed.storage.data.copy()
    for value in (None, 0, 0xFF):
        if value is not None:
            bed.slots[:] = value
        bed.launch(LOAD, bed.pairs[1:])
    kept = bed.pages(bed.storage.data)[0][bed.pairs[0, 0]]
    np.testing.assert_array_equal(kept, bed.pages(around)[0][bed.pairs[0, 0]])
