"""The packing kernels against the NumPy packer, byte for byte, in both directions."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda import state
from kv_swap.cuda.engine import CudaSwapEngine
from kv_swap.cuda.kernel_families import VECTOR, can_pack
from kv_swap.cuda.swap import MAX_PAIRS
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError, DeviceError
from kv_swap.layout import Packing
from kv_swap.packing.format import PACKED_TILE_BYTES, TILE_BYTES
from kv_swap.packing.slots import SlotPacker
from numpy.typing import NDArray

from tests.gpu.caches import (
    KIB,
    LOAD,
    MIB,
    STORE,
    Packings,
    Pages,
    finish,
    make_arena,
    make_cache,
    make_engine,
    random_pairs,
    torch,
)
from tests.gpu.gate import HELD_SECONDS, Gate
from tests.support.packed_kv import (
    hostile_tiles,
    normal_tiles,
    random_tiles,
    tiles_of_codes,
    tiles_with_escapes,
    tiles_with_zeros,
)

if not can_pack(torch.cuda.get_device_capability()):
    pytest.skip("this GPU does not pack", allow_module_level=True)

NHD, HND = Packing(24), Packing(8, 1024)
MIXED: tuple[Pages, Packings] = (
    [
        (32 * KIB + 48, 32 * KIB + 64),
        (8 * KIB, 8 * KIB),
        (64 * KIB, 64 * KIB),
        (512, 528),
        (48 * KIB, 48 * KIB),
        (16 * KIB, 32 * KIB),
    ],
    [Packing(16), Packing(16), Packing(8, 256), None, NHD, Packing(128)],
)
"""Packed pages with and without a remainder, with gaps between blocks, and raw ones among them."""

LAYOUTS: list[tuple[Pages, Packings, int, int]] = [
    (*MIXED, 120, 80),
    ([(48 * KIB, 48 * KIB)] * 60, [NHD] * 60, 30, 20),
    ([(48 * KIB, 48 * KIB)] * 60, [HND] * 60, 30, 5),
    ([(2 * MIB, 2 * MIB)], [Packing(1)], 40, 9),
    ([(16 * KIB, 16 * KIB)] * 3, [Packing(1, 1)] * 3, 2_600, MAX_PAIRS + 5),
]
"""Pages, packings, number of blocks, and number of pairs to copy."""


def content(num_tiles: int, seed: int) -> NDArray[np.uint8]:
    """Return tiles of all kinds in random order, mostly a model's: `(num_tiles, TILE_BYTES)`."""
    rng = np.random.default_rng(seed)
    normal = normal_tiles(64, seed, 10.0 ** rng.uniform(-6, 6))
    odd = [tiles_with_escapes(list(range(61)), seed), tiles_of_codes(20, seed), hostile_tiles()]
    others = np.concatenate([*odd, tiles_with_zeros(80, seed)])
    tiles = normal[rng.integers(0, len(normal), num_tiles)]
    other = rng.random(num_tiles) < 0.1
    tiles[other] = others[rng.integers(0, len(others), int(other.sum()))]
    raw = rng.random(num_tiles) < 0.005
    tiles[raw] = random_tiles(int(raw.sum()), seed)
    return tiles


