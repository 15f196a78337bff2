"""Copies of a packed layout on the host, through whole slots in memory of the worker.

A few blocks are copied at a time, so that the memory is limited to one slice, and a load waits for
at most one slice of a store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_swap.engine import Direction
from kv_swap.host import transfers
from kv_swap.host.transfers import Run
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
    """Copy some regions of `pairs`, a slice at a time; yield the rows that each slice refused.

    A store copies all regions. Raises `OSError` for an address that is not mapped, `ValueError` for
    a slot without tiles.
    """
    layout = packer.layout
    chosen = {index: layout.regions[index] for index in regions}
    parts = [(0, slot_bytes)]
    if direction is Direction.LOAD:
        parts = [(region.slot_offset_bytes, region.slot_page_bytes) for region in chosen.values()]
        parts.append((layout.pool_offset_bytes, layout.pool_entries * POOL_ENTRY_BYTES))
    step = max(1, transfers.SLICE_BYTES // layout.block_bytes)
    for first in range(0, len(pairs), step):
        blocks, numbers = pairs[first : first + step].T
        pages = {i: np.empty((len(blocks), r.page_bytes), np.uint8) for i, r in chosen.items()}
        slots = np.zeros((len(blocks), slot_bytes), np.uint8)
        arena = arena_address + numbers * slot_bytes
        in_cache = [
            run
            for index, region in chosen.items()
            for run in _runs(pages[index], region.address + blocks * region.block_stride_bytes)
        ]
        in_arena = [
            run
            for offset, nbytes in parts
            for run in _runs(slots[:, offset : offset + nbytes], arena + offset)
        ]
        if direction is Direction.STORE:
            transfers.copy_runs(in_cache)
            refused = packer.pack(pages, slots)
            transfers.copy_runs(_back(in_arena))
            yield (first + np.flatnonzero(refused)).tolist()
        else:
            transfers.copy_runs(in_arena)
            packer.unpack(slots, pages)
            transfers.copy_runs(_back(in_cache))
            yield ()


def _runs(rows: NDArray[np.uint8], addresses: NDArray[np.int64]) -> list[Run]:
    """Return runs that copy from addresses into the rows of an array."""
    first, stride = rows.ctypes.data, rows.strides[0]
    nbytes = rows.shape[1]
    return [(first + i * stride, a, nbytes) for i, a in enumerate(addresses.tolist())]


def _back(runs: list[Run]) -> list[Run]:
    return [(source, to, nbytes) for to, source, nbytes in runs]
