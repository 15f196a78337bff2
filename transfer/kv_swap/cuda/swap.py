"""Compiles the swap kernels of csrc, binds them to a layout and an arena, and launches them.

A slice of a job is one launch, with its pairs as a list in page-locked memory. With packed regions
it is two: one moves the packed tiles, the other the raw parts, if there are any.

No CUDA toolkit is needed: CuPy compiles with NVRTC for the device and caches the result on disk.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import KERNEL_CACHE_REMEDY, OnDevice, import_cupy
from kv_swap.cuda.kernel_families import KernelFamily
from kv_swap.cuda.lane import CopyPath, Refusals, Slice
from kv_swap.cuda.tiles import Tiles, WaveTable, columns_table, cut_waves
from kv_swap.engine import Direction
from kv_swap.errors import DeviceError
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.memory.mapping import PinnedRegistrar

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

MAX_PAIRS = 2048
"""Maximum pairs per launch: the vector kernels hold them in 16 KiB of shared memory."""

LIST_HEADER_BYTES = 16

STATUS_OFFSET_BYTES = LIST_HEADER_BYTES + 8 * MAX_PAIRS
"""Offset of a list's statuses: one byte per pair, written by a packing store."""

LIST_BYTES = STATUS_OFFSET_BYTES + MAX_PAIRS
"""Bytes of a list of pairs with its statuses."""

SLICE_BYTES = 256 << 20
"""Maximum bytes per launch: 5 ms on PCIe Gen5 x16, the longest time that other work waits for a
store's SMs. The link idles for microseconds at every launch: slices of 16 MiB would cost 1 %."""

RING_ENTRIES = 128
"""Maximum launches queued: with about 1,000 operations on a stream, CUDA blocks the caller."""


def write_list(target: NDArray[np.uint8], pairs: NDArray[np.int32]) -> None:
    """Write the list of a launch into `target`, which no kernel may be reading.

    A list is a header, whose first int32 is the number of pairs, followed by the pairs.
    """
    # Copied as bytes: with few rows, NumPy's assignments take three times as long.
    listed, pairs_bytes = target.data, pairs.tobytes()
    listed[LIST_HEADER_BYTES : LIST_HEADER_BYTES + len(pairs_bytes)] = pairs_bytes
    listed[:4] = len(pairs).to_bytes(4, "little")


def source_directory() -> Path:
    """Return the folder of device code, in the installed package or in the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.exists() else package.parent.parent / "csrc"


def compile_options(family: KernelFamily) -> tuple[str, ...]:
    """Return the options for NVRTC.

    They contain a digest of the headers, because CuPy's cache ignores included files.
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