class Bed:
    """An engine over a packed cache with hostile content, and garbage in the slots."""

    def __init__(
        self, pages: Pages, packings: Packings, num_blocks: int, num_slots: int, seed: int = 0
    ) -> None:
        made = make_engine(num_blocks, pages, num_slots, packings=packings)
        self.engine, self.cache, slots = made
        self.slots: NDArray[np.uint8] = slots.numpy()
        layout = self.cache.layout
        assert layout.num_tiles
        nbytes = self.cache.storage.numel()
        data = content(-(-nbytes // TILE_BYTES), seed).ravel()[:nbytes]
        self.cache.storage.copy_(torch.from_numpy(data))
        torch.cuda.synchronize()
        self.slots[:] = np.random.default_rng(seed).integers(0, 256, self.slots.shape, np.uint8)

    def host_pages(self, storage: Any) -> dict[int, NDArray[np.uint8]]:
        """Return the pages of all blocks, by region."""
        pages = self.cache.pages(storage.cpu())
        return {index: np.ascontiguousarray(page.numpy()) for index, page in enumerate(pages)}

    def expected_slots(self, pairs: NDArray[np.int32]) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
        """Return what the NumPy packer makes of the pairs' blocks, and the rows that it refuses."""
        layout = self.cache.layout
        pages = self.host_pages(self.cache.storage)
        chosen = {index: page[pairs[:, 0]] for index, page in pages.items()}
        slots = np.zeros((len(pairs), layout.slot_bytes), np.uint8)
        refused = SlotPacker(layout).pack(chosen, slots)
        return slots, tuple(np.flatnonzero(refused).tolist())

    def run(self, direction: Direction, pairs: NDArray[np.int32], **how: bool) -> Completion:
        self.engine.submit(SwapJob(1, direction, pairs, **how))
        (done,) = finish(self.engine)
        assert done.error is None
        assert done.nbytes == len(pairs) * self.cache.layout.block_bytes
        return done

    def check_loaded(self, before: Any, pairs: NDArray[np.int32], whose: NDArray[np.int32]) -> None:
        """Check that blocks of `pairs` have what blocks `whose` had, and no other byte changed."""
        expected = before.clone()
        target, source = self.cache.pages(expected), self.cache.pages(before)
        blocks, owners = (torch.from_numpy(x.astype(np.int64)).cuda() for x in (pairs[:, 0], whose))
        for region, page in enumerate(target):
            page[blocks] = source[region][owners]
        assert torch.equal(self.cache.storage, expected)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("pages", "packings", "num_blocks", "count"), LAYOUTS)
def test_slots_are_those_of_the_packer_and_blocks_come_back(
    pages, packings, num_blocks, count, seed
):
    num_slots = count + 7
    bed = Bed(pages, packings, num_blocks, num_slots, seed)
    pairs = random_pairs(np.random.default_rng(seed), num_blocks, num_slots, count)
    garbage = bed.slots.copy()
    expected, refused = bed.expected_slots(pairs)
    done = bed.run(STORE, pairs)
    assert done.refused_rows == refused
    kept = np.setdiff1d(np.arange(count), refused)
    assert len(kept)
    # The gaps between a slot's parts belong to nothing: neither side writes there.
    written = np.zeros(bed.cache.layout.slot_bytes, np.bool_)
    for region in bed.cache.layout.regions:
        first = region.slot_offset_bytes
        written[first : first + region.slot_page_bytes] = True
    written[bed.cache.layout.pool_offset_bytes :] = True
    found = bed.slots[pairs[kept, 1]]
    np.testing.assert_array_equal(found[:, written], expected[kept][:, written])
    others = np.setdiff1d(np.arange(num_slots), pairs[:, 1])
    np.testing.assert_array_equal(bed.slots[others], garbage[others])
    np.testing.assert_array_equal(found[:, ~written], garbage[pairs[kept, 1]][:, ~written])

    # Into other blocks, in another order.
    before = bed.cache.storage.clone()
    order = np.random.default_rng(seed + 1).permutation(len(kept))
    free = np.setdiff1d(np.arange(num_blocks, dtype=np.int32), pairs[kept, 0])
    chosen = kept[order[: len(free)]]
    loads = np.stack([free[: len(chosen)], pairs[chosen, 1]], 1).astype(np.int32)
    for way in ({}, {"before_compute": True}):
        bed.cache.storage.copy_(before)
        torch.cuda.synchronize()
        assert bed.run(LOAD, loads, **way).refused_rows == ()
        bed.check_loaded(before, loads, pairs[chosen, 0])
    bed.engine.close()


@pytest.mark.parametrize("position", range(8))
def test_every_pattern_at_every_position(position):
    """In a group that escapes, and in the window of its column, also next to zeros."""
    exponents = np.arange(256, dtype=np.uint16)[:, None] << 7
    alike = np.arange(128, dtype=np.uint16)[:, None] | np.array([0, 0x8000], np.uint16)
    patterns = exponents | alike.ravel()
    escaping = np.full((256, 8, TILE_BYTES // 16, 8), 0x55, np.uint16) | exponents[:, :, None, None]
    places = 7 * np.arange(32)
    escaping[:, :, places, position] = patterns.reshape(256, 8, 32)
    escaping[:, :, places, (position + 1) % 8] = 0x0081
    near = np.repeat(patterns.reshape(256, 1, 256), 4, axis=1).reshape(256, 1, 1024, 1)
    near = np.broadcast_to(near, (256, 1, 1024, 8)).copy()
    others = np.minimum((near >> 7 & 0xFF) + 11, 255) << 7 | (near & 0x807F)
    window = others.astype(np.uint16)
    window[..., position] = near[..., position]
    window[::2, :, 9::128, (position + 2) % 8] = 0
    # Two tiles a block.
    words = np.concatenate([escaping.reshape(-1, 2, 8192), window.reshape(-1, 2, 8192)])
    num_blocks = len(words)
    bed = Bed([(32 * KIB, 32 * KIB)], [Packing(1)], num_blocks, num_blocks)
    data = words.view(np.uint8).reshape(-1)
    bed.cache.storage.copy_(torch.from_numpy(data))
    torch.cuda.synchronize()
    pairs = random_pairs(np.random.default_rng(position), num_blocks, num_blocks, num_blocks)
    expected, refused = bed.expected_slots(pairs)
    assert refused == bed.run(STORE, pairs).refused_rows == ()
    np.testing.assert_array_equal(bed.slots[pairs[:, 1]], expected)
    before = bed.cache.storage.clone()
    bed.cache.storage.zero_()
    bed.run(LOAD, pairs)
    assert torch.equal(bed.cache.storage, before)
    bed.engine.close()


def test_waves():
    """Waves of packed regions, of raw ones, and of both."""
    bed = Bed(*MIXED, 200, 150)
    bed.engine.set_waves([[4, 1], [3], [0], [5, 2]])
    pairs = random_pairs(np.random.default_rng(0), 200, 150, 100)
    refused = bed.run(STORE, pairs).refused_rows
    kept = np.setdiff1d(np.arange(100), refused)
    free = np.setdiff1d(np.arange(200, dtype=np.int32), pairs[:, 0])
    chosen = kept[: len(free)]
    loads = np.stack([free[: len(chosen)], pairs[chosen, 1]], 1).astype(np.int32)
    before = bed.cache.storage.clone()
    torch.cuda.synchronize()
    bed.engine.submit(SwapJob(4, LOAD, loads, before_compute=True, in_waves=True))
    bed.engine.await_wave(3)
    bed.check_loaded(before, loads, pairs[chosen, 0])  # without involving the host
    (done,) = finish(bed.engine)
    assert (done.error, done.nbytes) == (None, len(loads) * bed.cache.layout.block_bytes)
    bed.engine.close()


def test_a_load_at_once_unpacks_on_the_host(monkeypatch):
    bed = Bed(*MIXED, 60, 40)
    monkeypatch.setattr("kv_swap.cuda.engine._UNPACKED_BYTES", 5 * bed.cache.layout.block_bytes)
    pairs = random_pairs(np.random.default_rng(0), 30, 40, 30)
    refused = bed.run(STORE, pairs).refused_rows
    kept = np.setdiff1d(np.arange(30), refused)
    loads = np.stack([np.arange(30, 30 + len(kept)), pairs[kept, 1]], 1).astype(np.int32)
    before = bed.cache.storage.clone()
    bed.engine.load_now(loads)
    bed.check_loaded(before, loads, pairs[kept, 0])
    bed.slots[int(loads[0, 1])] = 0
    with pytest.raises(CopyError, match="holds no packed KV"):
        bed.engine.load_now(loads)
    bed.engine.close()


def test_a_packed_byte_that_flips_changes_the_block():
    """The control of all tests here."""
    bed = Bed([(32 * KIB, 32 * KIB)], [NHD], 8, 8)
    bed.cache.storage.copy_(torch.from_numpy(normal_tiles(16).ravel()))
    bed.run(STORE, np.array([[0, 3]], np.int32))
    before = bed.cache.storage.clone()
    bed.slots[3, PACKED_TILE_BYTES + 9000] ^= 1
    bed.run(LOAD, np.array([[6, 3]], np.int32))
    with pytest.raises(AssertionError):
        bed.check_loaded(before, np.array([[6, 3]]), np.array([0]))
    bed.engine.close()


def test_slots_of_garbage_lead_nowhere():
    """Whatever a slot holds, reads and writes stay within it and the block."""
    bed = Bed(*MIXED, 40, 40)
    before = bed.cache.storage.clone()
    pairs = random_pairs(np.random.default_rng(3), 30, 40, 20)
    for value in (None, 0, 0xFF):
        if value is not None:
            bed.slots[:] = value
        bed.run(LOAD, pairs)
    untouched = np.setdiff1d(np.arange(40), pairs[:, 0])
    pages, were = bed.cache.pages(bed.cache.storage), bed.cache.pages(before)
    for page, was in zip(pages, were, strict=True):
        assert torch.equal(page[untouched], was[untouched])
    bed.engine.close()


def test_stores_and_loads_around_captured_compute():
    """One graph writes what is stored, and another reads what was loaded, without the host."""
    bed = Bed([(32 * KIB, 32 * KIB)] * 4, [NHD] * 4, 64, 64)
    source = torch.from_numpy(normal_tiles(512).ravel()).cuda()[: bed.cache.storage.numel()]
    seen = torch.empty_like(source)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        bed.cache.storage.copy_(source)
        seen.copy_(bed.cache.storage)
    torch.cuda.synchronize()
    writes, reads = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(writes):
        bed.cache.storage.copy_(source)
    with torch.cuda.graph(reads):
        seen.copy_(bed.cache.storage)
    bed.cache.storage.zero_()
    seen.zero_()
    gate = Gate()
    pairs = random_pairs(np.random.default_rng(0), 64, 64, 64)
    with torch.cuda.stream(side):
        gate.hold()
        writes.replay()
        bed.engine.submit(SwapJob(1, STORE, pairs))
        time.sleep(HELD_SECONDS)
        assert not bed.engine.poll()
        gate.release()
        (stored,) = finish(bed.engine)
        assert (stored.error, stored.refused_rows) == (None, ())
        bed.cache.storage.zero_()
        bed.engine.submit(SwapJob(2, LOAD, pairs, before_compute=True))
        bed.engine.await_loads()
        reads.replay()
    side.synchronize()
    assert torch.equal(seen, source)
    finish(bed.engine)
    bed.engine.close()


def test_both_directions_at_once():
    bed = Bed([(64 * KIB, 64 * KIB)] * 16, [Packing(128)] * 16, 400, 400)
    tiles = normal_tiles(64).ravel()
    repeats = -(-bed.cache.storage.numel() // len(tiles))
    bed.cache.storage.copy_(torch.from_numpy(tiles).repeat(repeats)[: bed.cache.storage.numel()])
    bed.cache.pages(bed.cache.storage)[0][:, 7] = torch.arange(400, device="cuda") % 251
    before = bed.cache.storage.clone()
    order = np.random.default_rng(0).permutation(400).astype(np.int32)
    first = np.stack([order[:200], order[:200]], 1)
    assert bed.run(STORE, first).refused_rows == ()
    second = np.stack([order[200:], order[200:]], 1)
    target = np.stack([order[:200][::-1], order[:200]], 1)
    bed.engine.submit(SwapJob(2, STORE, second))
    bed.engine.submit(SwapJob(3, LOAD, target))
    done = finish(bed.engine)
    assert [(d.error, d.refused_rows) for d in done] == [(None, ())] * 2
    bed.check_loaded(before, target, order[:200])
    bed.engine.close()


def test_packing_is_refused_where_nothing_can_pack(monkeypatch):
    monkeypatch.setattr(state, "choose_family", lambda device: VECTOR)
    cache = make_cache(8, [(32 * KIB, 32 * KIB)], packings=[NHD])
    arena = make_arena(cache, 8)
    device = cache.storage.device
    with pytest.raises(DeviceError, match=r"capability 9\.0 .*do not pack KV here"):
        CudaSwapEngine(cache.layout, arena, device, [cache.storage])
