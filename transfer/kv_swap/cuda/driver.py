"""Driver calls that gated copies need and CuPy does not expose.

Each call queues work on a stream, given by its handle, and returns: copies of page-locked memory do
not block the host while the stream's queue has room. Calls take microseconds and keep the GIL: a
thread that released it could wait milliseconds to get it back while another thread computes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from kv_swap.errors import DeviceError

_SRC_ACCESS_ORDER_STREAM = 1
_BATCH_VERSION, _VALUE_VERSION, _COPY_VERSION = 12080, 11070, 4000
"""CUDA versions whose signatures are used here. CUDA 13 changed the batch copy's signature, but
drivers still have the older one."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """Bindings of libcuda. Raises `DeviceError` if it is missing or too old.

    Every method raises `RuntimeError` with the driver's name for the error.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.PyDLL("libcuda.so.1")
            self._find: Any = self._library.cuGetProcAddress_v2
        except (OSError, AttributeError) as error:
            raise DeviceError(
                f"the NVIDIA driver has no cuGetProcAddress, which came with 12.0: {error}"
            ) from error
        handle, word, size = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_size_t
        self._write: Any = self._function(
            "cuStreamWriteValue32", _VALUE_VERSION, handle, ctypes.c_uint64, word, ctypes.c_uint
        )
        copy_types = (ctypes.c_uint64, ctypes.c_uint64, size, handle)
        self._copy: Any = self._function("cuMemcpyAsync", _COPY_VERSION, *copy_types)
        batch_types = (*[handle] * 3, size, handle, handle, size, handle, handle)
        self._copy_batch: Any = self._function("cuMemcpyBatchAsync", _BATCH_VERSION, *batch_types)
        if self._write is None or self._copy is None:
            raise DeviceError("the NVIDIA driver has no stream memory operations: update it")
        # All batches share these values and only read them, except for the index of a failed copy,
        # which is read right after the call. ctypes passes them faster than plain numbers.
        self._attributes = _Attributes(src_access_order=_SRC_ACCESS_ORDER_STREAM)
        self._first, self._failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        of_all = ctypes.c_void_p(ctypes.addressof(self._attributes))
        first = ctypes.c_void_p(ctypes.addressof(self._first))
        failed = ctypes.c_void_p(ctypes.addressof(self._failed))
        self._shared = (of_all, first, ctypes.c_size_t(1), failed)
        self._one = (word(1), ctypes.c_uint(0))

    @property
    def has_batches(self) -> bool:
        """True if the driver accepts many copies in one call: 12.8 and later."""
        return self._copy_batch is not None

    def write_one(self, stream: int, address: int) -> None:
        """Queue a write of the 32-bit word 1."""
        if code := self._write(stream, address, *self._one):
            raise self._error("cuStreamWriteValue32", code)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Queue one copy of `nbytes` bytes."""
        if code := self._copy(destination, source, nbytes, stream):
            raise self._error("cuMemcpyAsync", code, f" (one copy of {nbytes} bytes)")

    def copy_batch(
        self, destinations: int, sources: int, sizes: int, count: int, stream: int
    ) -> None:
        """Queue `count` copies, from the addresses of three arrays of 64-bit words.

        The call has read the arrays when it returns.
        """
        if code := self._copy_batch(destinations, sources, sizes, count, *self._shared, stream):
            which = f" (copy {self._failed.value} of {count})"
            raise self._error("cuMemcpyBatchAsync", code, which)

    def _function(self, name: str, version: int, *types: Any) -> Any:
        """Return a function with a CUDA version's signature; None if the driver lacks it."""
        found, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._find(
            name.encode(),
            ctypes.byref(found),
            ctypes.c_int(version),
            ctypes.c_uint64(0),
            ctypes.byref(status),
        )
        if code or not found.value:
            return None
        return ctypes.PYFUNCTYPE(ctypes.c_int, *types)(found.value)

    def _error(self, call: str, code: int, more: str = "") -> RuntimeError:
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        said = name.value.decode() if name.value else f"CUresult {code}"
        return RuntimeError(f"{call}: {said}{more}")


@cache
def load_driver() -> Driver:
    """Return the bindings, loaded once per process. Raises `DeviceError`."""
    return Driver()
