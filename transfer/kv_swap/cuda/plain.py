"""Copies and zeroing without our kernels: to repeat a failed load, and to clear its blocks.

A failed load may leave partial blocks with NaNs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.block_copies import BlockCutter
from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

Copy = tuple[int, int, int]
"""Destination, source and bytes."""


class PlainCopier:
    """Queues copies on streams of one device. Needs CuPy, but no particular driver."""

    call = "cudaMemcpyAsync"

    def __init__(self, layout: KVLayout, arena: HostArena, device: torch.device) -> None:
        self._cuda: Any = import_cupy().cuda
        self._index = device_index(device)
        # A packed layout is unpacked first.
        raw = not layout.num_tiles
        self._cutter = BlockCutter(layout.regions, arena) if raw else None

    def load(self, pairs: NDArray[np.int32], stream: Stream) -> None:
        """Queue the loads of `pairs`, of shape `(n, 2)`, of a raw layout. Raises `RuntimeError`."""
        assert self._cutter is not None, "the layout is packed"
        copies = self._cutter.cut(pairs, Direction.LOAD)
        arrays = (copies.destinations, copies.sources, copies.nbytes)
        self.copy(zip(*(array.tolist() for array in arrays), strict=True), stream)

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


_WORD_BYTES = 8
"""Addresses, pages and strides of a layout are multiples of 16 bytes."""


def pages_of(region: Region, num_blocks: int, device: torch.device) -> torch.Tensor:
    """Return the pages of a region, int64 of shape `(num_blocks, words)`; keeps no memory alive."""
    import torch

    memory = SimpleNamespace(
        __cuda_array_interface__={
            "version": 3,
            "typestr": "<i8",
            "data": (region.address, False),
            "shape": (num_blocks, region.page_bytes // _WORD_BYTES),
            "strides": (region.block_stride_bytes, _WORD_BYTES),
        }
    )
    return torch.as_tensor(memory, device=device)


def send(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return block ids as an int64 tensor on the device, copied on the current stream."""
    import torch

    # A copy from pageable memory would wait for the stream.
    return torch.tensor(blocks, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


class BlockZeroer:
    """Zeroes pages of any dtype whose zero has all bits clear, such as bf16, fp8 and int8."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self._device = device
        self._pages = [pages_of(region, layout.num_blocks, device) for region in layout.regions]
        # CUDA loads a kernel at its first use, which may wait for all running work, so do it now.
        send([0], device).index_fill_(0, send([0], device), 0)

    def zero(self, blocks: Sequence[int]) -> None:
        """Queue the zeroing of every page of `blocks` on the current stream, one launch per region.

        Torch allocates 8 bytes per block for the list on the device. Raises `RuntimeError` if there
        is no memory, or from CUDA; some pages may then be zeroed.
        """
        listed = send(blocks, self._device)
        for pages in self._pages:
            pages.index_fill_(0, listed, 0)
