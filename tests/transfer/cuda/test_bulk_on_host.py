"""The kernels of bulk copies, compiled for a CPU: every byte arrives, and nothing else is written.

Copies are made at once, or as late as they may be: so one that nobody waits for is noticed. Not
what fences do, nor how fast the kernels are: tests/gpu/test_swap.py.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
from kv_swap.cuda.kernel_families import BULK, BULK_SMALL
from kv_swap.cuda.swap import LIST_BYTES, write_list
from kv_swap.cuda.tiles import cut_waves
from kv_swap.engine import Direction

from tests.support.kernels_on_host import compile_kernels
from tests.support.packed_kv import packed_cache

KIB = 1 << 10
PAGES = {
    "tiny": [16],
    "of one tile": [16 * KIB],
    "mixed": [48, 14 * KIB, 16, 32 * KIB + 48, 256, 256, 20 * KIB, 4112],
    "more than the segments of a tile": [256] * 70,
    "large": [128 * KIB, 64 * KIB],
}


@pytest.fixture(scope="module", params=[BULK, BULK_SMALL], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def compiled(family: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_kernels(family, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("pages", PAGES.values(), ids=list(PAGES))
@pytest.mark.parametrize("num_pairs", [0, 1, 9, 70])
def test_all_bytes_of_the_pairs_arrive_and_no_others(family, compiled, late, pages, num_pairs):
    num_blocks = num_pairs + 3
    layout, storage = packed_cache(num_blocks, pages, [None] * len(pages), padding_bytes=64)
    rng = np.random.default_rng(num_pairs)
    cache, slots = storage.data, np.zeros((num_blocks, layout.slot_bytes), np.uint8)
    pairs = np.stack([rng.permutation(num_blocks)[:num_pairs] for _ in range(2)], 1)
    listed = np.zeros(LIST_BYTES, np.uint8)
    write_list(listed, pairs.astype(np.int32))
    launch = functools.partial(_launch, compiled, family, layout, slots, listed, late)
    for direction in (Direction.STORE, Direction.LOAD):
        cache[:], slots[:] = (rng.integers(0, 256, a.shape, np.uint8) for a in (cache, slots))
        expected_cache, expected_slots = cache.copy(), slots.copy()
        for region in layout.regions:
            for block, slot in pairs.tolist():
                first = region.address - storage.address + block * region.block_stride_bytes
                in_cache = slice(first, first + region.page_bytes)
                first = region.slot_offset_bytes
                in_slot = slice(first, first + region.page_bytes)
                if direction is Direction.STORE:
                    expected_slots[slot, in_slot] = cache[in_cache]
                else:
                    expected_cache[in_cache] = slots[slot, in_slot]
        launch(direction)
        np.testing.assert_array_equal(cache, expected_cache)
        np.testing.assert_array_equal(slots, expected_slots)


def _launch(
    compiled: Any, family: Any, layout: Any, slots: Any, listed: Any, late: bool, way: Direction
) -> None:
    shape = family.shapes[way]
    table, _ = cut_waves(layout, [range(len(layout.regions))], family, way)
    failed = compiled.launch(
        int(late),
        int(way is Direction.STORE),
        shape.ctas,
        shape.threads,
        ctypes.c_void_p(listed.ctypes.data),
        ctypes.c_void_p(table.ctypes.data),
        *table.shape[:2],
        ctypes.c_uint64(slots.ctypes.data),
        ctypes.c_uint64(layout.slot_bytes),
    )
    assert not failed, "threads wait for each other, or not for their copies"
