"""Kernels of csrc: compiled at run time, and launched over a table of numbers on the device.

Needs no CUDA toolkit: CuPy compiles with NVRTC for the device at hand and keeps the result on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.errors import DeviceError

if TYPE_CHECKING:
    import torch


LIST_HEADER_BYTES = 16


def write_list(target: NDArray[np.uint8], rows: NDArray[np.int32]) -> None:
    """Write what a launch is about into `target`, which no kernel may read, and which has room.

    A list is a header, of which the first int32 is the number of rows, and the rows.
    """
    # As bytes: NumPy's own assignments take three times as long for few rows.
    listed, rows_bytes = target.data, rows.tobytes()
    listed[LIST_HEADER_BYTES : LIST_HEADER_BYTES + len(rows_bytes)] = rows_bytes
    listed[:4] = len(rows).to_bytes(4, "little")


def source_directory() -> Path:
    """Return the folder of device code: inside the package once installed, else in the checkout."""
    package = Path(__file__).parents[1]
    installed = package / "csrc"
    return installed if installed.exists() else package.parent.parent / "csrc"


@contextlib.contextmanager
def compiled(source: str, options: tuple[str, ...], device: torch.device) -> Iterator[Any]:
    """Yield the module of a source, with `device` current, to make launchers of its functions.

    Takes about a second where CuPy has not compiled it before, and synchronises the device: use it
    before any capture. Raises `DeviceError`, also for what CUDA refuses in the block.
    """
    cupy = import_cupy()
    index = device_index(device)
    path = source_directory() / source
    try:
        with cupy.cuda.Device(index):
            yield cupy.RawModule(code=path.read_text(), options=options)
            # A copy from pageable memory may return before it has reached the device.
            cupy.cuda.runtime.deviceSynchronize()
    except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
        raise DeviceError(
            f"cannot prepare the kernels of {path} on CUDA device {index}: {error}"
        ) from error


class Launcher:
    """One function, its table on the device, and its arguments laid out for CUDA.

    `arguments` has a field for each parameter of the function; `table_address` is set here. The
    table is allocated by CUDA itself, past the pools of torch and CuPy: a caller that discards its
    pool's memory to sleep leaves the table, and graphs that captured its address, intact.
    """

    def __init__(
        self,
        function: Any,
        table: NDArray[np.uint64],
        arguments: ctypes.Structure,
        ctas: int,
        threads: int,
        shared_bytes: int = 0,
    ) -> None:
        cuda = import_cupy().cuda
        runtime = cuda.runtime
        self._launch = cuda.driver.launchKernel
        if shared_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        function.compile()
        self._function = function.kernel
        self._table = cuda.Memory(table.nbytes)
        runtime.memcpy(self._table.ptr, table.ctypes.data, table.nbytes, runtime.memcpyHostToDevice)
        self.table_address: int = self._table.ptr
        self.arguments = arguments
        arguments.table_address = self.table_address
        first = ctypes.addressof(arguments)
        offsets = [getattr(type(arguments), name).offset for name, *_ in arguments._fields_]
        self._pointers = (ctypes.c_void_p * len(offsets))(*(first + o for o in offsets))
        self._parameters = ctypes.addressof(self._pointers)
        self._fixed = (ctas, 1, 1, threads, 1, 1, shared_bytes)

    def __call__(self, stream: int) -> None:
        """Launch with the arguments as they are now, which CUDA copies; the device is current."""
        self._launch(self._function.ptr, *self._fixed, stream, self._parameters, 0)
