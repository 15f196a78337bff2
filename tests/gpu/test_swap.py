"""The swap kernels of every family that the device runs, also in CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kv_swap.cuda import kernel_families
from kv_swap.cuda.device import CudaRegistrar
from kv_swap.cuda.kernel_families import KernelFamily, can_run, choose_family
from kv_swap.cuda.swap import LIST_BYTES, MAX_PAIRS, SwapKernel, write_list
from kv_swap.engine import Direction
from kv_swap.memory.arena import HostArena

from tests.gpu.caches import (
    LOAD,
    STORE,
    Pages,
    expect_copied,
    make_arena,
    make_cache,
    random_pairs,
    randomize,
    torch,
)

FAMILIES = [
    family for family in kernel_families.FAMILIES if can_run(family, torch.device("cuda", 0))
]


class Bed:
    """A kernel, its cache and slots, and one list."""

    def __init__(self, pages: Pages, num_blocks: int, num_slots: int, family: KernelFamily) -> None:
        self.cache = make_cache(num_blocks, pages)
        self.arena = make_arena(self.cache, num_slots)
        self.slots = torch.from_numpy(self.arena.view())
        device = self.cache.storage.device
        self.kernels = {
            direction: SwapKernel(self.cache.layout, self.arena, device, family, direction)
            for direction in Direction
        }
        self.lists = HostArena(1, LIST_BYTES, register=CudaRegistrar(device))
        self.list = self.lists.view()[0]
        for direction in Direction:  # an empty list; CUDA loads a kernel when it first runs
            self.launch(direction)
        torch.cuda.synchronize()
        randomize(self.cache.storage, self.slots)

    def launch(self, direction: Direction) -> None:
        self.kernels[direction].launch(self.lists.address, torch.cuda.current_stream())

    def check(self, expected: Any) -> None:
        torch.cuda.synchronize()
        assert torch.equal(self.cache.storage.cpu(), expected[0])
        assert torch.equal(self.slots, expected[1])


def test_the_fastest_family_is_chosen():
    assert choose_family(torch.device("cuda", 0)) is FAMILIES[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_random_layouts(family):
    rng = np.random.default_rng(11)
    for _ in range(25):
        pages: Pages = []
        for _ in range(int(rng.integers(1, 40))):
            page_bytes = 16 * int(2 ** rng.uniform(0, 12))
            pages.append((page_bytes, page_bytes + 16 * int(rng.integers(0, 9))))
        bed = Bed(pages, 40, 30, family)
        count = int(rng.integers(1, 31))
        for direction in (STORE, LOAD):
            pairs = random_pairs(rng, 40, 30, count)
            expected = expect_copied(bed.cache, bed.slots, pairs, direction)
            write_list(bed.list, pairs)
            bed.launch(direction)
            bed.check(expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("count", [-5, 1 << 30])
def test_a_count_out_of_range_stays_within_the_list(family, count):
    bed = Bed([(64, 64)], 8, 8, family)
    before = bed.cache.storage.cpu()
    write_list(bed.list, np.zeros((MAX_PAIRS, 2), np.int32))
    bed.list.view(np.int32)[0] = count
    bed.launch(STORE)
    torch.cuda.synchronize()
    if count > 0:
        assert torch.equal(bed.slots[0], bed.cache.blocks()[0])
    assert torch.equal(bed.cache.storage.cpu(), before)
