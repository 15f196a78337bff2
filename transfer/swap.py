"""The swap kernels of csrc/swap.cu: compiled at run time, fed, launched.

Needs no CUDA toolkit: CuPy compiles with NVRTC for the device at hand and keeps the result on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from transfer.device import device_index, import_cupy
from transfer.engine import Direction
from transfer.errors import DeviceError
from transfer.layout import KVLayout
from transfer.pinned import HostArena

if TYPE_CHECKING:
    import torch

MAX_PAIRS = 2048
"""Pairs of one launch: 16 KiB of shared memory, small enough to leave an SM to others."""

LIST_BYTES = 16 + 8 * MAX_PAIRS
"""Bytes of a list: a header, of which the first int32 is the number of pairs, and the pairs."""

COMPILE_OPTIONS = ("-std=c++17", f"-DKV_OFFLOAD_MAX_PAIRS={MAX_PAIRS}")

_GRID = 4
"""CTAs: 4 of 1,024 threads filled a PCIe Gen5 x16 link from 4 KiB pages on (H200); 16 moved no more
and slowed a bf16 product beside them 2.9 times."""

_THREADS = 1024
_CHUNK_BYTES = 4096
"""What a warp copies at a time: 8 vectors a lane, so that 16 MiB give each warp 32 chunks."""


def source_path() -> Path:
    """Return the kernels' source: inside the package once installed, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "csrc" / "swap.cu"
    return installed if installed.exists() else package.parent / "csrc" / "swap.cu"


def write_list(target: NDArray[np.uint8], pairs: NDArray[np.int32]) -> None:
    """Write `pairs`, `(n, 2)` with n <= MAX_PAIRS, as a list into `target`, `(LIST_BYTES,)`.

    No kernel that reads the list may be running.
    """
    words = target.view(np.int32)
    words[4 : 4 + pairs.size] = pairs.reshape(-1)
    words[0] = len(pairs)


class SwapKernel:
    """The two kernels, bound to one layout and one arena.

    Keeps the arena alive, but not the KV tensors. The table of chunks is allocated by CUDA itself,
    past the pools of torch and CuPy: an engine that discards its pool's memory to sleep leaves the
    table, and graphs that captured its address, intact.

    Compiles on first use on a machine (about a second) and synchronises the device: construct it
    before any capture. Raises `DeviceError`.
    """

    def __init__(self, layout: KVLayout, arena: HostArena, device: torch.device) -> None:
        self._cupy: Any = import_cupy()
        self._index = device_index(device)
        self._arena = arena
        cuda = self._cupy.cuda
        table = _chunks(layout)
        try:
            with cuda.Device(self._index):
                module = self._cupy.RawModule(
                    code=source_path().read_text(), options=COMPILE_OPTIONS
                )
                self._functions = {
                    Direction.STORE: module.get_function("swap_store"),
                    Direction.LOAD: module.get_function("swap_load"),
                }
                for function in self._functions.values():
                    function.compile()
                self._table = cuda.Memory(table.nbytes)
                cuda.runtime.memcpy(
                    self._table.ptr,
                    table.ctypes.data,
                    table.nbytes,
                    cuda.runtime.memcpyHostToDevice,
                )
                # A copy from pageable memory may return before it has reached the device.
                cuda.runtime.deviceSynchronize()
        except (cuda.compiler.CompileException, RuntimeError, OSError) as error:
            raise DeviceError(
                f"cannot prepare the copy kernels of {source_path()} on CUDA device "
                f"{self._index}: {error}"
            ) from error
        self._arguments = (
            np.uint64(self._table.ptr),
            np.uint32(len(table)),
            np.uint64(arena.address),
            np.uint64(arena.slot_bytes),
        )

    def launch(self, direction: Direction, list_address: int, stream: torch.cuda.Stream) -> None:
        """Queue the copy of the pairs listed at `list_address` (page-locked) on `stream`.

        Does not block and allocates nothing; may be captured in a CUDA graph. The list is read
        when the kernel runs, not now, and must stay as it is until the kernel has ended. Raises
        `RuntimeError` from CUDA.
        """
        cuda = self._cupy.cuda
        with cuda.Device(self._index), _cupy_stream(cuda, stream, self._index):
            self._functions[direction](
                (_GRID,), (_THREADS,), (np.uint64(list_address), *self._arguments)
            )


class _StreamHandle:
    """A stream as other libraries see it, by the CUDA stream protocol."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def _cupy_stream(cuda: Any, stream: torch.cuda.Stream, index: int) -> Any:
    """Wrap a torch stream for CuPy. `from_external` came with CuPy 14 and replaces the other."""
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_StreamHandle(stream.cuda_stream))
    return cuda.ExternalStream(stream.cuda_stream, index)


def _chunks(layout: KVLayout) -> NDArray[np.uint64]:
    """Cut the regions into chunks: `(n, 4)` of address, block stride, slot offset and vectors."""
    rows = [
        (
            region.address + offset,
            region.block_stride_bytes,
            region.slot_offset_bytes + offset,
            min(_CHUNK_BYTES, region.page_bytes - offset) // 16,
        )
        for region in layout.regions
        for offset in range(0, region.page_bytes, _CHUNK_BYTES)
    ]
    return np.array(rows, np.uint64)
