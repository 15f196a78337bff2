"""Copies of a packed layout on the host: blocks go through whole slots in memory of the worker.

A few blocks at a time, so that no more memory is needed than a slice has, and a load waits for no
more than one slice of a store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_swap.engine import Direction
from kv_swap.host import transfers
from kv_swap.host.transfers import Run
from kv_swap.layout import KVLayout
from kv_swap.packing.format import POOL_ENTRY_BYTES
from kv_swap.packing.slots import SlotPacker


def copy_packed(
    packer: SlotPacker,
    regions: Sequence[int],
    slot_bytes: int,
    arena_address: int,
    direction: Direction,
    pairs: NDArray[np.int64],
) -> Iterator[Sequence[int]]:
    """Copy some regions of `pairs`, a slice at a time; yield the rows that a slice refused.

    A store has all regions. Raises `OSError` for an address that is not mapped, `ValueError` for a
    slot that holds no tiles.
    """
    layout = packer.layout
    step = max(1, transfers.SLICE_BYTES // layout.block_bytes)
    for first in range(0, len(pairs), step):
        part = pairs[first : first + step]
        slots = np.zeros((len(part), slot_bytes), np.uint8)
        arena = arena_address + part[:, 1] * slot_bytes
        if direction is Direction.STORE:
            refused = _store(packer, part[:, 0], slots, arena)
            yield (first + np.flatnonzero(refused)).tolist()
        else:
            _load(packer, regions, part[:, 0], slots, arena)
            yield ()


def _store(
    packer: SlotPacker,
    blocks: NDArray[np.int64],
    slots: NDArray[np.uint8],
    arena: NDArray[np.int64],
) -> NDArray[np.bool_]:
    layout = packer.layout
    pages = _make_pages(layout, range(len(layout.regions)), len(blocks))
    transfers.copy_runs(
        [
            run
            for index, page in pages.items()
            for run in _runs(page, _page_addresses(layout, index, blocks))
        ]
    )
    refused = packer.pack(pages, slots)
    transfers.copy_runs([(to, source, nbytes) for source, to, nbytes in _runs(slots, arena)])
    return refused


def _load(
    packer: SlotPacker,
    regions: Sequence[int],
    blocks: NDArray[np.int64],
    slots: NDArray[np.uint8],
    arena: NDArray[np.int64],
) -> None:
    layout = packer.layout
    chosen = [layout.regions[index] for index in regions]
    parts = [(region.slot_offset_bytes, region.slot_page_bytes) for region in chosen]
    parts.append((layout.pool_offset_bytes, layout.pool_entries * POOL_ENTRY_BYTES))
    transfers.copy_runs(
        [
            run
            for offset, nbytes in parts
            for run in _runs(slots[:, offset : offset + nbytes], arena + offset)
        ]
    )
    pages = _make_pages(layout, regions, len(blocks))
    packer.unpack(slots, pages)
    transfers.copy_runs(
        [
            (to, source, nbytes)
            for index, page in pages.items()
            for source, to, nbytes in _runs(page, _page_addresses(layout, index, blocks))
        ]
    )


def _make_pages(
    layout: KVLayout, regions: Sequence[int], num_blocks: int
) -> dict[int, NDArray[np.uint8]]:
    return {i: np.empty((num_blocks, layout.regions[i].page_bytes), np.uint8) for i in regions}


def _page_addresses(layout: KVLayout, index: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    region = layout.regions[index]
    addresses: NDArray[np.int64] = region.address + blocks * region.block_stride_bytes
    return addresses


def _runs(rows: NDArray[np.uint8], addresses: NDArray[np.int64]) -> list[Run]:
    """Return the runs from addresses into the rows of an array."""
    first, stride = rows.ctypes.data, rows.strides[0]
    nbytes = rows.shape[1]
    return [(first + i * stride, a, nbytes) for i, a in enumerate(addresses.tolist())]
