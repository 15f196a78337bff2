"""The tiles of loads that arrive in waves: a table in which the tiles of a wave lie together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_swap.cuda.copy_path import WaveRange
from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.kernel_families import LaunchShape
from kv_swap.cuda.swap import Tiles, cut_tiles
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.memory.pieces import PinnedRegistrar

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

_SEGMENT_BYTES = 32


class WaveTable:
    """The table on the device, written once; what that takes is allocated here, before any step.

    `shape` is that of the kernel that will read it. The memory on the device is CUDA's own, past
    the pools, as for the other tables.
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
