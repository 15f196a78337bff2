"""The path of the copy engine over memory of the host: what it queues, where, and in which order.

A fake driver performs the copies when the test says so, stream by stream, as the streams' waits
allow.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Generator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_swap.cuda import dma
from kv_swap.cuda.copies import Copies, CopyMaker
from kv_swap.cuda.dma import (
    PIECE_BYTES,
    SLICE_BYTES,
    SLICE_COPIES,
    BatchCopier,
    DmaPath,
    SingleCopier,
)
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region

from tests.support.kv_memory import Storage, dense_strides

KIB, MIB = 1 << 10, 1 << 20


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class FakeTurns:
    """Notes the order of turns as `StreamTurns` makes it; refuses to be left unfinished."""

    def __init__(self) -> None:
        self.other = FakeStream(2)
        self.joined = 0

    def take(self, own: FakeStream) -> Generator[FakeStream, None, None]:
        try:
            while True:
                yield own
                yield self.other
        finally:
            self.joined += 1


class FakeCopier:
    """Copies at once, in memory of the host."""

    call = "cuMemcpyBatchAsync"

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        self.failing: int | None = None
        self.current = False

    @contextlib.contextmanager
    def device(self) -> Generator[None, None, None]:
        self.current = True
        yield
        self.current = False

    def copy(self, copies: Copies, first: int, end: int, stream: int) -> None:
        assert self.current
        assert copies.flags.c_contiguous
        if len(self.batches) == self.failing:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        self.batches.append((stream, copies[2, first:end].tolist()))
        for destination, source, nbytes in copies[:, first:end].T.tolist():
            ctypes.memmove(destination, source, nbytes)


def make_path(
    direction: Direction, layout: KVLayout, arena_address: int, boundary_bytes: int
) -> tuple[DmaPath, FakeCopier, FakeTurns]:
    copier, turns = FakeCopier(), FakeTurns()
    maker = CopyMaker(layout, arena_address, boundary_bytes, PIECE_BYTES)
    return DmaPath(direction, maker, copier, turns), copier, turns  # type: ignore[arg-type]


def run(path: DmaPath, pairs: np.ndarray) -> int:
    slices = list(path.slices(pairs, in_waves=False))
    for part in slices:
        path.queue(part, FakeStream(1))  # type: ignore[arg-type]
    return len(slices)


@settings(max_examples=60, deadline=None)
@given(
    direction=st.sampled_from(list(Direction)),
    pages=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    count=st.integers(1, 200),
    scattered=st.booleans(),
    boundary=st.integers(1, 300),
)
def test_bytes_arrive_where_they_belong_and_nowhere_else(
    direction: Direction, pages: list[int], count: int, scattered: bool, boundary: int
) -> None:
    rng = np.random.default_rng(count)
    num_blocks = num_slots = count + 3
    storage = Storage(sum(pages) * 16 * num_blocks)
    tensors, offset = [], 0
    for index, sixteens in enumerate(pages):
        shape = (num_blocks, 16 * sixteens)
        strides = dense_strides(shape, (0, 1), 1)
        tensors.append(
            storage.describe(f"{index}", num_blocks, shape, strides, block_dim=0, offset=offset)
        )
        offset += num_blocks * 16 * sixteens
    layout = KVLayout.from_tensors(num_blocks, tensors)
    storage.data[:] = rng.integers(0, 256, len(storage.data))
    arena = rng.integers(0, 256, (num_slots, layout.slot_bytes)).astype(np.uint8)
    chosen = [rng.permutation(count) if scattered else np.arange(count) for _ in range(2)]
    pairs = np.stack((chosen[0] + 1, chosen[1] + 2), 1).astype(np.int32)

    expected_data, expected_arena = storage.data.copy(), arena.copy()
    for block, slot in pairs.tolist():
        for region in layout.regions:
            first = region.address - storage.address + block * region.block_stride_bytes
            page = slice(first, first + region.page_bytes)
            part = slice(region.slot_offset_bytes, region.slot_offset_bytes + region.page_bytes)
            if direction is Direction.LOAD:
                expected_data[page] = arena[slot, part]
            else:
                expected_arena[slot, part] = storage.data[page]

    path, _, _ = make_path(direction, layout, arena.ctypes.data, 16 * boundary)
    run(path, pairs)
    np.testing.assert_array_equal(storage.data, expected_data)
    np.testing.assert_array_equal(arena, expected_arena)


def unqueued(layout: KVLayout, direction: Direction = Direction.STORE) -> DmaPath:
    """A path whose slices are looked at and never queued."""
    return make_path(direction, layout, 1 << 40, 1 << 30)[0]


def one_region(page_bytes: int) -> KVLayout:
    return KVLayout(1 << 20, (Region(1 << 50, page_bytes, page_bytes, 0),))


def shuffled(count: int) -> np.ndarray:
    """Pairs of which no two are adjacent."""
    return np.stack([2 * np.arange(count), 2 * np.arange(count)[::-1]], 1).astype(np.int32)


@pytest.mark.parametrize(
    ("page_bytes", "copies"),
    [(16, SLICE_COPIES), (MIB, 64), (2 * MIB, 32), (9 * MIB, 21), (1 << 30, 16)],
)
def test_slices_are_bounded_in_copies_and_bytes(page_bytes: int, copies: int) -> None:
    path = unqueued(one_region(page_bytes))
    slices = [part for _, part in path.slices(shuffled(100), in_waves=False)]
    assert len(slices[0][2]) == copies
    assert all(part.shape[1] <= SLICE_COPIES for part in slices)
    assert all(part[2].sum() <= SLICE_BYTES for part in slices)
    assert sum(int(part[2].sum()) for part in slices) == 100 * page_bytes


def test_a_long_job_is_cut_as_it_goes() -> None:
    regions = tuple(Region(i << 40, 4096, 4096, i * 4096) for i in range(1, 33))
    path = unqueued(KVLayout(1 << 20, regions))
    cut: list[int] = []
    maker = path._maker

    class Watching:
        layout = maker.layout

        def copies(self, direction: Direction, pairs: np.ndarray) -> Copies:
            cut.append(len(pairs))
            return maker.copies(direction, pairs)

    path._maker = Watching()  # type: ignore[assignment]
    slices = path.slices(shuffled(10_000), in_waves=False)
    next(slices)
    assert cut == [8]
    assert 1 + sum(1 for _ in slices) == 10_000 * 32 // SLICE_COPIES
    assert cut == [8] * 1250


def test_pieces_take_turns_and_are_joined() -> None:
    page_bytes = PIECE_BYTES // 2
    source = np.zeros((14, page_bytes), np.uint8)
    arena = np.zeros((14, page_bytes), np.uint8)
    layout = KVLayout(14, (Region(source.ctypes.data, page_bytes, page_bytes, 0),))
    path, copier, turns = make_path(Direction.STORE, layout, arena.ctypes.data, 1 << 40)
    assert run(path, shuffled(7)) == 1
    assert copier.batches == [
        (1, [page_bytes] * 2),
        (2, [page_bytes] * 2),
        (1, [page_bytes] * 2),
        (2, [page_bytes]),
    ]
    assert turns.joined == 1
    copier.failing = 6
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        run(path, shuffled(7))
    assert turns.joined == 2


# -- the copiers, over a driver that stands in for CUDA ----------------------------------------


class FakeDevice:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class FakeRuntime:
    memcpyDefault = 4  # noqa: N815

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def memcpyAsync(  # noqa: N802
        self, destination: int, source: int, nbytes: int, kind: int, stream: int
    ) -> None:
        if nbytes == 48:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        self.calls.append((destination, source, nbytes, kind, stream))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the copiers use of CuPy."""
    fake: Any = ModuleType("cupy")
    fake.cuda = ModuleType("cupy.cuda")
    fake.cuda.Device = FakeDevice
    fake.cuda.runtime = FakeRuntime()
    fake.cuda.driver = ModuleType("cupy.cuda.driver")
    fake.cuda.driver.CUDADriverError = lambda code: f"CUDA_ERROR_{code}: as CUDA words it"
    monkeypatch.setattr(dma, "import_cupy", lambda: fake)
    monkeypatch.setattr(dma, "device_index", lambda device: 0)
    return fake


