"""What a launch copies of every pair: slots cut into tiles, whole or by the waves of a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.kernel_families import LaunchShape
from kv_swap.cuda.lane import WaveRange
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import PinnedRegistrar

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

_SEGMENT_BYTES = 32


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
    with segments of 0 bytes. Returns also the first tile of each wave, and behind the last one the
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
    table = np.zeros((len(tiles), max(map(len, tiles)), 4), np.uint64)
    for index, tile in enumerate(tiles):
        table[index, : len(tile)] = tile
    table[:, :, 3] |= table[:, :, 3].sum(axis=1, keepdims=True) << np.uint64(32)
    return table, firsts


class WaveTable:
    """The tiles of a load in waves, those of a wave together: a table on the device, written once.

    `shape` is that of the kernel that will read it. All memory is allocated here, before any step;
    that on the device is CUDA's own, past the pools.
    """

    def __init__(
        self, layout: KVLayout, shape: LaunchShape, device: torch.device, registrar: PinnedRegistrar
    ) -> None:
        cuda = import_cupy().cuda
        self.layout = layout
        self._shape = shape
        self._runtime: Any = cuda.runtime
        # A region cut alone has as many tiles as it ever needs, whatever the waves. A tile of many
        # segments holds all but the first and the last of them whole.
        pages = [region.page_bytes for region in layout.regions]
        num_tiles = sum(-(-page_bytes // shape.tile_bytes) for page_bytes in pages)
        per_tile = min(shape.segments_per_tile, len(pages), 2 + shape.tile_bytes // min(pages))
        nbytes = num_tiles * per_tile * _SEGMENT_BYTES
        with cuda.Device(device_index(device)):
            self._memory = cuda.Memory(nbytes)
        self._written = HostArena(1, nbytes, register=registrar)
        self.wave_bytes: list[int] = []
        """Bytes of a block in each wave."""
        self._firsts: list[int] = []
        self._segments_per_tile = 0

    def write(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """Queue the writing on `stream`, on which the waves will be queued.

        Once only: the copy reads the page-locked source whenever it runs. Raises `RuntimeError`
        from CUDA.
        """
        regions = [[self.layout.regions[index] for index in sorted(wave)] for wave in waves]
        table, self._firsts = cut_tiles(regions, self._shape)
        self._written.view()[0, : table.nbytes] = table.view(np.uint8).reshape(-1)
        self._runtime.memcpyAsync(
            self._memory.ptr,
            self._written.address,
            table.nbytes,
            self._runtime.memcpyHostToDevice,
            stream.cuda_stream,
        )
        self.wave_bytes = [sum(region.page_bytes for region in wave) for wave in regions]
        self._segments_per_tile = table.shape[1]

    def tiles(self, waves: WaveRange) -> Tiles:
        """Return the tiles of waves that follow one another, which lie together."""
        first, end = self._firsts[waves.start], self._firsts[waves.stop]
        row_bytes = self._segments_per_tile * _SEGMENT_BYTES
        address = self._memory.ptr + first * row_bytes
        return Tiles(address, end - first, self._segments_per_tile)
