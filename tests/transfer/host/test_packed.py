"""The host engine over packed layouts: blocks come back, and those that do not fit are named."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError
from kv_swap.host import transfers
from kv_swap.host.engine import HostSwapEngine
from kv_swap.layout import Packing
from kv_swap.memory.arena import HostArena
from kv_swap.packing.format import TILE_BYTES
from numpy.typing import NDArray

from tests.support.kv_memory import Storage
from tests.support.packed_kv import normal_tiles, packed_cache, random_tiles

KIB = 1 << 10
LOAD, STORE = Direction.LOAD, Direction.STORE
PAGES = [32 * KIB + 48, 8 * KIB, 64 * KIB, 512]
PACKINGS = [Packing(16), Packing(16), Packing(8, 256), None]
BLOCKS = 8


class Bed:
    """An engine over one layout; layers are apart, so that every block and page is another."""

    def __init__(self, num_slots: int = 6) -> None:
        self.layout, self.storage = packed_cache(BLOCKS, PAGES, PACKINGS, padding_bytes=64)
        data = normal_tiles(-(-len(self.storage.data) // TILE_BYTES)).reshape(-1)
        self.storage.data[:] = data[: len(self.storage.data)]
        self.written = self.storage.data.copy()
        self.arena = HostArena(num_slots, self.layout.slot_bytes, register=None)
        self.engine = HostSwapEngine(self.layout, self.arena, [self.storage.data])

    def page(self, region: int, block: int, data: Storage | NDArray[np.uint8]) -> NDArray[np.uint8]:
        memory = data.data if isinstance(data, Storage) else data
        place = self.layout.regions[region]
        first = place.address - self.storage.address + block * place.block_stride_bytes
        return memory[first : first + place.page_bytes]

    def run(self, direction: Direction, pairs: list[tuple[int, int]], **how: bool) -> Completion:
        self.engine.submit(SwapJob(1, direction, np.array(pairs, np.int32), **how))
        assert self.engine.wait(60)
        (done,) = self.engine.poll()
        return done

    def check(self, moved: list[tuple[int, int]]) -> None:
        """Blocks have what others had, by (block, whose); everything else is as it was."""
        expected = self.written.copy()
        for block, whose in moved:
            for region in range(len(PAGES)):
                self.page(region, block, expected)[:] = self.page(region, whose, self.written)
        np.testing.assert_array_equal(self.storage.data, expected)


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    made.engine.close()


@pytest.mark.parametrize("slice_bytes", [1, 300 * KIB, 4096 * KIB])
def test_blocks_come_back_from_packed_slots(bed, monkeypatch, slice_bytes):
    monkeypatch.setattr(transfers, "SLICE_BYTES", slice_bytes)
    assert bed.layout.slot_bytes < 0.9 * bed.layout.block_bytes
    done = bed.run(STORE, [(0, 3), (2, 1), (3, 0)])
    assert (done.nbytes, done.refused_rows, done.error) == (3 * bed.layout.block_bytes, (), None)
    done = bed.run(LOAD, [(6, 3), (7, 1), (4, 0), (5, 3)])
    assert (done.nbytes, done.refused_rows) == (4 * bed.layout.block_bytes, ())
    bed.check([(6, 0), (7, 2), (4, 3), (5, 0)])


def test_slots_may_move(bed):
    bed.run(STORE, [(0, 3)])
    bed.engine.slots()[5] = bed.engine.slots()[3]
    bed.engine.slots()[3] = 0xFF
    bed.run(LOAD, [(6, 5)])
    bed.check([(6, 0)])


def test_equal_blocks_have_equal_slots_whatever_was_there(bed):
    for region in range(len(PAGES)):
        bed.page(region, 1, bed.storage)[:] = bed.page(region, 0, bed.storage)
    bed.engine.slots()[4] = 0xFF
    bed.run(STORE, [(0, 3), (1, 4)])
    np.testing.assert_array_equal(bed.engine.slots()[3], bed.engine.slots()[4])


def test_a_load_before_compute_and_in_waves(bed):
    bed.run(STORE, [(0, 3), (2, 1)])
    bed.engine.set_waves([[1, 0], [3], [2]])
    pairs = np.array([(6, 3), (7, 1)], np.int32)
    bed.engine.submit(SwapJob(2, LOAD, pairs, before_compute=True, in_waves=True))
    page = bed.page(2, 6, bed.storage).copy()
    np.testing.assert_array_equal(bed.page(0, 6, bed.storage), bed.page(0, 0, bed.written))
    bed.engine.await_wave(1)
    np.testing.assert_array_equal(bed.page(2, 6, bed.storage), page)  # its wave comes later
    bed.engine.await_wave(2)
    bed.check([(6, 0), (7, 2)])
    (done,) = bed.engine.poll()
    assert done.nbytes == 2 * bed.layout.block_bytes


def test_load_now_unpacks(bed):
    bed.run(STORE, [(0, 3)])
    bed.engine.load_now(np.array([(6, 3)], np.int32))
    bed.check([(6, 0)])


def test_a_block_that_does_not_fit_is_refused_and_the_others_are_stored(bed, monkeypatch):
    monkeypatch.setattr(transfers, "SLICE_BYTES", 2 * bed.layout.block_bytes)
    assert bed.layout.pool_entries == 1
    # One random tile fits the pool, two do not.
    bed.page(0, 1, bed.storage)[:TILE_BYTES] = random_tiles(1)[0]
    for block in (2, 4):
        bed.page(2, block, bed.storage)[: 2 * TILE_BYTES] = random_tiles(2).reshape(-1)
    bed.written = bed.storage.data.copy()
    done = bed.run(STORE, [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)])
    assert (done.refused_rows, done.error) == ((2, 4), None)
    assert done.nbytes == 5 * bed.layout.block_bytes
    bed.run(LOAD, [(5, 0), (6, 1), (7, 3)])
    bed.check([(5, 0), (6, 1), (7, 3)])


def test_a_slot_that_was_never_stored_fails_the_load(bed):
    done = bed.run(LOAD, [(6, 3)])
    assert isinstance(done.error, CopyError)
    assert "holds no packed KV" in str(done.error)


def test_a_packed_byte_that_flips_changes_the_block(bed):
    """The control of all tests here."""
    bed.run(STORE, [(0, 3)])
    bed.engine.slots()[3, bed.layout.regions[0].slot_offset_bytes + 9000] ^= 1
    bed.run(LOAD, [(6, 3)])
    with pytest.raises(AssertionError):
        bed.check([(6, 0)])
