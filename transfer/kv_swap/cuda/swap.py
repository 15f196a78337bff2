"""Swap kernels: a family compiled at run time, bound to a layout and an arena, fed and launched.

Needs no CUDA toolkit: CuPy compiles with NVRTC for the device at hand and keeps the result on disk.
A family is one source in csrc with its launch shapes: `swap_bulk` and `swap_vector`.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.engine import Direction
from kv_swap.errors import DeviceError
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch

MAX_PAIRS = 2048
"""Pairs of one launch: the vector kernels hold them in 16 KiB of shared memory."""

_HEADER_BYTES = 16
LIST_BYTES = _HEADER_BYTES + 8 * MAX_PAIRS
"""Bytes of a list: a header, of which the first int32 is the number of pairs, and the pairs."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How one direction is launched, and how it wants slots cut into tiles.

    A tile has at most `tile_bytes` and at most `segments_per_tile` runs of contiguous bytes in the
    KV cache. `shared_bytes` is dynamic shared memory.
    """

    ctas: int
    threads: int
    tile_bytes: int
    segments_per_tile: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """One source of csrc with the functions `swap_store` and `swap_load`, and how to launch them.

    `name` is what benches call it; `options` are for the compiler.
    """

    name: str
    source: str
    shapes: Mapping[Direction, LaunchShape]
    options: tuple[str, ...] = ()


def source_directory() -> Path:
    """Return the folder of device code: inside the package once installed, else beside it."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.exists() else package.parent.parent / "csrc"


def compile_options(family: KernelFamily) -> tuple[str, ...]:
    """Return the options for NVRTC.

    A digest of the headers is among them, because CuPy's cache on disk does not look into what a
    source includes and would keep kernels of an older header.
    """
    include = source_directory() / "include"
    digest = hashlib.sha256()
    for header in sorted(include.glob("*.cuh")):
        digest.update(header.read_bytes())
    return (
        "-std=c++17",
        f"-I{include}",
        f"-DKV_SWAP_HEADERS={digest.hexdigest()[:16]}",
        f"-DKV_SWAP_MAX_PAIRS={MAX_PAIRS}",
        *family.options,
    )


def write_list(target: NDArray[np.uint8], pairs: NDArray[np.int32]) -> None:
    """Write `pairs`, `(n, 2)` with n <= MAX_PAIRS, as a list into `target`, `(LIST_BYTES,)`.

    No kernel that reads the list may be running.
    """
    # As bytes: NumPy's own assignments take three times as long for few pairs.
    listed, pairs_bytes = target.data, pairs.tobytes()
    listed[_HEADER_BYTES : _HEADER_BYTES + len(pairs_bytes)] = pairs_bytes
    listed[:4] = len(pairs).to_bytes(4, "little")


def cut_tiles(layout: KVLayout, shape: LaunchShape) -> NDArray[np.uint64]:
    """Cut a slot into tiles: `(num_tiles, n, 4)`, a row per segment, n <= `segments_per_tile`.

    A row is an address in block 0, the block stride, the offset in the slot, and the bytes of the
    segment with those of its tile in the upper half. Tiles with fewer than n segments are padded
    with segments of 0 bytes.
    """
    tiles: list[list[tuple[int, int, int, int]]] = []
    free_bytes = end = 0
    for region in layout.regions:
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
    table = np.zeros((len(tiles), max(map(len, tiles)), 4), np.uint64)
    for index, tile in enumerate(tiles):
        table[index, : len(tile)] = tile
    table[:, :, 3] |= table[:, :, 3].sum(axis=1, keepdims=True) << np.uint64(32)
    return table


