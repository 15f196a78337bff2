"""The tiles that a launch copies of every pair: of whole slots, or of the waves of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.kernel_families import KernelFamily, LaunchShape
from kv_swap.cuda.lane import WaveRange
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import PinnedRegistrar
from kv_swap.packing.columns import TileColumns
from kv_swap.packing.format import TILE_GROUPS
from kv_swap.packing.slots import place_tiles

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

_SEGMENT_BYTES = 32
"""Bytes of a row, also of one that describes a packed tile."""

_COLUMNS_ORDER = np.arange(TILE_GROUPS).reshape(4, 256).T.ravel()
"""The 4 groups of values of each thread of the packing kernels, thread by thread."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a table on the device."""

    address: int
    num_tiles: int
    segments_per_tile: int


def cut_tiles(
    waves: Sequence[Sequence[Region]], shape: LaunchShape
) -> tuple[NDArray[np.uint64], list[int]]:
    """Cut regions into tiles: `(num_tiles, n, 4)`, a row per segment, n <= `segments_per_tile`.

    A row is an address in block 0, the block stride, the offset in the slot, and the bytes of the
    segment with those of its tile in the upper half. Tiles with fewer than n segments are padded
    with segments of 0 bytes. Returns also the first tile of each wave, and after the last one the
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
    """Return the packed tiles of waves of regions, by their indices, as `cut_tiles` does.

    A row is an address in block 0, the block stride, the offset in the slot, and the index in
    `columns_table` with the number of columns in the upper half: `(num_tiles, 1, 4)`.
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
    """Return the columns of the groups of values of tiles, `(n, 1024)`: each kind of tile once.

    In the order in which the threads of a kernel read them: see `_COLUMNS_ORDER`.
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
    """Cut what a family of kernels moves of waves of regions, by their indices."""
    ordered = [sorted(wave) for wave in waves]
    if family.packs:
        return cut_packed_tiles(layout, ordered)
    parts = [[layout.regions[index].raw_part for index in wave] for wave in ordered]
    raw = [[part for part in wave if part is not None] for wave in parts]
    return cut_tiles(raw, family.shapes[direction])


class WaveTable:
    """The tiles of a load in waves, those of a wave together: a table on the device, written once.

    `family` is that of the kernel that will read it. All memory is allocated here, before any step;
    that on the device is CUDA's own, past the pools.
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
        """Bytes of a block in each wave, also those that other kernels move."""
        self._firsts: list[int] = []
        self._segments_per_tile = 0

    def write(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """Queue the writing on `stream`, on which the waves will be queued.

        Once only: the copy reads the page-locked source whenever it runs. Raises `RuntimeError`
        from CUDA.
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

    def tiles(self, waves: WaveRange) -> Tiles:
        """Return the tiles of consecutive waves, which are adjacent."""
        first, end = self._firsts[waves.start], self._firsts[waves.stop]
        row_bytes = self._segments_per_tile * _SEGMENT_BYTES
        address = self._memory.ptr + first * row_bytes
        return Tiles(address, end - first, self._segments_per_tile)


def _most_rows(layout: KVLayout, family: KernelFamily) -> int:
    """Return how many rows a table has at most, however the regions come in waves."""
    if family.packs:
        return layout.num_tiles
    # A region cut alone has as many tiles as it ever needs, whatever the waves. A tile of many
    # segments holds all but the first and the last of them whole.
    shape = family.shapes[Direction.LOAD]
    pages = [part.page_bytes for region in layout.regions if (part := region.raw_part)]
    num_tiles = sum(-(-page_bytes // shape.tile_bytes) for page_bytes in pages)
    return num_tiles * min(shape.segments_per_tile, len(pages), 2 + shape.tile_bytes // min(pages))
