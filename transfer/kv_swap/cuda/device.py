"""Access to one CUDA device: CuPy, the device index, and page-locking of host memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

from kv_swap.errors import DeviceError, PinnedMemoryError

if TYPE_CHECKING:
    import torch


_HOST_REGISTER_PORTABLE_MAPPED = 0x1 | 0x2
"""cudaHostRegisterPortable | cudaHostRegisterMapped: pinned in all contexts, visible to kernels."""

_HOST_REGISTER_READ_ONLY = 0x8
_READ_ONLY_SUPPORTED = 113
"""cudaHostRegisterReadOnly, and cudaDevAttrHostRegisterReadOnlySupported."""

_CAPTURE_MODE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


KERNEL_CACHE = "CUPY_CACHE_DIR"
KERNEL_CACHE_REMEDY = (
    f"CuPy keeps compiled kernels in ~/.cupy: set {KERNEL_CACHE} to a folder that this user may "
    "write"
)


def import_cupy() -> Any:
    """Return the module `cupy`.

    Raises `DeviceError` with the package to install, or with the variable to set if CuPy cannot
    create its folder.
    """
    try:
        import cupy
    except ImportError as error:
        import torch

        major = 12 if str(torch.version.cuda).startswith("12.") else 13
        raise DeviceError(
            f"CuPy, which compiles and launches the copy kernels, cannot be imported: {error}; "
            f"install it with pip install cupy-cuda{major}x"
        ) from error
    except OSError as error:  # CuPy 14 creates the folder on import, CuPy 13 later
        raise DeviceError(f"CuPy cannot be imported: {error}; {KERNEL_CACHE_REMEDY}") from error
    return cupy


def make_kernel_cache() -> None:
    """Create the folder for compiled kernels, as CuPy would. Raises `DeviceError`.

    An existing folder can be read-only if it contains all kernels. With `CUPY_CACHE_IN_MEMORY=1`,
    CuPy 13 needs no folder; CuPy 14 does, and reports that itself.
    """
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        return
    folder = os.environ.get(KERNEL_CACHE, os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise DeviceError(
            f"there is no folder for compiled kernels: {error}; {KERNEL_CACHE_REMEDY}"
        ) from error


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device, or of the current device if `device` has no index."""
    import torch

    if device.type != "cuda":
        raise DeviceError(f"device {device} is not a CUDA device; use the host engine for it")
    index: int = torch.cuda.current_device() if device.index is None else device.index
    return index


def shared_memory_bytes(device: torch.device) -> int:
    """Return the maximum shared memory of a CTA in bytes. Raises `DeviceError`."""
    runtime = import_cupy().cuda.runtime
    attribute = runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin
    return int(runtime.deviceGetAttribute(attribute, device_index(device)))


class OnDevice:
    """Calls functions while `device` is current, which it nearly always is already."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = import_cupy().cuda
        self.index = device_index(device)
        self._current_device = cuda.runtime.getDevice
        self._device = cuda.Device

    def __call__(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function with these arguments."""
        if self._current_device() == self.index:
            function(*arguments)
        else:
            with self._device(self.index):
                function(*arguments)


class CudaRegistrar:
    """Registers host memory so that kernels on `device` can use its host addresses.

    Raises `DeviceError` without CuPy, `PinnedMemoryError` if the device cannot use host addresses.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy: Any = import_cupy()
        self._index = device_index(device)
        self._flags = _HOST_REGISTER_PORTABLE_MAPPED
        self.writes = True
        runtime = self._cupy.cuda.runtime
        attribute = runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not runtime.deviceGetAttribute(attribute, self._index):
            raise PinnedMemoryError(
                f"CUDA device {self._index} cannot reach registered host memory through its host "
                f"address (cudaDevAttrCanUseHostPointerForRegisteredMem is 0, as under WSL); run "
                f"on Linux with a driver that supports it"
            )

    def for_reading(self) -> CudaRegistrar:
        """Return a registrar for memory that the device only reads.

        If the device does not support read-only registration, the process must be able to write
        the memory.
        """
        found = copy(self)
        if self._cupy.cuda.runtime.deviceGetAttribute(_READ_ONLY_SUPPORTED, self._index):
            found._flags |= _HOST_REGISTER_READ_ONLY
            found.writes = False
        return found

    @property
    def pci_bus_id(self) -> str:
        """The device's PCI address, such as `0000:1A:00.0`."""
        return str(self._cupy.cuda.runtime.deviceGetPCIBusId(self._index))

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock `nbytes` bytes at `address`. Blocks and releases the GIL."""
        with self._cupy.cuda.Device(self._index), _allowed_beside_captures():
            runtime = self._cupy.cuda.runtime
            runtime.hostRegister(address, nbytes, self._flags)

    def unregister(self, address: int) -> None:
        """Undo `register`. The arena's owner ensures that no copy is running."""
        with self._cupy.cuda.Device(self._index), _allowed_beside_captures():
            self._cupy.cuda.runtime.hostUnregister(address)


@contextlib.contextmanager
def _allowed_beside_captures() -> Iterator[None]:
    """Keep calls on this thread from invalidating a CUDA graph capture on another thread.

    Torch captures in mode `global`, in which a call on any thread ends the capture if it might
    synchronise. Threads in relaxed mode are exempt. Raises `RuntimeError` from CUDA.
    """
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _exchange_capture_mode(mode)
    try:
        yield
    finally:
        _exchange_capture_mode(mode)


def _exchange_capture_mode(mode: ctypes.c_int) -> None:
    """Swap this thread's capture mode with `mode`. CuPy does not expose this call."""
    code = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if code:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with CUresult {code}")
