"""Cuts slots, or the waves of a load, into tiles, all of which a launch copies for every pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.kernel_families import KernelFamily, LaunchShape
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import PinnedRegistrar
from kv_swap.packing.format import TILE_GROUPS, TileColumns
from kv_swap.packing.slots import place_tiles

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

_SEGMENT_BYTES = 32
"""Bytes of a table row, for raw and packed tiles."""

_COLUMNS_ORDER = np.arange(TILE_GROUPS).reshape(4, 256).T.ravel()
"""The order of groups of values in the packing kernels: 4 per thread, thread by thread."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A range of rows of a table on the device."""

    address: int
    num_tiles: int
    segments_per_tile: int


def cut_tiles(
    waves: Sequence[Sequence[Region]], shape: LaunchShape
) -> tuple[NDArray[np.uint64], list[int]]:
    """Cut waves of regions into tiles of shape `(num_tiles, n, 4)`, n <= `segments_per_tile`.

    A row describes a segment: its address in block 0, the block stride, the offset in the slot, and
    its bytes, with its tile's bytes in the upper half. Tiles with fewer than n segments are padded
    with segments of 0 bytes. Also returns the index of each wave's first tile, followed by the
    number of tiles.
    """
    tiles: list[list[tuple[int, int, int, int]]] = []
    firsts = [0]
    for wave in waves:
        free_bytes = end = 0
        for region in wave:
            offset = 0
            while offset < region.page_bytes:
                slot_offset = region.slot_offset_bytes + offset
                full = not free_bytes or len(tiles[-1]) == shape.segments_per_tile
                if full or slot_offset != end:
                    tiles.append([])
                    free_bytes = shape.tile_bytes
                nbytes = min(free_bytes, region.page_bytes - offset)
                row = (region.address + offset, region.block_stride_bytes, slot_offset, nbytes)
                tiles[-1].append(row)
                offset += nbytes
                free_bytes -= nbytes
                end = slot_offset + nbytes
        firsts.append(len(tiles))
    table = np.zeros((len(tiles), max(map(len, tiles), default=1), 4), np.uint64)
    for index, tile in enumerate(tiles):
        table[index, : len(tile)] = tile
    table[:, :, 3] |= table[:, :, 3].sum(axis=1, keepdims=True) << np.uint64(32)
    return table, firsts


def cut_packed_tiles(
    layout: KVLayout, waves: Sequence[Sequence[int]]
) -> tuple[NDArray[np.uint64], list[int]]:
    """Return, like `cut_tiles`, the packed tiles of waves of regions, given by their indices.

    The shape is `(num_tiles, 1, 4)`. A row is an address in block 0, the block stride, the offset
    in the slot, and the index in `columns_table` with the number of columns in the upper half.
    """
    indices = {id(columns): i for i, columns in enumerate(_distinct_columns(layout))}
    rows: list[tuple[int, int, int, int]] = []
    firsts = [0]
    for wave in waves:
        for tile in place_tiles(layout, wave):
            region, columns = layout.regions[tile.region], tile.columns
            address = region.address + tile.page_offset_bytes
            described = indices[id(columns)] | columns.count << 32
            rows.append((address, region.block_stride_bytes, tile.slot_offset_bytes, described))
        firsts.append(len(rows))
    return np.array(rows, np.uint64).reshape(-1, 1, 4), firsts


def columns_table(layout: KVLayout) -> NDArray[np.uint8]:
    """Return the column of each group of values, shape `(n, 1024)`, once per kind of tile.

    They are in the order in which the threads of a kernel read them (`_COLUMNS_ORDER`).
    """
    return np.stack([columns.of_group[_COLUMNS_ORDER] for columns in _distinct_columns(layout)])


def _distinct_columns(layout: KVLayout) -> list[TileColumns]:
    tiles = place_tiles(layout, range(len(layout.regions)))
    return list({id(tile.columns): tile.columns for tile in tiles}.values())


def cut_waves(
    layout: KVLayout,
    waves: Sequence[Sequence[int]],
    family: KernelFamily,
    direction: Direction,
) -> tuple[NDArray[np.uint64], list[int]]:
    """Cut the tiles that a kernel family moves for waves of regions, given by their indices."""
    ordered = [sorted(wave) for wave in waves]
    if family.packs:
        return cut_packed_tiles(layout, ordered)
    parts = [[layout.regions[index].raw_part for index in wave] for wave in ordered]
    raw = [[part for part in wave if part is not None] for wave in parts]
    return cut_tiles(raw, family.shapes[direction])


class WaveTable:
    """The tiles of a load in waves, grouped by wave: a table on the device, written once.

    A kernel of `family` reads it. The constructor allocates all memory, before any step; CUDA
    allocates the device memory outside the pools.
    """

    def __init__(
        self,
        layout: KVLayout,
        family: KernelFamily,
        device: torch.device,
        registrar: PinnedRegistrar,
    ) -> None:
        cuda = import_cupy().cuda
        self.layout = layout
        self._family = family
        self._runtime: Any = cuda.runtime
        nbytes = _most_rows(layout, family) * _SEGMENT_BYTES
        with cuda.Device(device_index(device)):
            self._memory = cuda.Memory(nbytes)
        self._written = HostArena(1, nbytes, register=registrar)
        self.wave_bytes: list[int] = []
        """Bytes of a block in each wave, including bytes that other kernels move."""
        self._firsts: list[int] = []
        self._segments_per_tile = 0

    def write(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """Queue the write on `stream`, the stream of the waves.

        Call it only once: the queued copy may read the page-locked source at any later time. Raises
        `RuntimeError` from CUDA.
        """
        table, self._firsts = cut_waves(self.layout, waves, self._family, Direction.LOAD)
        self._written.view()[0, : table.nbytes] = table.view(np.uint8).reshape(-1)
        self._runtime.memcpyAsync(
            self._memory.ptr,
            self._written.address,
            table.nbytes,
            self._runtime.memcpyHostToDevice,
            stream.cuda_stream,
        )
        pages = [region.page_bytes for region in self.layout.regions]
        self.wave_bytes = [sum(pages[index] for index in wave) for wave in waves]
        self._segments_per_tile = table.shape[1]

    def tiles(self, wave: int) -> Tiles:
        """Return the tiles of a wave."""
        first, end = self._firsts[wave : wave + 2]
        row_bytes = self._segments_per_tile * _SEGMENT_BYTES
        address = self._memory.ptr + first * row_bytes
        return Tiles(address, end - first, self._segments_per_tile)


def _most_rows(layout: KVLayout, family: KernelFamily) -> int:
    """Return the maximum number of table rows for any division of the regions into waves."""
    if family.packs:
        return layout.num_tiles
    # A region that is cut alone has as many tiles as it can need in any wave. A tile of many
    # segments holds all of them whole, except the first and the last.
    shape = family.shapes[Direction.LOAD]
    pages = [part.page_bytes for region in layout.regions if (part := region.raw_part)]
    num_tiles = sum(-(-page_bytes // shape.tile_bytes) for page_bytes in pages)
    return num_tiles * min(shape.segments_per_tile, len(pages), 2 + shape.tile_bytes // min(pages))