def fake_bindings(monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


class FakeDriver:
    """cuda-bindings whose driver has one function: it copies, or fails at `failing`."""

    def __init__(self, status: int = 0, found: bool = True) -> None:
        self.status = status
        self.failing: int | None = None
        self.all_failing = False
        self.streams: list[int] = []

        def copy(dsts: int, srcs: int, sizes: int, count: int, *rest: Any) -> int:
            attributes, first_copy, num_attributes, failed, stream = rest
            assert np.frombuffer(ctypes.string_at(attributes, 24), np.uint32).tolist() == [
                1,
                *[0] * 5,
            ]
            assert ctypes.c_size_t.from_address(first_copy).value == 0
            assert num_attributes == 1
            self.streams.append(stream)
            failing = ctypes.c_size_t.from_address(failed)
            if self.all_failing:
                failing.value = 2**64 - 1
                return 700
            columns = [
                np.frombuffer(ctypes.string_at(a, 8 * count), np.uint64).tolist()
                for a in (dsts, srcs, sizes)
            ]
            for index, (destination, source, nbytes) in enumerate(zip(*columns, strict=True)):
                if index == self.failing:
                    failing.value = index
                    return 1
                ctypes.memmove(destination, source, nbytes)
            return 0

        self._function = dma._BatchFunction(copy)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        self.address = address if found else 0

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, Any, int]:  # noqa: N802
        assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
        return self.status, self.address, 0