class _Arguments(ctypes.Structure):
    """What both functions of every family take, in this order."""

    _fields_ = (
        ("list_address", ctypes.c_uint64),
        ("segments", ctypes.c_uint64),
        ("num_tiles", ctypes.c_uint32),
        ("segments_per_tile", ctypes.c_uint32),
        ("arena", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a table on the device: what one launch copies of every pair."""

    address: int
    num_tiles: int
    segments_per_tile: int


class _Launcher:
    """One direction: its function, its table on the device, and arguments laid out for CUDA."""

    def __init__(
        self, cupy: Any, function: Any, shape: LaunchShape, layout: KVLayout, arena: HostArena
    ) -> None:
        self._launch = cupy.cuda.driver.launchKernel
        if shape.shared_bytes:
            function.max_dynamic_shared_size_bytes = shape.shared_bytes
        function.compile()
        self._function = function.kernel
        table = cut_tiles(layout, shape)
        self._table = cupy.cuda.Memory(table.nbytes)
        runtime = cupy.cuda.runtime
        runtime.memcpy(self._table.ptr, table.ctypes.data, table.nbytes, runtime.memcpyHostToDevice)
        self._whole = Tiles(self._table.ptr, table.shape[0], table.shape[1])
        self._tiles: Tiles | None = None
        self._arguments = _Arguments(arena=arena.address, slot_bytes=arena.slot_bytes)
        first = ctypes.addressof(self._arguments)
        offsets = [getattr(_Arguments, name).offset for name, _ in _Arguments._fields_]
        self._pointers = (ctypes.c_void_p * len(offsets))(*(first + o for o in offsets))
        self._parameters = ctypes.addressof(self._pointers)
        self._fixed = (shape.ctas, 1, 1, shape.threads, 1, 1, shape.shared_bytes)

    def __call__(self, list_address: int, stream: int, tiles: Tiles | None) -> None:
        tiles = tiles or self._whole
        arguments = self._arguments
        if tiles is not self._tiles:
            self._tiles = tiles
            arguments.segments = tiles.address
            arguments.num_tiles = tiles.num_tiles
            arguments.segments_per_tile = tiles.segments_per_tile
        arguments.list_address = list_address
        self._launch(self._function.ptr, *self._fixed, stream, self._parameters, 0)


class SwapKernel:
    """The two kernels of a family, bound to one layout and one arena.

    Keeps the arena alive, but not the KV tensors. The tables of segments are allocated by CUDA
    itself, past the pools of torch and CuPy: a caller that discards its pool's memory to sleep
    leaves them, and graphs that captured their address, intact.

    Compiles on first use on a machine (about a second) and synchronises the device: construct it
    before any capture. Raises `DeviceError`.
    """

    def __init__(
        self,
        layout: KVLayout,
        arena: HostArena,
        device: torch.device,
        family: KernelFamily | None = None,
    ) -> None:
        cupy = import_cupy()
        self._index = device_index(device)
        self._arena = arena
        self._runtime: Any = cupy.cuda.runtime
        self._device: Any = cupy.cuda.Device
        chosen = family or choose_family(device)
        if chosen is None:
            raise DeviceError(
                f"CUDA device {self._index} runs no copy kernels, use its copy engine"
            )
        self.family = chosen
        source = source_directory() / self.family.source
        try:
            with self._device(self._index):
                module = cupy.RawModule(
                    code=source.read_text(), options=compile_options(self.family)
                )
                self._launchers = {
                    direction: _Launcher(
                        cupy, module.get_function(f"swap_{direction.value}"), shape, layout, arena
                    )
                    for direction, shape in self.family.shapes.items()
                }
                # A copy from pageable memory may return before it has reached the device.
                self._runtime.deviceSynchronize()
        except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
            raise DeviceError(
                f"cannot prepare the copy kernels of {source} on CUDA device {self._index}: {error}"
            ) from error

    def launch(
        self,
        direction: Direction,
        list_address: int,
        stream: torch.cuda.Stream,
        tiles: Tiles | None = None,
    ) -> None:
        """Queue the copy of the pairs listed at `list_address` (page-locked) on `stream`.

        Of whole slots, or of `tiles`, which the caller keeps as they are until the kernel has ended
        and which were cut with the launch shape of this family and direction.

        Does not block and allocates nothing; may be captured in a CUDA graph. The list is read
        when the kernel runs, not now, and must stay as it is until the kernel has ended. Raises
        `RuntimeError` from CUDA.
        """
        launcher = self._launchers[direction]
        if self._runtime.getDevice() == self._index:
            launcher(list_address, stream.cuda_stream, tiles)
            return
        with self._device(self._index):
            launcher(list_address, stream.cuda_stream, tiles)


def choose_family(device: torch.device) -> KernelFamily | None:
    """Return the fastest family that `device` runs; `None` if it runs none."""
    import torch

    from kv_swap.cuda import swap_bulk, swap_vector

    capability: tuple[int, int] = torch.cuda.get_device_capability(device_index(device))
    for module in (swap_bulk, swap_vector):
        if capability >= module.MIN_CAPABILITY:
            family: KernelFamily = module.FAMILY
            return family
    return None
