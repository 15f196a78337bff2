"""Memory mapped by several processes on one host that need the same bytes.

It is a memfd, which disappears once the last process that has it has ended in any way. Other
processes of the same user open it through the `/proc` entry of its creator's handle.

Memory model. Host memory is coherent between processes, and with a device that has completed its
copy: a process that learns of a store's completion through any message sees its bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.mapping import describe_limits, whole_pages
from kv_swap.memory.numa import prefer_node


class SharedMemory:
    """A handle on `nbytes` of shared memory, for `HostArena(shared=...)`; a context manager.

    An arena needs the handle only during construction. Others attach with the `name`, valid while
    the creator's handle is open.
    """

    def __init__(self, fd: int, nbytes: int, name: str) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self.name = name

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Create exactly `nbytes` of zeroed memory, to which other processes may attach.

        Allocates no pages yet. Raises `PinnedMemoryError` if the machine does not have the memory.
        """
        mapped_bytes = whole_pages(nbytes)
        fd = os.memfd_create("kv-swap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Linux grants shared memory of any size, and kills a process when memory runs out. But
            # it refuses a private mapping that could never be filled, so try one.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mmap.mmap(-1, mapped_bytes, flags=flags).close()
            os.ftruncate(fd, mapped_bytes)
            # If the file shrank, every process that maps it would be killed.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise PinnedMemoryError(
                f"cannot share {mapped_bytes} bytes of host memory: {error}; {describe_limits()}; "
                f"use a smaller pool or free memory"
            ) from error
        found = os.fstat(fd)
        return cls(fd, nbytes, f"/proc/{os.getpid()}/fd/{fd} {found.st_dev}:{found.st_ino}")

    @classmethod
    def attach(cls, name: str, nbytes: int) -> SharedMemory:
        """Open the memory of this name, which another process has created.

        Raises `PinnedMemoryError` if it cannot be opened, or if it has a different size.
        """
        path, _, file = name.rpartition(" ")
        try:
            found = os.stat(path)
            if f"{found.st_dev}:{found.st_ino}" != file:  # the same path in another container
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PinnedMemoryError(
                f"cannot open shared memory of {nbytes} bytes: {error}: the process that created "
                f"it has ended, belongs to another user, or runs on another host or in another "
                f"container"
            ) from error
        if found.st_size != whole_pages(nbytes):
            os.close(fd)
            raise PinnedMemoryError(
                f"shared memory {name!r} has {found.st_size} bytes, this process wants {nbytes}: "
                f"have all that share it ask for the same"
            )
        return cls(fd, nbytes, name)

    def fileno(self) -> int:
        """Return the file descriptor to map, valid until `close`."""
        return self._fd

    def prefer_node(self, node: int, part: int, num_parts: int) -> bool:
        """Place one of `num_parts` equal parts on a NUMA node while it has free memory.

        Only affects pages that no process has touched. Returns False if the system refuses.
        """
        pages = whole_pages(self.nbytes) // mmap.PAGESIZE
        first, end = (pages * bound // num_parts * mmap.PAGESIZE for bound in (part, part + 1))
        if first == end:
            return True
        # The policy applies to the file's range, not just to the mapping through which it is set.
        with mmap.mmap(self._fd, end - first, flags=mmap.MAP_SHARED, offset=first) as memory:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            return prefer_node(address, end - first, node)

    def close(self) -> None:
        """Close the handle. Idempotent. Existing mappings stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