def some_copies() -> tuple[np.ndarray, np.ndarray, Copies]:
    source = np.arange(4 * 64, dtype=np.uint8)
    destination = np.zeros_like(source)
    offsets = np.arange(4) * 64
    copies = np.stack(
        [destination.ctypes.data + offsets, source.ctypes.data + offsets, [64, 16, 48, 64]]
    )
    return source, destination, copies


def test_the_batch_call_gets_the_arrays(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    fake_bindings(monkeypatch, driver)
    copier = dma.make_copier(None)  # type: ignore[arg-type]
    assert isinstance(copier, BatchCopier)
    source, destination, copies = some_copies()
    with copier.device():
        copier.copy(copies, 1, 3, 77)
    expected = np.zeros_like(source)
    expected[64:80], expected[128:176] = source[64:80], source[128:176]
    np.testing.assert_array_equal(destination, expected)
    assert driver.streams == [77]


def test_a_failed_batch_names_code_copy_and_bytes(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    fake_bindings(monkeypatch, driver)
    copier = BatchCopier(None)  # type: ignore[arg-type]
    _, _, copies = some_copies()
    driver.failing = 1
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_1: .* \(at copy 1 of 3, 128 bytes\)"):
        copier.copy(copies, 1, 4, 77)
    driver.all_failing = True
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_700: .* \(for all copies, 128 bytes\)"):
        copier.copy(copies, 1, 4, 77)


@pytest.mark.parametrize("driver", [None, FakeDriver(status=500), FakeDriver(found=False)])
def test_without_the_batch_call_copies_are_single(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None
) -> None:
    if driver is None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    else:
        fake_bindings(monkeypatch, driver)
    with pytest.raises(LookupError):
        BatchCopier(None)  # type: ignore[arg-type]
    copier = dma.make_copier(None)  # type: ignore[arg-type]
    assert isinstance(copier, SingleCopier)
    _, _, copies = some_copies()
    copier.copy(copies, 0, 2, 77)
    first, second = copies[:, :2].T.tolist()
    assert cupy.cuda.runtime.calls == [(*first, 4, 77), (*second, 4, 77)]
    with pytest.raises(RuntimeError, match=r"cudaErrorInvalidValue: .* \(one copy of 48 bytes\)"):
        copier.copy(copies, 2, 4, 77)
