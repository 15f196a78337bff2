"""Zeroes pages of given blocks: one launch over a table built once, safe in CUDA graphs.

Fresh blocks that a kernel reads before they are written must hold no NaN, and a load that failed
must not leave half a block behind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.launcher import LIST_HEADER_BYTES, Launcher, compiled, write_list
from kv_swap.errors import CopyError
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.memory.pieces import PinnedRegistrar

if TYPE_CHECKING:
    import torch

MAX_BLOCKS = 4096
"""Blocks of one launch."""

LIST_BYTES = LIST_HEADER_BYTES + 4 * MAX_BLOCKS
"""Bytes of a list of block ids."""

RING_ENTRIES = 16
"""Lists that launches in flight may still read."""

_RUN_BYTES = 32 << 10
_THREADS = 256
_CTAS_PER_SM = 4
"""Enough stores in flight to fill device memory: 256 threads of 16 bytes, 4 times an SM."""

COMPILE_OPTIONS = (
    "-std=c++17",
    f"-DKV_SWAP_MAX_BLOCKS={MAX_BLOCKS}",
    f"-DKV_SWAP_THREADS={_THREADS}",
)
SOURCE = "zero.cu"


def cut_runs(layout: KVLayout) -> NDArray[np.uint64]:
    """Return the table: `(n, 4)` of address in block 0, block stride, bytes and 0.

    Each byte of a block is in one run: a layout has already joined tensors that share their bytes.
    """
    rows = [
        (r.address + offset, r.block_stride_bytes, min(_RUN_BYTES, r.page_bytes - offset), 0)
        for r in layout.regions
        for offset in range(0, r.page_bytes, _RUN_BYTES)
    ]
    return np.array(rows, np.uint64)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("list_address", ctypes.c_uint64),
        ("table_address", ctypes.c_uint64),
        ("num_runs", ctypes.c_uint32),
    )


class ZeroKernel:
    """The kernel of csrc/zero.cu, bound to a layout.

    Of any dtype whose zero is all bits zero, as of bf16, fp8 and int8. Keeps no tensor alive.
    Compiles and synchronises, see `compiled`. Raises `DeviceError`.
    """

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        cuda = import_cupy().cuda
        self._index = device_index(device)
        self._device: Any = cuda.Device
        table = cut_runs(layout)
        arguments = _Arguments(num_runs=len(table))
        with compiled(SOURCE, COMPILE_OPTIONS, device) as module:
            attribute = cuda.runtime.cudaDevAttrMultiProcessorCount
            ctas = _CTAS_PER_SM * cuda.runtime.deviceGetAttribute(attribute, self._index)
            function = module.get_function("zero_pages")
            self._launcher = Launcher(function, table, arguments, ctas, _THREADS)

    def launch(self, list_address: int, stream: torch.cuda.Stream) -> None:
        """Queue the zeroing of the blocks listed at `list_address` on `stream`.

        As `SwapKernel.launch`: the list is read when the kernel runs.
        """
        self._launcher.arguments.list_address = list_address
        with self._device(self._index):
            self._launcher(stream.cuda_stream)


class BlockZeroer:
    """Zeroes blocks on the stream current at each call, through a ring of page-locked lists."""

    def __init__(self, layout: KVLayout, device: torch.device, registrar: PinnedRegistrar) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._index = device_index(device)
        self._slot_bytes = layout.slot_bytes
        self._kernel = ZeroKernel(layout, device)
        ring = HostArena(RING_ENTRIES, LIST_BYTES, register=registrar)
        self._ring = ring.view()
        self._ring_address = ring.address
        self._next_entry = 0
        # Each completes when its list has been read.
        self._reads = [torch.cuda.Event() for _ in range(RING_ENTRIES)]
        # CUDA loads a kernel, and torch makes an event, at first use: now and not within a step.
        stream = torch.cuda.Stream(device)
        self._kernel.launch(self._ring_address, stream)
        for read in self._reads:
            read.record(stream)
        stream.synchronize()

    def zero(self, blocks: Sequence[int]) -> None:
        """Queue the zeroing of every page of `blocks` on the current stream.

        Waits for the device only where all lists are still to be read: compute queued before has
        kept 16 calls, or 65,536 blocks, from their turn. Raises `CopyError` from CUDA.
        """
        stream = self._cuda.current_stream(self._index)
        try:
            for first in range(0, len(blocks), MAX_BLOCKS):
                entry = self._next_entry
                self._reads[entry].synchronize()
                listed = np.array(blocks[first : first + MAX_BLOCKS], np.int32)
                write_list(self._ring[entry], listed)
                self._kernel.launch(self._ring_address + entry * LIST_BYTES, stream)
                self._reads[entry].record(stream)
                self._next_entry = (entry + 1) % RING_ENTRIES
        except RuntimeError as error:
            raise CopyError(
                f"launching zero_pages failed with {error}: zeroing {len(blocks)} blocks of "
                f"{self._slot_bytes} bytes"
            ) from error

    def synchronize(self) -> None:
        """Wait until the device has read every list, so that the ring may be freed."""
        for read in self._reads:
            read.synchronize()
