"""The path of the copy engine: one `cudaMemcpyAsync` for every page.

For devices that run no swap kernel, and for `transfer_engine: dma`. It takes no SM from compute,
but microseconds of the host for a copy. So a call of the engine queues one slice, and later polls
the rest. Copies of others in the same direction wait for all slices that are queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.lane import CopyPath, Slice
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

SLICE_COPIES = 64
"""Copies that a call of the engine queues at most."""

SLICE_BYTES = 64 << 20
"""Bytes that a call of the engine queues at most; a copy never has more."""

_IN_FLIGHT = 4
"""Slices queued at once. A 2 KiB copy of others waited 3 to 4 ms behind these 256 MiB (H200)."""

Copy = tuple[int, int, int]
"""Destination, source and bytes."""


def cut_copies(
    layout: KVLayout, arena: HostArena, direction: Direction, pairs: NDArray[np.int32]
) -> Iterator[Copy]:
    """Yield the copies of `pairs`, `(n, 2)`, a page each.

    CUDA looks up where a host range begins, and refuses one that ends in another registration. So a
    copy ends where a piece of the arena does, and a page may take several.
    """
    for block, slot in map(np.ndarray.tolist, pairs):
        for region in layout.regions:
            device = region.address + block * region.block_stride_bytes
            offset = slot * arena.slot_bytes + region.slot_offset_bytes
            end = offset + region.page_bytes
            while offset < end:
                piece_left = arena.piece_bytes - offset % arena.piece_bytes
                nbytes = min(end - offset, piece_left, SLICE_BYTES)
                host = arena.address + offset
                load = direction is Direction.LOAD
                yield (device, host, nbytes) if load else (host, device, nbytes)
                offset += nbytes
                device += nbytes


class Copier:
    """Queues copies on streams of one device, one `cudaMemcpyAsync` each. Needs CuPy."""

    call = "cudaMemcpyAsync"

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = import_cupy().cuda
        self._index = device_index(device)

    def copy(self, copies: Iterable[Copy], stream: Stream) -> None:
        """Queue copies. Raises `RuntimeError` from CUDA; some may then have been queued."""
        runtime = self._cuda.runtime
        with self._cuda.Device(self._index):
            for destination, source, nbytes in copies:
                try:
                    runtime.memcpyAsync(
                        destination, source, nbytes, runtime.memcpyDefault, stream.cuda_stream
                    )
                except RuntimeError as error:
                    raise RuntimeError(f"{error} (one copy of {nbytes} bytes)") from error


class DmaPath(CopyPath):
    """Copies of one direction, between a layout and a registered arena. Raises `DeviceError`."""

    call = Copier.call
    max_in_flight = _IN_FLIGHT
    slices_per_call = 1

    def __init__(
        self, direction: Direction, layout: KVLayout, arena: HostArena, device: torch.device
    ) -> None:
        self._direction = direction
        self._layout = layout
        self._arena = arena
        self._copier = Copier(device)

    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Yield lists of at most SLICE_COPIES copies and SLICE_BYTES."""
        assert not in_waves, "the copy engine does not copy in waves"
        part: list[Copy] = []
        part_bytes = 0
        for copy in cut_copies(self._layout, self._arena, self._direction, pairs):
            if len(part) == SLICE_COPIES or part_bytes + copy[2] > SLICE_BYTES:
                yield None, part
                part, part_bytes = [], 0
            part.append(copy)
            part_bytes += copy[2]
        yield None, part

    def queue(self, part: Slice, stream: Stream) -> None:
        """Queue the copies of a slice on `stream`; nothing is refused."""
        self._copier.copy(part[1], stream)
