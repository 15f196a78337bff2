"""Swap kernels: a family of them, bound to a layout and an arena, fed and launched."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.kernel_families import KernelFamily, LaunchShape
from kv_swap.cuda.launcher import LIST_HEADER_BYTES, Launcher, compiled, source_directory
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch

MAX_PAIRS = 2048
"""Pairs of one launch: the vector kernels hold them in 16 KiB of shared memory."""

LIST_BYTES = LIST_HEADER_BYTES + 8 * MAX_PAIRS
"""Bytes of a list of pairs."""


def compile_options(family: KernelFamily) -> tuple[str, ...]:
    """Return the options for NVRTC.

    Among them a digest of the headers: CuPy's cache on disk does not look into what a source
    includes, and would keep kernels of an older header.
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


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a table on the device: what one launch copies of every pair."""

    address: int
    num_tiles: int
    segments_per_tile: int


class _Arguments(ctypes.Structure):
    """What both functions of every family take, in this order."""

    _fields_ = (
        ("list_address", ctypes.c_uint64),
        ("table_address", ctypes.c_uint64),
        ("num_tiles", ctypes.c_uint32),
        ("segments_per_tile", ctypes.c_uint32),
        ("arena", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
    )


class SwapKernel:
    """The two kernels of a family, bound to one layout and one arena.

    Keeps the arena alive, but not the KV tensors. Compiles and synchronises, see `compiled`. Raises
    `DeviceError`.
    """

    def __init__(
        self, layout: KVLayout, arena: HostArena, device: torch.device, family: KernelFamily
    ) -> None:
        cuda = import_cupy().cuda
        self._index = device_index(device)
        self._arena = arena
        self._current_device: Any = cuda.runtime.getDevice
        self._device: Any = cuda.Device
        self.family = family
        self._launchers: dict[Direction, Launcher] = {}
        self._whole: dict[Direction, Tiles] = {}
        with compiled(family.source, compile_options(family), device) as module:
            for direction, shape in family.shapes.items():
                function = module.get_function(f"swap_{direction.value}")
                table, _ = cut_tiles([layout.regions], shape)
                arguments = _Arguments(arena=arena.address, slot_bytes=arena.slot_bytes)
                launcher = Launcher(
                    function, table, arguments, shape.ctas, shape.threads, shape.shared_bytes
                )
                self._launchers[direction] = launcher
                self._whole[direction] = Tiles(launcher.table_address, *table.shape[:2])

    def launch(
        self,
        direction: Direction,
        list_address: int,
        stream: torch.cuda.Stream,
        tiles: Tiles | None = None,
    ) -> None:
        """Queue the copy of the pairs listed at `list_address` (page-locked) on `stream`.

        Of whole slots, or of `tiles`, which were cut with the launch shape of this direction. List
        and tiles are read when the kernel runs, and must stay as they are until it has ended. Does
        not block and allocates nothing; may be captured in a CUDA graph. Raises `RuntimeError`.
        """
        tiles = tiles or self._whole[direction]
        launcher = self._launchers[direction]
        arguments = launcher.arguments
        arguments.list_address = list_address
        arguments.table_address = tiles.address
        arguments.num_tiles = tiles.num_tiles
        arguments.segments_per_tile = tiles.segments_per_tile
        if self._current_device() == self._index:
            launcher(stream.cuda_stream)
        else:
            with self._device(self._index):
                launcher(stream.cuda_stream)
