"""Packed layouts on a played device: which kernels run, over which tables, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

from kv_swap.cuda import state, swap  # noqa: E402
from kv_swap.cuda.device import CudaRegistrar  # noqa: E402
from kv_swap.cuda.engine import CudaSwapEngine  # noqa: E402
from kv_swap.cuda.kernel_families import (  # noqa: E402
    BULK,
    BULK_SMALL,
    PACKED,
    VECTOR,
    families_of,
)
from kv_swap.engine import Completion, Direction, SwapJob  # noqa: E402
from kv_swap.errors import CopyError, DeviceError  # noqa: E402
from kv_swap.layout import Packing  # noqa: E402
from kv_swap.memory.arena import HostArena  # noqa: E402
from kv_swap.packing.slots import SlotPacker  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from tests.support.packed_kv import PackedCache, packed_cache  # noqa: E402

KIB = 1 << 10
LOAD, STORE = Direction.LOAD, Direction.STORE
DEVICE = torch.device("cuda", 0)
BLOCKS, SLOTS = 14, 8
PAGES = [32 * KIB + 48, 8 * KIB, 64 * KIB, 512, 32 * KIB]
PACKINGS = [Packing(24), Packing(16), Packing(8, 256), None, Packing(128)]


class Bed(PackedCache):
    """An engine over one layout."""

    def __init__(self, pages: list[int] = PAGES, packings: list[Packing | None] = PACKINGS) -> None:
        super().__init__(BLOCKS, pages, packings)
        arena = HostArena(SLOTS, self.layout.slot_bytes, register=CudaRegistrar(DEVICE))
        self.slots = arena.view()
        self.engine = CudaSwapEngine(self.layout, arena, DEVICE, [self.storage])

    def packed(self, blocks: list[int]) -> NDArray[np.uint8]:
        slots = np.zeros((len(blocks), self.layout.slot_bytes), np.uint8)
        pages = {i: page[blocks] for i, page in enumerate(self.pages())}
        SlotPacker(self.layout).pack(pages, slots)
        return slots

    def submit(self, direction: Direction, pairs: list[tuple[int, int]], **how: bool) -> None:
        self.engine.submit(SwapJob(1, direction, np.array(pairs, np.int32), **how))


def one(completions: list[Completion]) -> Completion:
    (done,) = completions
    return done


def test_slots_are_packed_and_blocks_come_back(cuda):
    bed = Bed()
    cuda.calls.clear()
    bed.submit(STORE, [(3, 5), (0, 2)])
    assert [name for name, _ in cuda.calls].count("launchKernel") == 2  # packed, and raw
    cuda.run()
    done = one(bed.engine.poll())
    assert (done.error, done.refused_rows) == (None, ())
    assert done.nbytes == 2 * bed.layout.block_bytes
    np.testing.assert_array_equal(bed.slots[[5, 2]], bed.packed([3, 0]))
    bed.submit(LOAD, [(9, 2), (10, 5)])
    bed.submit(LOAD, [(11, 5)], before_compute=True)
    cuda.run()
    assert [done.error for done in bed.engine.poll()] == [None, None]
    bed.check([(9, 0), (10, 3), (11, 3)])


def test_where_all_is_packed_one_kernel_runs(cuda):
    bed = Bed([32 * KIB] * 2, [Packing(16)] * 2)
    cuda.calls.clear()
    bed.submit(STORE, [(3, 5)])
    assert [name for name, _ in cuda.calls].count("launchKernel") == 1
    cuda.run()
    np.testing.assert_array_equal(bed.slots[5], bed.packed([3])[0])


def test_rows_that_are_refused_are_named_whatever_the_slices(cuda, monkeypatch):
    """Also where an entry of the ring serves one slice after another."""
    monkeypatch.setattr(swap, "RING_ENTRIES", 2)
    bed = Bed()
    monkeypatch.setattr(swap, "SLICE_BYTES", 3 * bed.layout.block_bytes)
    for block in (1, 5, 6):
        bed.spoil(block)
    bed.spoil(2, num_tiles=1)
    for first, refused in ((0, (1, 5, 6)), (7, ()), (0, (1, 5, 6))):
        bed.submit(STORE, [(first + i, i) for i in range(7)])
        found: list[Completion] = []
        while not found:
            cuda.run()
            found = bed.engine.poll()
        assert (one(found).error, one(found).refused_rows) == (None, refused)
    np.testing.assert_array_equal(bed.slots[[0, 2, 3, 4]], bed.packed([0, 2, 3, 4]))


def test_waves_move_what_is_packed_and_what_is_not(cuda):
    bed = Bed()
    bed.submit(STORE, [(3, 5), (0, 2)])
    cuda.run()
    one(bed.engine.poll())
    bed.engine.set_waves([[4], [3, 1], [2, 0]])
    cuda.calls.clear()
    bed.submit(LOAD, [(9, 2), (10, 5)], before_compute=True, in_waves=True)
    # Only what a wave has: packed tiles, raw pages, and both.
    assert [name for name, _ in cuda.calls].count("launchKernel") == 4
    cuda.run()
    bed.engine.await_wave(2)
    done = one(bed.engine.poll())
    assert (done.error, done.nbytes) == (None, 2 * bed.layout.block_bytes)
    bed.check([(9, 0), (10, 3)])


def test_a_load_at_once_unpacks_on_the_host(cuda, monkeypatch):
    bed = Bed()
    monkeypatch.setattr("kv_swap.cuda.engine._UNPACKED_BYTES", bed.layout.block_bytes)
    bed.submit(STORE, [(3, 5), (0, 2)])
    cuda.run()
    cuda.calls.clear()
    bed.engine.load_now(np.array([[9, 2], [10, 5]], np.int32))
    assert "launchKernel" not in [name for name, _ in cuda.calls]
    bed.check([(9, 0), (10, 3)])
    with pytest.raises(CopyError, match="holds no packed KV"):
        bed.engine.load_now(np.array([[9, 1]], np.int32))


def test_a_launch_that_fails_behind_another_leaves_its_list_alone(cuda, monkeypatch):
    """The first kernel of the slice runs, and must find its pairs."""
    bed = Bed()
    launch, launches = swap.SwapKernel.launch, []

    def fail_second(*arguments: Any) -> None:
        launches.append(arguments)
        if len(launches) == 2:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        launch(*arguments)

    monkeypatch.setattr(swap.SwapKernel, "launch", fail_second)
    bed.submit(STORE, [(3, 5)])
    bed.submit(STORE, [(0, 2)])
    cuda.run()
    failed, done = bed.engine.poll()
    assert isinstance(failed.error, CopyError)
    assert done.error is None
    packed = bed.layout.regions[0]
    end = packed.slot_offset_bytes + 2 * 12672
    np.testing.assert_array_equal(bed.slots[5, :end], bed.packed([3])[0, :end])


@pytest.mark.parametrize("family", [VECTOR, BULK_SMALL])
def test_packing_is_refused_where_nothing_can_pack(cuda, family, monkeypatch):
    monkeypatch.setattr(state, "choose_family", lambda device: family)
    needed = r"capability 9\.0 and newer with \d+ bytes of shared memory"
    with pytest.raises(DeviceError, match=f"{needed}.* has less: do not pack"):
        Bed()


def test_the_families_of_a_layout(cuda):
    mixed, raw, whole = (
        packed_cache(2, pages, packings)[0]
        for pages, packings in (
            (PAGES, PACKINGS),
            (PAGES, [None] * 5),
            ([32 * KIB], [Packing(16)]),
        )
    )
    assert families_of(mixed, BULK) == [PACKED, BULK]
    assert families_of(whole, BULK) == [PACKED]
    assert families_of(raw, BULK) == [BULK]
    assert families_of(raw, VECTOR) == [VECTOR]
    with pytest.raises(DeviceError, match=r"runs no copy kernel: .* 7\.5 or newer"):
        families_of(raw, None)
