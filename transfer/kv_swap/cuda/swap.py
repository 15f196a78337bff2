"""The swap kernels of csrc: compiled at run time, bound to a layout and an arena, and launched.

Needs no CUDA toolkit: CuPy compiles with NVRTC for the device at hand and keeps the result on disk.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.kernel_families import KernelFamily, LaunchShape
from kv_swap.cuda.tiles import Tiles, cut_tiles
from kv_swap.engine import Direction
from kv_swap.errors import DeviceError
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch

MAX_PAIRS = 2048
"""Pairs of one launch: the vector kernels hold them in 16 KiB of shared memory."""

LIST_HEADER_BYTES = 16

LIST_BYTES = LIST_HEADER_BYTES + 8 * MAX_PAIRS
"""Bytes of a list of pairs."""


def write_list(target: NDArray[np.uint8], pairs: NDArray[np.int32]) -> None:
    """Write the list of a launch into `target`, which no kernel may read.

    A list is a header, of which the first int32 is the number of pairs, and the pairs.
    """
    # As bytes: NumPy's own assignments take three times as long for few rows.
    listed, pairs_bytes = target.data, pairs.tobytes()
    listed[LIST_HEADER_BYTES : LIST_HEADER_BYTES + len(pairs_bytes)] = pairs_bytes
    listed[:4] = len(pairs).to_bytes(4, "little")


def source_directory() -> Path:
    """Return the folder of device code: inside the package once installed, else in the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.exists() else package.parent.parent / "csrc"


def compile_options(family: KernelFamily) -> tuple[str, ...]:
    """Return the options for NVRTC.

    The digest of the headers is for CuPy's cache, which does not look into what a source includes.
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
    """What both functions of every family take, in this order."""

    _fields_ = (
        ("list_address", ctypes.c_uint64),
        ("table_address", ctypes.c_uint64),
        ("num_tiles", ctypes.c_uint32),
        ("segments_per_tile", ctypes.c_uint32),
        ("arena", ctypes.c_uint64),
        ("slot_bytes", ctypes.c_uint64),
    )


class _Launcher:
    """One function, the table of whole slots on the device, and the arguments laid out for CUDA.

    The table is allocated by CUDA itself, past the pools of torch and CuPy: a caller that discards
    its pool's memory to sleep leaves the table intact.
    """

    def __init__(
        self, cuda: Any, function: Any, layout: KVLayout, arena: HostArena, shape: LaunchShape
    ) -> None:
        self._launch = cuda.driver.launchKernel
        if shape.shared_bytes:
            function.max_dynamic_shared_size_bytes = shape.shared_bytes
        function.compile()
        self._function = function.kernel
        table, _ = cut_tiles([layout.regions], shape)
        self._table = cuda.Memory(table.nbytes)
        to_device = cuda.runtime.memcpyHostToDevice
        cuda.runtime.memcpy(self._table.ptr, table.ctypes.data, table.nbytes, to_device)
        self.whole = Tiles(self._table.ptr, *table.shape[:2])
        self.arguments = _Arguments(arena=arena.address, slot_bytes=arena.slot_bytes)
        first = ctypes.addressof(self.arguments)
        offsets = [getattr(_Arguments, name).offset for name, _ in _Arguments._fields_]
        self._pointers = (ctypes.c_void_p * len(offsets))(*(first + o for o in offsets))
        self._parameters = ctypes.addressof(self._pointers)
        self._fixed = (shape.ctas, 1, 1, shape.threads, 1, 1, shape.shared_bytes)

    def __call__(self, stream: int) -> None:
        """Launch with the arguments as they are now, which CUDA copies; the device is current."""
        self._launch(self._function.ptr, *self._fixed, stream, self._parameters, 0)


class SwapKernel:
    """The two kernels of a family, bound to one layout and one arena.

    Keeps the arena alive, but not the KV tensors. Takes about a second where CuPy has not compiled
    the kernels before, and synchronises the device: make it before any capture. Raises
    `DeviceError`.
    """

    def __init__(
        self, layout: KVLayout, arena: HostArena, device: torch.device, family: KernelFamily
    ) -> None:
        cupy = import_cupy()
        cuda = cupy.cuda
        self._index = device_index(device)
        self._arena = arena
        self._current_device: Any = cuda.runtime.getDevice
        self._device: Any = cuda.Device
        self.family = family
        self._launchers: dict[Direction, _Launcher] = {}
        path = source_directory() / family.source
        try:
            with cuda.Device(self._index):
                module = cupy.RawModule(code=path.read_text(), options=compile_options(family))
                for direction, shape in family.shapes.items():
                    function = module.get_function(f"swap_{direction.value}")
                    self._launchers[direction] = _Launcher(cuda, function, layout, arena, shape)
                # A copy from pageable memory may return before it has reached the device.
                cuda.runtime.deviceSynchronize()
        except (cuda.compiler.CompileException, RuntimeError, OSError) as error:
            raise DeviceError(
                f"cannot prepare the kernels of {path} on CUDA device {self._index}: {error}"
            ) from error

    def launch(
        self,
        direction: Direction,
        list_address: int,
        stream: torch.cuda.Stream,
        tiles: Tiles | None = None,
    ) -> None:
        """Queue the copy of the pairs listed at `list_address` (page-locked) on `stream`.

        Of whole slots, or of `tiles`, which were cut for this direction. List and tiles stay as
        they are until the kernel has ended. Does not block and allocates nothing. Raises
        `RuntimeError`.
        """
        launcher = self._launchers[direction]
        tiles = tiles or launcher.whole
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
