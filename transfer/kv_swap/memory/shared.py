"""Memory mapped by several processes of one host that need the same bytes.

It is a memfd, which disappears when the last process that has it ends, in whatever way. Other
processes of the same user get it from its creator through a socket in Linux's abstract namespace,
which vanishes with the creator.

Memory model. Host memory is coherent between processes, and with a device that has completed its
copy: a process that learns about a store's completion through any message sees its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import struct
import threading
import time

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.mapping import describe_limits, whole_pages
from kv_swap.memory.numa import prefer_node

_ANSWER_SECONDS = 5.0
"""Seconds that the other process may take to answer once it is connected."""

_RETRY_SECONDS = 0.02


class SharedMemory:
    """A handle on shared memory of `nbytes`, for `HostArena(shared=...)`; a context manager.

    An arena needs the handle only during construction. The creator keeps its handle open until all
    peers have attached.
    """

    def __init__(self, fd: int, nbytes: int, offer: _Offer | None) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self._offer = offer

    @classmethod
    def create(cls, name: str, nbytes: int, num_peers: int) -> SharedMemory:
        """Create exactly `nbytes` of zeroed memory, and offer it to `num_peers` other processes.

        Allocates no pages yet. Raises `PinnedMemoryError` if the machine does not have the memory,
        or if the name is in use on this host.
        """
        mapped_bytes = whole_pages(nbytes)
        fd = os.memfd_create(f"kv-swap-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Linux promises shared memory of any size, and kills a process when it runs out. But it
            # refuses a private mapping that could never be filled, so try one.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            mmap.mmap(-1, mapped_bytes, flags=flags).close()
            os.ftruncate(fd, mapped_bytes)
            # A file that shrinks would kill every process that has mapped it.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise PinnedMemoryError(
                f"cannot share {mapped_bytes} bytes of host memory: {error}; {describe_limits()}; "
                f"use a smaller pool or free memory"
            ) from error
        try:
            offer = _Offer(name, os.dup(fd), num_peers) if num_peers else None
        except OSError as error:
            os.close(fd)
            raise PinnedMemoryError(
                f"cannot offer shared memory as {name!r}: {error}; give each shared memory of "
                f"the host a name of its own, of less than 90 letters"
            ) from error
        return cls(fd, nbytes, offer)

    @classmethod
    def attach(cls, name: str, nbytes: int, timeout_seconds: float) -> SharedMemory:
        """Get the memory that another process creates under `name`; waits up to the timeout for it.

        Raises `PinnedMemoryError` if none is offered in time, or if it has a different size.
        """
        deadline = time.monotonic() + timeout_seconds
        while (fd := _ask(name)) is None:
            if time.monotonic() >= deadline:
                raise PinnedMemoryError(
                    f"no process of this user offered shared memory {name!r} of {nbytes} bytes "
                    f"within {timeout_seconds:.0f} s: the process that creates it did not start or "
                    f"runs on another host or in another network namespace; see its log"
                )
            time.sleep(_RETRY_SECONDS)
        size = os.fstat(fd).st_size
        if size != whole_pages(nbytes):
            os.close(fd)
            raise PinnedMemoryError(
                f"shared memory {name!r} has {size} bytes, this process wants {nbytes}: have "
                f"all that share it ask for the same"
            )
        return cls(fd, nbytes, None)

    def fileno(self) -> int:
        """Return the file descriptor to map, valid until `close`."""
        return self._fd

    def prefer_node(self, node: int, part: int, num_parts: int) -> bool:
        """Place one of `num_parts` equal parts on a NUMA node while that has free memory.

        Only affects pages that no process has touched. Returns False if the system refuses.
        """
        pages = whole_pages(self.nbytes) // mmap.PAGESIZE
        first, end = (pages * bound // num_parts * mmap.PAGESIZE for bound in (part, part + 1))
        if first == end:
            return True
        # The policy belongs to the range of the file, not to the mapping through which it was set.
        with mmap.mmap(self._fd, end - first, flags=mmap.MAP_SHARED, offset=first) as memory:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            return prefer_node(address, end - first, node)

    def close(self) -> None:
        """Close the handle and end the offer. Idempotent. Existing mappings stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._offer is not None:
            self._offer.end()

    def __enter__(self) -> SharedMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Offer:
    """Hands out `fd`, which it owns, on a thread until `num_peers` processes have taken it."""

    def __init__(self, name: str, fd: int, num_peers: int) -> None:
        self._fd = fd
        self._peers_left = num_peers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_address(name))
            self._listener.listen(num_peers)
        except OSError:
            self._listener.close()
            os.close(fd)
            raise
        self._thread = threading.Thread(target=self._serve, name="kv-swap-share", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener:
            while self._peers_left:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    break  # `end` was called
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_ANSWER_SECONDS)
                    if _is_own_user(connection):
                        socket.send_fds(connection, [b"m"], [self._fd])
                        self._peers_left -= connection.recv(1) == b"k"
            os.close(self._fd)

    def end(self) -> None:
        """End the offer and free the name; waits for a peer that is currently taking the memory."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _ANSWER_SECONDS)


def _ask(name: str) -> int | None:
    """Return a file descriptor from the process that offers `name`; `None` means: try again."""
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(_address(name))
            if not _is_own_user(connection):
                return None
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            if fds:
                connection.send(b"k")
        except OSError:
            for fd in fds:
                os.close(fd)
            return None
    return fds[0] if fds else None


def _address(name: str) -> str:
    return f"\0kv-swap/{name}"


def _is_own_user(connection: socket.socket) -> bool:
    """Ask the kernel whether the process at the other end belongs to this user."""
    credentials = struct.Struct("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return bool(credentials.unpack(raw)[1] == os.getuid())