class _Arguments(ctypes.Structure):
    """Arguments of both functions of a family, in order; only packing families use the last two."""

    _fields_ = (
        ("list_address", ctypes.c_uint64),
        ("table_address", ctypes.c_uint64),
        ("num_tiles", ctypes.c_uint32),
        ("segments_per_tile", ctypes.c_uint32),
        ("arena", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
        ("columns_address", ctypes.c_uint64),
        ("pool_entries", ctypes.c_uint32),
    )


class SwapKernel:
    """A family's kernel for one direction, bound to one layout and one arena.

    Its table for whole slots is allocated by CUDA, outside the pools of torch and CuPy, so it
    survives when a caller discards its pool's memory to sleep. Keeps the arena alive, but not the
    KV tensors. Synchronises the device, and takes about a second if CuPy has not cached the family.
    Raises `DeviceError`.
    """

    def __init__(
        self,
        layout: KVLayout,
        arena: HostArena,
        device: torch.device,
        family: KernelFamily,
        direction: Direction,
    ) -> None:
        cuda: Any = import_cupy().cuda
        self.family = family
        self._arena = arena
        self._on_device = OnDevice(device)
        self._launch = cuda.driver.launchKernel
        path = source_directory() / family.source
        shape = family.shapes[direction]
        everything = [range(len(layout.regions))]
        table, _ = cut_waves(layout, everything, family, direction)
        columns = columns_table(layout) if family.packs else np.zeros(1, np.uint8)
        try:
            with cuda.Device(self._on_device.index):
                module = import_cupy().RawModule(
                    code=path.read_text(), options=compile_options(family)
                )
                function = module.get_function(f"swap_{direction.value}")
                if shape.shared_bytes:
                    function.max_dynamic_shared_size_bytes = shape.shared_bytes
                function.compile()
                self._function = function.kernel
                self.tables = [_on_device(cuda, array) for array in (table, columns)]
                # A copy from pageable memory may return before the data reaches the device.
                cuda.runtime.deviceSynchronize()
        except (cuda.compiler.CompileException, RuntimeError, OSError) as error:
            remedy = f"; {KERNEL_CACHE_REMEDY}" if isinstance(error, OSError) else ""
            raise DeviceError(
                f"cannot prepare the kernels of {path} on CUDA device {self._on_device.index}: "
                f"{error}{remedy}"
            ) from error
        self._whole = Tiles(self.tables[0].ptr, *table.shape[:2])
        self._arguments = _Arguments(
            arena=arena.address,
            slot_bytes=arena.slot_bytes,
            columns_address=self.tables[1].ptr,
            pool_entries=layout.pool_entries,
        )
        first = ctypes.addressof(self._arguments)
        offsets = [getattr(_Arguments, name).offset for name, _ in _Arguments._fields_]
        self._pointers = (ctypes.c_void_p * len(offsets))(*(first + o for o in offsets))
        self._parameters = ctypes.addressof(self._pointers)
        self._fixed = (shape.ctas, 1, 1, shape.threads, 1, 1, shape.shared_bytes)

    def launch(self, list_address: int, stream: Stream, tiles: Tiles | None = None) -> None:
        """Queue a copy of the pairs listed at `list_address` (page-locked memory) on `stream`.

        Copies whole slots, or only `tiles`, which must be cut for this direction. The list and the
        tiles must not change until the kernel has ended. Neither blocks nor allocates. Raises
        `RuntimeError`.
        """
        tiles = tiles or self._whole
        arguments = self._arguments  # CUDA copies them
        arguments.list_address = list_address
        arguments.table_address = tiles.address
        arguments.num_tiles = tiles.num_tiles
        arguments.segments_per_tile = tiles.segments_per_tile
        launched = self._function.ptr, *self._fixed, stream.cuda_stream, self._parameters, 0
        self._on_device(self._launch, *launched)


def _on_device(cuda: Any, array: NDArray[Any]) -> Any:
    """Return device memory with the bytes of an array."""
    memory = cuda.Memory(array.nbytes)
    to_device = cuda.runtime.memcpyHostToDevice
    cuda.runtime.memcpy(memory.ptr, array.ctypes.data, array.nbytes, to_device)
    return memory


class KernelPath(CopyPath):
    """Launches swap kernels for every slice; in waves if it has tables for them.

    `kernels`, all for this direction, together move blocks of `block_bytes`; each has its own table
    in `wave_tables`. Until a slice has ended, its kernels read its list in the ring and the tables
    of tiles, and a packing kernel writes the statuses after the list. Nothing else writes there
    meanwhile; the statuses are read before the ring's entry is reused.
    """

    def __init__(
        self,
        direction: Direction,
        kernels: Sequence[SwapKernel],
        block_bytes: int,
        registrar: PinnedRegistrar,
        wave_tables: Sequence[WaveTable] = (),
    ) -> None:
        self.call = f"launching swap_{direction.value}"
        self.max_in_flight = RING_ENTRIES
        self._kernels = kernels
        self._block_bytes = block_bytes
        packs = any(kernel.family.packs for kernel in kernels)
        self._refuses = packs and direction is Direction.STORE
        ring = HostArena(RING_ENTRIES, LIST_BYTES, register=registrar)
        self._ring = ring.view()
        self._ring_address = ring.address
        self._next_entry = 0
        self._wave_tables = wave_tables

    def set_waves(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """Queue the writes of the waves' tables."""
        for table in self._wave_tables:
            table.write(waves, stream)

    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Yield slices of at most MAX_PAIRS pairs and SLICE_BYTES bytes, or of one pair."""
        if not in_waves:
            yield from self._cut(None, pairs, self._block_bytes)
            return
        assert self._wave_tables, "a path without tables was asked for waves"
        for wave, wave_bytes in enumerate(self._wave_tables[0].wave_bytes):
            yield from self._cut(wave, pairs, wave_bytes)

    @staticmethod
    def _cut(wave: int | None, pairs: NDArray[np.int32], pair_bytes: int) -> Iterator[Slice]:
        step = min(MAX_PAIRS, max(1, SLICE_BYTES // pair_bytes))
        for first in range(0, len(pairs), step):
            yield wave, (first, pairs[first : first + step])

    def queue(self, part: Slice, stream: Stream) -> Refusals | None:
        """Write the list and launch. Raises `RuntimeError`; the first launch may then be queued."""
        wave, (first, pairs) = part
        entry = self._next_entry
        self._next_entry = (entry + 1) % len(self._ring)
        # The entry is free: slices end in order, and its last user is `RING_ENTRIES` slices back.
        write_list(self._ring[entry], pairs)
        address = self._ring_address + entry * LIST_BYTES
        for index, kernel in enumerate(self._kernels):
            tiles = None if wave is None else self._wave_tables[index].tiles(wave)
            if tiles is None or tiles.num_tiles:
                kernel.launch(address, stream, tiles)
        return partial(self._read_refused, entry, first, len(pairs)) if self._refuses else None

    def _read_refused(self, entry: int, first: int, count: int) -> list[int]:
        statuses = self._ring[entry, STATUS_OFFSET_BYTES : STATUS_OFFSET_BYTES + count]
        rows: list[int] = (first + np.flatnonzero(statuses)).tolist()
        return rows

    def warm_up(self, stream: Stream) -> None:
        """Launch an empty list, and synchronise, before anything is queued."""
        write_list(self._ring[0], np.empty((0, 2), np.int32))
        for kernel in self._kernels:
            kernel.launch(self._ring_address, stream)
