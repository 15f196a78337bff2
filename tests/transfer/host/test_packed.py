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

from tests.support.packed_kv import PackedCache

KIB = 1 << 10
LOAD, STORE = Direction.LOAD, Direction.STORE
PAGES = [32 * KIB + 48, 8 * KIB, 64 * KIB, 512]
PACKINGS = [Packing(16), Packing(16), Packing(8, 256), None]
BLOCKS = 8


class Bed(PackedCache):
    """The engine over one layout, whose slots hold nothing."""

    def __init__(self) -> None:
        super().__init__(BLOCKS, PAGES, PACKINGS)
        arena = HostArena(6, self.layout.slot_bytes, register=None)
        self.engine = HostSwapEngine(self.layout, arena, [self.storage.data])

    def run(self, direction: Direction, pairs: list[tuple[int, int]], **how: bool) -> Completion:
        self.engine.submit(SwapJob(1, direction, np.array(pairs, np.int32), **how))
        assert self.engine.wait(60)
        (done,) = self.engine.poll()
        return done


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
    for page in bed.pages():
        page[1] = page[0]
    bed.engine.slots()[4] = 0xFF
    bed.run(STORE, [(0, 3), (1, 4)])
    np.testing.assert_array_equal(bed.engine.slots()[3], bed.engine.slots()[4])


def test_a_load_before_compute_and_in_waves(bed):
    bed.run(STORE, [(0, 3), (2, 1)])
    bed.engine.set_waves([[1, 0], [3], [2]])
    pairs = np.array([(6, 3), (7, 1)], np.int32)
    bed.engine.submit(SwapJob(2, LOAD, pairs, before_compute=True, in_waves=True))
    pages, written = bed.pages(), bed.pages(bed.written)
    np.testing.assert_array_equal(pages[0][6], written[0][0])
    bed.engine.await_wave(1)
    np.testing.assert_array_equal(pages[2][6], written[2][6])  # its wave comes later
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
    bed.spoil(1, num_tiles=1)  # fits the pool
    for block in (2, 4):
        bed.spoil(block)
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
