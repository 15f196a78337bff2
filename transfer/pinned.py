"""The host arena: memory for slots, registered with CUDA where asked, and how long it lives.

The memory belongs to one owner object. Everything that may touch it holds the owner: the arena,
every view it hands out, and the state of every engine until its last copy has ended. When the last
of them lets go, the memory is first unregistered and then unmapped; nothing else frees it, and
there is deliberately no `close`. (A view that did not hold its memory is how vLLM issue 45528
overwrote weights.)
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from transfer.device import device_index, import_cupy
from transfer.errors import PinnedMemoryError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_REGISTRATION_BYTES = 16 << 30
"""Bytes of one registration: one of 512 GiB or more is known to fail."""

_HOST_REGISTER_PORTABLE_MAPPED = 0x1 | 0x2
"""cudaHostRegisterPortable | cudaHostRegisterMapped: pinned for all contexts, seen by kernels."""

_LEAKED: list[mmap.mmap] = []
"""Memory that could not be unregistered: it is never unmapped, the device might still write it."""


class PinnedRegistrar(Protocol):
    """Page-locks memory for a device. `RuntimeError` from either call means that it failed."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock `nbytes` from `address`; may take seconds."""

    def unregister(self, address: int) -> None:
        """Undo the `register` of the same address."""


class CudaRegistrar:
    """Registers host memory so that kernels of `device` reach it through its host address.

    CuPy's `hostRegister` rather than torch's `cudart().cudaHostRegister`: it raises with the CUDA
    error's name instead of returning a code, and the kernels need CuPy anyway.

    Raises `DeviceError` without CuPy, `PinnedMemoryError` where the device cannot use host
    pointers.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy: Any = import_cupy()
        self._index = device_index(device)
        runtime = self._cupy.cuda.runtime
        attribute = runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not runtime.deviceGetAttribute(attribute, self._index):
            raise PinnedMemoryError(
                f"CUDA device {self._index} cannot reach registered host memory through its host "
                f"address (cudaDevAttrCanUseHostPointerForRegisteredMem is 0, as under WSL), which "
                f"the copy kernels need; run on Linux with a driver that supports it"
            )

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock `nbytes` from `address`; releases the GIL meanwhile."""
        with self._cupy.cuda.Device(self._index):
            runtime = self._cupy.cuda.runtime
            runtime.hostRegister(address, nbytes, _HOST_REGISTER_PORTABLE_MAPPED)

    def unregister(self, address: int) -> None:
        """Undo `register`. No copy may be running: the arena's owner sees to that."""
        with self._cupy.cuda.Device(self._index):
            self._cupy.cuda.runtime.hostUnregister(address)


class HostArena:
    """Memory for `num_slots` slots of `slot_bytes`, rounded up to whole pages of the system only.

    Private anonymous memory, zero at first. With `register` every byte is page-locked here, which
    touches all of it; without, pages appear as they are written.

    Raises `PinnedMemoryError` if the memory cannot be mapped or page-locked; nothing stays behind.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, register: PinnedRegistrar | None
    ) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise PinnedMemoryError(
                f"an arena needs at least 1 slot of 1 byte, got {num_slots} of {slot_bytes} bytes"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.registered = register is not None
        self._owner = _Owner(num_slots * slot_bytes, register)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    @property
    def address(self) -> int:
        """Address of slot 0; slot `s` lies `s * slot_bytes` further on. Keeps nothing alive."""
        return self._owner.address

    def view(self) -> NDArray[np.uint8]:
        """Return the slots as uint8 of shape `(num_slots, slot_bytes)`, without a copy.

        The array and whatever is derived from it keep the memory alive, also without the arena.
        """
        return np.asarray(self._owner).reshape(self.num_slots, self.slot_bytes)


class _Owner:
    """Owns one mapping; what NumPy makes of `__array_interface__` holds this object as its base."""

    def __init__(self, nbytes: int, registrar: PinnedRegistrar | None) -> None:
        mapped_bytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise PinnedMemoryError(
                f"cannot map {mapped_bytes} bytes of host memory: {error}; {_limits()}; "
                f"configure a smaller host cache or free memory"
            ) from error
        # Children must not inherit the arena: the kernel copies page-locked memory at fork.
        memory.madvise(mmap.MADV_DONTFORK)
        # Advice only, refused by kernels without transparent huge pages: fewer pages to lock.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
        }
        registered: list[int] = []
        if registrar is not None:
            _register(registrar, self.address, mapped_bytes, registered)
        finalizer = weakref.finalize(self, _release, memory, registrar, registered)
        # At interpreter exit views and copies may still be alive; the system reclaims the memory.
        finalizer.atexit = False


def _register(registrar: PinnedRegistrar, address: int, nbytes: int, registered: list[int]) -> None:
    """Register `nbytes` in pieces, all or nothing, noting each piece's address in `registered`."""
    for offset in range(0, nbytes, _REGISTRATION_BYTES):
        piece_bytes = min(_REGISTRATION_BYTES, nbytes - offset)
        try:
            registrar.register(address + offset, piece_bytes)
        except RuntimeError as error:
            for done in reversed(registered):
                registrar.unregister(done)
            raise PinnedMemoryError(
                f"cannot page-lock {nbytes} bytes of host memory: registering bytes {offset} to "
                f"{offset + piece_bytes} failed with {error}; {_limits()}; configure a smaller "
                f"host cache, raise the limit, or free memory"
            ) from error
        registered.append(address + offset)


def _release(
    memory: mmap.mmap, registrar: PinnedRegistrar | None, registered: Sequence[int]
) -> None:
    """Unregister, then unmap. Runs once nobody can reach the memory any more."""
    for address in registered:
        assert registrar is not None
        try:
            registrar.unregister(address)
        except RuntimeError:
            logger.exception("cannot unregister host memory at %#x; it stays mapped", address)
            _LEAKED.append(memory)
    if memory not in _LEAKED:
        memory.close()


def _limits() -> str:
    """Describe what bounds page-locked memory here, for an error message."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    parts = [
        f"ulimit -l is {'unlimited' if locked == resource.RLIM_INFINITY else f'{locked} bytes'}"
    ]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError):
            parts.append(f"cgroup limit is {Path(path).read_text().strip()} bytes")
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                parts.append(line)
    return ", ".join(parts)
