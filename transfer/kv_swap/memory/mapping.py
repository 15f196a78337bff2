"""One mapping of host memory: its NUMA placement, page-locking in pieces, and release."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import resource
import sys
from pathlib import Path
from typing import Protocol

import numpy as np

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.numa import prefer_node

logger = logging.getLogger(__name__)

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
"""From linux/mman.h, Linux 5.14 and later; Python's mmap lacks them."""

PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
"""From linux/mman.h."""

_CALL_BYTES = 2 << 20

_HUGE_PAGE_BYTES = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def whole_pages(nbytes: int) -> int:
    """Round up to whole system pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def describe_limits() -> str:
    """Describe the limits on locked and on total memory, and the available memory."""
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


def map_memory(nbytes: int, protection: int, fd: int | None, address: int = 0) -> int:
    """Map a file from its start, or anonymous memory, and return the address. Raises `OSError`.

    If given, `address` must be reserved; the new mapping replaces the reservation.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd is None else mmap.MAP_SHARED
    flags |= 0 if protection else _MAP_NORESERVE
    flags |= _MAP_FIXED if address else 0
    if nbytes > sys.maxsize:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    found = _libc.mmap(address, nbytes, protection, flags, -1 if fd is None else fd, 0)
    if found in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found)


def reserve_addresses(nbytes: int) -> int:
    """Reserve addresses, which takes no memory; return the first, where a huge page can begin.

    Raises `OSError` if the process has too few.
    """
    found = map_memory(nbytes + _HUGE_PAGE_BYTES, PROT_NONE, None)
    address = -(-found // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    release_addresses(found, address - found)
    release_addresses(address + nbytes, found + _HUGE_PAGE_BYTES - address)
    return address


def release_addresses(address: int, nbytes: int) -> None:
    """Unmap a range of whole pages, none of them registered."""
    if nbytes:
        _libc.munmap(address, nbytes)


class Mapping:
    """At least `nbytes` of zeroed memory, rounded up to whole system pages.

    The memory is private and anonymous, or shared with other mappings of `fd`, at any address or at
    a reserved one. Pages exist only once they are populated or touched; they come from `numa_node`
    if the system allows it. It stays mapped until `close`. Raises `PinnedMemoryError` if the
    mapping cannot be created.
    """

    _protection = mmap.PROT_READ | mmap.PROT_WRITE

    def __init__(
        self,
        nbytes: int,
        *,
        fd: int | None = None,
        numa_node: int | None = None,
        address: int = 0,
    ) -> None:
        self.nbytes = whole_pages(nbytes)
        self.shared = fd is not None
        try:
            self.address = map_memory(self.nbytes, self._protection, fd, address)
        except OSError as error:
            raise PinnedMemoryError(
                f"cannot map {self.nbytes} bytes of host memory: {error}; {describe_limits()}; "
                f"use a smaller pool or free memory"
            ) from error
        # Children must not inherit the memory: the kernel copies page-locked pages at fork.
        is_private = self._advise(mmap.MADV_DONTFORK)
        # A core dump would be as large as the pool, and reveal users' prompts.
        if not (self._advise(mmap.MADV_DONTDUMP) and is_private):
            logger.warning(
                "the system refuses to keep host memory out of core dumps and forked processes"
            )
        # Huge pages leave fewer pages to lock. Kernels without them refuse this advice.
        self._advise(mmap.MADV_HUGEPAGE)
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

        Touching shared memory that is not available would kill the process. So shared memory is
        populated with system calls, which raise `OSError`, and do nothing before Linux 5.14.
        """
        if not self.shared:
            memory = (ctypes.c_uint8 * nbytes).from_address(self.address + offset)
            pages = np.ctypeslib.as_array(memory)[:: mmap.PAGESIZE]
            pages[:] = 0
            return
        self._fault_in(offset, nbytes, MADV_POPULATE_WRITE)

    def _fault_in(self, offset: int, nbytes: int, advice: int) -> None:
        end = offset + nbytes
        for start in range(offset, end, _CALL_BYTES):
            if _libc.madvise(self.address + start, min(_CALL_BYTES, end - start), advice):
                code = ctypes.get_errno()
                if code != errno.EINVAL:
                    raise OSError(code, os.strerror(code))

    def missing_bytes(self, offset: int, nbytes: int) -> int:
        """Return the bytes that a range still needs; other processes may have allocated some.

        Pages that were swapped out need memory again.
        """
        if not self.shared:
            return nbytes
        pages = np.zeros(nbytes // mmap.PAGESIZE, np.uint8)
        _libc.mincore(self.address + offset, nbytes, pages.ctypes.data)
        return nbytes - int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE

    def discard(self, offset: int) -> None:
        """Return the pages from `offset` to the system, unless other processes may use them."""
        if not self.shared:
            self._advise(mmap.MADV_DONTNEED, offset)

    def _advise(self, advice: int, offset: int = 0) -> bool:
        return not _libc.madvise(self.address + offset, self.nbytes - offset, advice)

    def describe(self) -> str:
        """Describe where the pages come from, for the log."""
        if self._node is not None:
            return f"from NUMA node {self._node}"
        return f"from {'where its creator placed it' if self.shared else 'any NUMA node'}"

    def close(self) -> None:
        """Unmap the memory. Nothing may still be registered, and no access may follow."""
        release_addresses(self.address, self.nbytes)


class PinnedRegistrar(Protocol):
    """Page-locks memory for a device. Several threads call it, but only one at a time per arena.

    `register` and `unregister` raise `RuntimeError` if they fail.
    """

    writes: bool
    """True if it can only lock memory that the process may write to."""

    def for_reading(self) -> PinnedRegistrar:
        """Return a registrar for memory that the device only reads."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock `nbytes` bytes at `address`; may take seconds."""

    def unregister(self, address: int) -> None:
        """Undo the `register` of the same address."""


class Pieces:
    """The registrations of one mapping, which this object owns. Not thread-safe."""

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
        """Register a piece. Raises the registrar's errors."""
        start, end = self.range(piece)
        self._registrar.register(self._mapping.address + start, end - start)
        self._registered.add(piece)
        ready = self.ready_bytes // self._piece_bytes
        while ready in self._registered:
            self.ready_bytes = self.range(ready)[1]
            ready += 1

    def unlock(self, piece: int) -> None:
        """Unregister a piece if it is registered; log a failure."""
        if piece in self._registered:
            self._unregister([piece])

    def unlock_after_gap(self) -> None:
        """Unregister the pieces after `ready_bytes`, and return their pages to the system."""
        ready = -(-self.ready_bytes // self._piece_bytes)
        if self._unregister([piece for piece in self._registered if piece >= ready]):
            self._mapping.discard(self.ready_bytes)

    def close(self) -> bool:
        """Unregister everything and unmap.

        If a piece cannot be unregistered, the device might still write to it: the memory stays
        mapped forever, and False is returned.
        """
        done = self._unregister(sorted(self._registered))
        if done:
            self._mapping.close()
        return done

    def _unregister(self, pieces: list[int]) -> bool:
        """Unregister pieces; return False if that fails for any of them."""
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
