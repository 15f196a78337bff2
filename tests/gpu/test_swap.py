"""The swap kernels themselves, of every family that the device runs, and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("cupy", reason="CuPy, which compiles the kernels, is not installed")

from kv_swap.cuda import kernel_families  # noqa: E402
from kv_swap.cuda.kernel_families import KernelFamily, choose_family  # noqa: E402
from kv_swap.cuda.registrar import CudaRegistrar  # noqa: E402
from kv_swap.cuda.swap import LIST_BYTES, MAX_PAIRS, SwapKernel, write_list  # noqa: E402
from kv_swap.engine import Direction  # noqa: E402
from kv_swap.memory.arena import HostArena  # noqa: E402

from tests.gpu.test_cuda_engine import (  # noqa: E402
    KIB,
    LOAD,
    SHAPES,
    STORE,
    Cache,
    Pages,
    ids,
    make_arena,
    make_cache,
    random_pairs,
    randomize,
)

pytestmark = pytest.mark.gpu

FAMILIES = [
    family
    for family in kernel_families.FAMILIES
    if torch.cuda.get_device_capability() >= family.min_capability
]


def expect_copied(cache: Cache, pages: Pages, slots: Any, pairs: Any, way: Direction) -> Any:
    """The storage and the slots as they must be after the copy, both on the host."""
    storage, slots = cache.storage.cpu(), slots.clone()
    block_ids, slot_ids = ids(pairs)
    if way is STORE:
        slots[slot_ids] = cache.blocks()[block_ids]
        return storage, slots
    offset = 0
    for (_, stride), region in zip(pages, cache.layout.regions, strict=True):
        size = cache.layout.num_blocks * stride
        first = region.slot_offset_bytes
        tensor = storage[offset : offset + size].view(-1, stride)
        tensor[block_ids, : region.page_bytes] = slots[slot_ids, first : first + region.page_bytes]
        offset += size
    return storage, slots


class Bed:
    """A kernel, its cache and slots, and one list."""

    def __init__(self, pages: Pages, num_blocks: int, num_slots: int, family: KernelFamily) -> None:
        self.pages = pages
        self.cache = make_cache(num_blocks, pages)
        self.arena = make_arena(self.cache, num_slots)
        self.slots = torch.from_numpy(self.arena.view())
        device = self.cache.storage.device
        self.kernel = SwapKernel(self.cache.layout, self.arena, device, family)
        self.lists = HostArena(1, LIST_BYTES, register=CudaRegistrar(device))
        self.list = self.lists.view()[0]
        for direction in Direction:  # an empty list; CUDA loads a kernel when it first runs
            self.launch(direction)
        torch.cuda.synchronize()
        randomize(self.cache.storage, self.slots)

    def launch(self, direction: Direction) -> None:
        self.kernel.launch(direction, self.lists.address, torch.cuda.current_stream())

    def check(self, expected: Any) -> None:
        torch.cuda.synchronize()
        assert torch.equal(self.cache.storage.cpu(), expected[0])
        assert torch.equal(self.slots, expected[1])


def test_the_fastest_family_is_chosen() -> None:
    assert choose_family(torch.device("cuda", 0)) is FAMILIES[0]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("direction", [STORE, LOAD])
@pytest.mark.parametrize(("pages", "num_blocks", "count"), SHAPES)
def test_moves_exactly_the_bytes_of_the_pairs(
    pages: Pages, num_blocks: int, count: int, direction: Direction, family: KernelFamily
) -> None:
    count = min(count, MAX_PAIRS)
    bed = Bed(pages, num_blocks, count + 3, family)
    pairs = random_pairs(np.random.default_rng(count), num_blocks, count + 3, count)
    expected = expect_copied(bed.cache, pages, bed.slots, pairs, direction)
    write_list(bed.list, pairs)
    bed.launch(direction)
    bed.check(expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_random_layouts(family: KernelFamily) -> None:
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
            expected = expect_copied(bed.cache, pages, bed.slots, pairs, direction)
            write_list(bed.list, pairs)
            bed.launch(direction)
            bed.check(expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_graph_replays_100_lists_beside_a_captured_model(
    direction: Direction, family: KernelFamily
) -> None:
    pages = [(4 * KIB, 8 * KIB), (48, 64), (20 * KIB, 20 * KIB)]
    bed = Bed(pages, 64, 64, family)
    weights = torch.randn(8, 512, 512, device="cuda") / 16
    hidden = torch.randn(64, 512, device="cuda")
    compute, copies = torch.cuda.Stream(), torch.cuda.Stream()

    def forward() -> Any:
        value = hidden
        for weight in weights:
            value = torch.relu(value @ weight)
        return value

    torch.cuda.synchronize()  # weights and inputs were made on another stream
    with torch.cuda.stream(compute):
        reference = forward().clone()
    torch.cuda.synchronize()
    model, swap = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(model, stream=compute):
        output = forward()
    with torch.cuda.graph(swap, stream=copies):
        bed.launch(direction)
    rng = np.random.default_rng(3)
    for _ in range(100):
        randomize(bed.cache.storage, bed.slots)
        output.fill_(float("nan"))
        pairs = random_pairs(rng, 64, 64, int(rng.integers(0, 65)))
        expected = expect_copied(bed.cache, pages, bed.slots, pairs, direction)
        torch.cuda.synchronize()
        write_list(bed.list, pairs)
        with torch.cuda.stream(compute):
            model.replay()
        with torch.cuda.stream(copies):
            swap.replay()
        bed.check(expected)
        torch.testing.assert_close(output, reference)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("count", [-5, 1 << 30])
def test_a_count_out_of_range_stays_within_the_list(family: KernelFamily, count: int) -> None:
    bed = Bed([(64, 64)], 8, 8, family)
    before = bed.cache.storage.cpu()
    write_list(bed.list, np.zeros((MAX_PAIRS, 2), np.int32))
    bed.list.view(np.int32)[0] = count
    bed.launch(STORE)
    torch.cuda.synchronize()
    if count > 0:
        assert torch.equal(bed.slots[0], bed.cache.blocks()[0])
    assert torch.equal(bed.cache.storage.cpu(), before)
