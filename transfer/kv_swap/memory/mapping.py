"""One mapping of host memory: its NUMA placement, page-locking in pieces, and release."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import resource
from pathlib import Path
from typing import Protocol

import numpy as np

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.numa import prefer_node

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23
"""From linux/mman.h, Linux 5.14 and newer; Python's mmap does not name it."""

_CALL_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def whole_pages(nbytes: int) -> int:
    """Round up to whole pages of the system."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def describe_limits() -> str:
    """Describe the limits on locked memory and on total memory, and the available memory."""
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


class Mapping:
    """At least `nbytes` of zeroed memory, rounded up to whole system pages.

    It is private and anonymous, or shared with the other mappings of `fd`. Pages exist only once
    they are populated or touched; they come from `numa_node` if the system allows it. Raises
    `PinnedMemoryError` if the mapping cannot be created.
    """

    def __init__(self, nbytes: int, *, fd: int | None = None, numa_node: int | None = None) -> None:
        self.nbytes = whole_pages(nbytes)
        self.shared = fd is not None
        try:
            if fd is None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._memory = mmap.mmap(-1, self.nbytes, flags=flags)
            else:
                self._memory = mmap.mmap(fd, self.nbytes, flags=mmap.MAP_SHARED)
        except (OSError, OverflowError, ValueError) as error:
            raise PinnedMemoryError(
                f"cannot map {self.nbytes} bytes of host memory: {error}; {describe_limits()}; "
                f"use a smaller pool or free memory"
            ) from error
        # Children must not inherit it, because the kernel copies page-locked memory at fork.
        self._memory.madvise(mmap.MADV_DONTFORK)
        # A core dump would be as large as the pool, and reveal users' prompts.
        self._memory.madvise(mmap.MADV_DONTDUMP)
        # With huge pages there are fewer pages to lock. Kernels without them refuse this advice.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._node = numa_node
        if numa_node is not None and not prefer_node(self.address, self.nbytes, numa_node):
            self._node = None

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of a range whose ends are page-aligned; releases the GIL.

        Private memory is touched; nothing may have written it, or write it during the call. The
        system call that allocates pages would hold the lock on the process's memory map, and every
        `mmap` would wait for it. In a virtual machine, an `mmap` took 113 ms (median) next to calls
        of 32 MiB, 5 ms next to calls of 2 MiB, and 0.03 ms next to touches. All three allocated 0.5
        GiB/s (22 Nov 2026).

        A touch of shared memory that is not available would kill the process. So shared memory is
        populated with system calls, which raise `OSError`, and do nothing before Linux 5.14.
        """
        if not self.shared:
            pages = np.frombuffer(self._memory, np.uint8, nbytes, offset)[:: mmap.PAGESIZE]
            pages[:] = 0
            return
        end = offset + nbytes
        for start in range(offset, end, _CALL_BYTES):
            length = min(_CALL_BYTES, end - start)
            if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE):
                code = ctypes.get_errno()
                if code != errno.EINVAL:
                    raise OSError(code, os.strerror(code))

    def missing_bytes(self, offset: int, nbytes: int) -> int:
        """Return the bytes of a range without pages; shared memory may have pages of others."""
        if not self.shared:
            return nbytes
        pages = np.zeros(nbytes // mmap.PAGESIZE, np.uint8)
        _libc.mincore(self.address + offset, nbytes, pages.ctypes.data)
        return nbytes - int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE

    def discard(self, offset: int) -> None:
        """Return the pages at and after `offset` to the system, unless others may use them."""
        if not self.shared:
            self._memory.madvise(mmap.MADV_DONTNEED, offset, self.nbytes - offset)

    def describe(self) -> str:
        """Describe where the pages come from, for the log."""
        if self._node is not None:
            return f"from NUMA node {self._node}"
        return f"from {'where its creator placed it' if self.shared else 'any NUMA node'}"

    def close(self) -> None:
        """Unmap the memory. Nothing may be registered, and no access may follow."""
        self._memory.close()


_LEAKED: list[Mapping] = []
"""Memory that could not be unregistered. It is never unmapped: the device might still write it."""


class PinnedRegistrar(Protocol):
    """Page-locks memory for a device. Several threads call it, one at a time per arena.

    Both calls raise `RuntimeError` if they fail.
    """

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock `nbytes` bytes at `address`; may take seconds."""

    def unregister(self, address: int) -> None:
        """Undo the `register` of the same address."""


class Pieces:
    """The registrations of one mapping, which this object owns. For one thread at a time."""

    def __init__(self, mapping: Mapping, registrar: PinnedRegistrar, piece_bytes: int) -> None:
        self.count = -(-mapping.nbytes // piece_bytes)
        self.ready_bytes = 0
        """Bytes registered without a gap from the start; any thread may read it."""
        self._mapping = mapping
        self._registrar = registrar
        self._piece_bytes = piece_bytes
        self._registered: set[int] = set()

    def range(self, piece: int) -> tuple[int, int]:
        """Return the offsets where a piece begins and ends."""
        start = piece * self._piece_bytes
        return start, min(start + self._piece_bytes, self._mapping.nbytes)

    def lock(self, piece: int) -> None:
        """Register a piece. Passes on the registrar's errors."""
        start, end = self.range(piece)
        self._registrar.register(self._mapping.address + start, end - start)
        self._registered.add(piece)
        ready = self.ready_bytes // self._piece_bytes
        while ready in self._registered:
            self.ready_bytes = self.range(ready)[1]
            ready += 1

    def unlock_after_gap(self) -> None:
        """Unregister the pieces after `ready_bytes`, and return their pages to the system."""
        ready = -(-self.ready_bytes // self._piece_bytes)
        if self._unregister([piece for piece in self._registered if piece >= ready]):
            self._mapping.discard(self.ready_bytes)

    def close(self) -> None:
        """Unregister everything and unmap. What cannot be unregistered stays mapped for good."""
        if self._unregister(sorted(self._registered)):
            self._mapping.close()
        else:
            _LEAKED.append(self._mapping)

    def _unregister(self, pieces: list[int]) -> bool:
        """Undo the registration of pieces; return False if that fails for any."""
        done = True
        for piece in pieces:
            address = self._mapping.address + self.range(piece)[0]
            try:
                self._registrar.unregister(address)
            except RuntimeError:
                logger.exception("cannot unregister host memory at %#x; it stays mapped", address)
                done = False
            else:
                self._registered.discard(piece)
        return done
