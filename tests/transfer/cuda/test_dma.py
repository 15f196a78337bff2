"""The path of the copy engine over memory of the host, with a CUDA that copies at once."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_swap.cuda import dma
from kv_swap.cuda.dma import SLICE_BYTES, SLICE_COPIES, Copier, DmaPath
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region

from tests.support.kv_memory import Storage, expect_copied

MIB = 1 << 20
STREAM: Any = SimpleNamespace(cuda_stream=77)


class Runtime:
    """Notes each copy and makes it; refuses those to address 1."""

    memcpyDefault = 4  # noqa: N815

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.current = False

    @contextlib.contextmanager
    def device(self, index: int) -> Any:
        assert index == 0
        self.current = True
        try:
            yield
        finally:
            self.current = False

    def memcpyAsync(self, *arguments: int) -> None:  # noqa: N802
        destination, source, nbytes, kind, stream = arguments
        assert self.current
        assert (kind, stream) == (4, 77)
        if destination == 1:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        self.copies.append((destination, source, nbytes))
        ctypes.memmove(destination, source, nbytes)


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Any:
    made = Runtime()
    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=made, Device=made.device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dma, "import_cupy", lambda: fake)
        patch.setattr(dma, "device_index", lambda device: 0)
        yield made


def make_path(
    direction: Direction, layout: KVLayout, address: int, piece_bytes: int = 1 << 30
) -> DmaPath:
    arena: Any = SimpleNamespace(
        address=address, slot_bytes=layout.slot_bytes, piece_bytes=piece_bytes
    )
    return DmaPath(direction, layout, arena, None)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    direction=st.sampled_from(list(Direction)),
    pages=st.lists(st.integers(4, 12), min_size=1, max_size=5),
    count=st.integers(1, 200),
    piece=st.integers(1, 300),
)
def test_bytes_arrive_where_they_belong_and_nowhere_else(
    runtime: Runtime, direction: Direction, pages: list[int], count: int, piece: int
) -> None:
    rng = np.random.default_rng(count)
    num_blocks = num_slots = count + 3
    sizes = [16 * sixteens for sixteens in pages]
    storage = Storage(num_blocks * sum(sizes))
    tensors = [
        storage.describe(
            f"{index}",
            num_blocks,
            (num_blocks, page_bytes),
            (page_bytes, 1),
            offset=num_blocks * sum(sizes[:index]),
        )
        for index, page_bytes in enumerate(sizes)
    ]
    layout = KVLayout.from_tensors(num_blocks, tensors)
    storage.data[:] = rng.integers(0, 256, len(storage.data))
    arena = rng.integers(0, 256, (num_slots, layout.slot_bytes)).astype(np.uint8)
    pairs = np.stack([rng.permutation(num_blocks)[:count] for _ in range(2)], 1).astype(np.int32)
    expected_data, expected_arena = expect_copied(layout, storage, arena, direction, pairs.tolist())
    piece_bytes = 64 * piece
    path = make_path(direction, layout, arena.ctypes.data, piece_bytes)
    runtime.copies.clear()
    for part in path.slices(pairs, in_waves=False):
        path.queue(part, STREAM)
    np.testing.assert_array_equal(storage.data, expected_data)
    np.testing.assert_array_equal(arena, expected_arena)
    for destination, source, nbytes in runtime.copies:
        host = source if direction is Direction.LOAD else destination
        first = host - arena.ctypes.data
        assert first // piece_bytes == (first + nbytes - 1) // piece_bytes


@pytest.mark.parametrize(
    ("page_bytes", "first", "copies"),
    [(16, 64, 100), (MIB, 64, 100), (2 * MIB, 32, 100), (9 * MIB, 7, 100), (1 << 30, 1, 1600)],
)
def test_slices_are_bounded_in_copies_and_bytes(page_bytes: int, first: int, copies: int) -> None:
    layout = KVLayout(1 << 20, (Region(1 << 50, page_bytes, page_bytes, 0),))
    path = make_path(Direction.STORE, layout, 1 << 40)
    pairs = np.stack([np.arange(100)] * 2, 1).astype(np.int32)
    slices = [part for _, part in path.slices(pairs, in_waves=False)]
    assert len(slices[0]) == first
    assert all(0 < len(part) <= SLICE_COPIES for part in slices)
    assert all(sum(nbytes for *_, nbytes in part) <= SLICE_BYTES for part in slices)
    assert sum(map(len, slices)) == copies


def test_a_failed_copy_names_its_bytes(runtime: Runtime) -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    runtime.copies.clear()
    good = (target.ctypes.data, source.ctypes.data, 16)
    with pytest.raises(RuntimeError, match=r"cudaErrorInvalidValue: .* \(one copy of 48 bytes\)"):
        Copier(None).copy([good, (1, 2, 48)], STREAM)  # type: ignore[arg-type]
    assert runtime.copies == [good]
    assert target.tolist() == [*range(16), *[0] * 48]
