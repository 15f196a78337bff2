"""Plain copies, one `cudaMemcpyAsync` each, used to repeat a failed load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.block_copies import BlockCutter
from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout
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
