"""KV caches in NumPy memory for the tests: storages, strided tensors, and who owns each byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, TensorDescription
from numpy.typing import NDArray

NOBODY = -1


class Storage:
    """`nbytes` zero bytes at an aligned address, in which tensors are described."""

    def __init__(self, nbytes: int) -> None:
        raw = np.zeros(nbytes + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        self.data: NDArray[np.uint8] = raw[start : start + nbytes]
        self._described: list[tuple[int, tuple[int, ...], tuple[int, ...], NDArray[np.int64]]] = []

    def owners(self) -> NDArray[np.int32]:
        """Return the block that owns each byte."""
        found = np.full(len(self.data), NOBODY, np.int32)
        for offset, shape, strides, blocks in self._described:
            np.ndarray(shape, np.int32, found, 4 * offset, strides)[...] = blocks
        return found

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def describe(
        self,
        name: str,
        num_blocks: int,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        block_dim: int = 0,
        page_bytes: int | None = None,
        itemsize: int = 1,
        offset: int = 0,
    ) -> TensorDescription:
        """Describe a tensor at `offset`, whose bytes are their block's."""
        kernel_blocks = shape[block_dim] // num_blocks
        blocks = np.arange(shape[block_dim]) // max(kernel_blocks, 1)
        along = [-1 if d == block_dim else 1 for d in range(len(shape) + 1)]
        marked = tuple(4 * stride for stride in (*strides, 1))
        self._described.append((offset, (*shape, itemsize), marked, blocks.reshape(along)))
        if page_bytes is None:
            page_bytes = math.prod(shape) * itemsize // num_blocks
        return TensorDescription(
            name,
            self.address + offset,
            tuple(shape),
            tuple(strides),
            itemsize,
            block_dim,
            page_bytes,
        )


def layered_cache(
    num_layers: int, num_blocks: int, page_bytes: int
) -> tuple[KVLayout, Storage, NDArray[np.uint8]]:
    """Return layers one after the other, each a region, and the pages `(layers, blocks, bytes)`."""
    layer_bytes = num_blocks * page_bytes
    storage = Storage(num_layers * layer_bytes)
    shape, strides = (num_blocks, page_bytes), (page_bytes, 1)
    tensors = [
        storage.describe(f"layer.{i}", num_blocks, shape, strides, offset=i * layer_bytes)
        for i in range(num_layers)
    ]
    layout = KVLayout.from_tensors(num_blocks, tensors)
    assert len(layout.regions) == num_layers
    return layout, storage, storage.data.reshape(num_layers, num_blocks, page_bytes)


def dense_strides(sizes: Sequence[int], order: Sequence[int], itemsize: int) -> list[int]:
    """Return byte strides of axes with `sizes`, laid out in memory `order`, outermost first."""
    strides = [0] * len(sizes)
    step = itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return strides


def region_bytes(layout: KVLayout, storage: Storage, block: int) -> NDArray[np.int64]:
    """Return the offsets in `storage` of all bytes of `block`, in the order of its slot."""
    runs = []
    expected_offset = 0
    for region in layout.regions:
        assert region.slot_offset_bytes == expected_offset
        expected_offset += region.page_bytes
        start = region.address - storage.address + block * region.block_stride_bytes
        runs.append(np.arange(start, start + region.page_bytes))
    assert expected_offset == layout.slot_bytes
    return np.concatenate(runs)


def expect_copied(
    layout: KVLayout,
    storage: Storage,
    slots: NDArray[np.uint8],
    direction: Direction,
    pairs: Iterable[tuple[int, int]],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return what `storage` and `slots` must hold after copying (block, slot) `pairs`."""
    data, copied = storage.data.copy(), slots.copy()
    for block, slot in pairs:
        offsets = region_bytes(layout, storage, block)
        if direction is Direction.LOAD:
            data[offsets] = slots[slot]
        else:
            copied[slot] = storage.data[offsets]
    return data, copied


def check_exact(layout: KVLayout, storage: Storage, *, padding: bool = False) -> None:
    """Assert that each block's regions hold exactly its bytes, each once.

    With `padding`, bytes that no tensor describes may be copied too, each with one block only.
    """
    taken = np.full(len(storage.data), NOBODY, np.int32)
    for block in range(layout.num_blocks):
        offsets = region_bytes(layout, storage, block)
        assert len(np.unique(offsets)) == len(offsets) == layout.slot_bytes
        assert (taken[offsets] == NOBODY).all()
        taken[offsets] = block
    owners = storage.owners()
    described = owners != NOBODY
    np.testing.assert_array_equal(taken[described], owners[described])
    if not padding:
        assert (taken[~described] == NOBODY).all()
