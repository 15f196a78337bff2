"""Finds the other engines of a host pool, reads their directories and leases their slots.

Nothing here waits for another engine. In another engine's directory it writes only marks of used
slots and its own leases. A slot of another engine is read between `PeerDirectory.lease` and
`PeerDirectory.release`:

    owner, before it writes a slot      reader, before it reads a slot
    clears the sum of its entry         reads the sum, and then the key
    orders memory                       sets its byte in the leases of the slot
    reads the leases of the slot        orders memory
    and does not write if it is leased  and does not read if the sum has changed

So at least one of them sees the other. No two publications have the same sum, so an unchanged sum
means that the slot had the key all the time, and has it until the lease ends. This holds at
whichever instruction owner or reader stops or ends. The lock of a reader's seat (`READER`) shows
when the reader has ended: then the owner ends its leases. See docs/design/host_pool.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.directory import (
    DIRECTORY,
    MAX_PEERS,
    Contents,
    open_directory,
    order_memory,
    read_names,
)
from kv_offload.cache.seats import READER, find_seats, lock_file, seat_number
from kv_offload.cache.slot_table import begin_reads, end_reads
from kv_offload.cache.slots import Mask, Slots

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0
"""Interval at which the seats of a pool are listed. It delays the first read from a new engine, and
the unmapping of an arena that was removed."""


class PeerDirectory:
    """The directory of another seat, which an engine writes or has left.

    The scheduler looks keys up in it and leases slots. Any thread may read the properties.
    """

    def __init__(
        self, seat: Path, contents: Contents, inode: int, files: Mapping[int, str], reader: int
    ) -> None:
        self.seat, self.files = seat, files
        self.number = seat_number(seat)
        self.contents, self.inode = contents, inode
        self._leases = contents.leases[:, reader]
        # Leases by slot. Zeros from the system take no memory until they are written.
        self._held = np.zeros(contents.num_slots, np.int32)
        self.num_leases = 0
        """Leases that have not been released."""

    @classmethod
    def open(cls, seat: Path, kinds: Mapping[int, str], reader: int) -> PeerDirectory | None:
        """Open the directory of a seat; None if it has none for arenas of these kinds.

        `reader` is the seat of this engine, whose leases only this process may set. Leases that an
        earlier process left are ended.
        """
        inode, contents = _inode(seat), open_directory(seat)
        if not inode or contents is None:
            return None
        files = read_names(contents.files)
        is_alike = all(files.get(rank, "").startswith(f"{kind}.") for rank, kind in kinds.items())
        peer = cls(seat, contents, inode, files, reader)
        # It may have been replaced between the two calls.
        if not is_alike or not peer.is_current:
            return None
        peer._leases[np.flatnonzero(peer._leases)] = 0
        return peer

    @property
    def is_current(self) -> bool:
        """True while it is the directory of the seat: another engine may have replaced it."""
        return _inode(self.seat) == self.inode

    @property
    def usable_slots(self) -> int:
        """The slots below this have memory on all ranks; 0 once the directory is retired."""
        contents = self.contents
        return 0 if contents.is_retired else int(contents.header["usable_slots"])

    def lease(self, slots: Slots, words: NDArray[np.uint64]) -> Mask:
        """Lease distinct slots in which keys were found, whose names have these `words`.

        Returns which of them have these keys, and do so until `release`.
        """
        contents = self.contents
        entries, generation = contents.entries, contents.generation
        order_memory()
        sums = entries["sum"][slots]
        order_memory()
        good: Mask = (sums != 0) & contents.have(slots, words)
        self._leases[slots] = 1
        order_memory()
        good &= entries["sum"][slots] == sums
        order_memory()
        if contents.is_retired or contents.generation != generation or not self.is_current:
            good[:] = False
        self.hold(slots[good])
        refused = slots[~good]
        self._leases[refused[self._held[refused] == 0]] = 0
        return good

    def hold(self, slots: Slots) -> None:
        """Hold leased slots once more, until another `release`."""
        begin_reads(self._held, slots)
        self.num_leases += len(slots)

    def release(self, slots: Slots) -> None:
        """End one lease of each slot, for which no read may still run."""
        idle = end_reads(self._held, slots)
        self.num_leases -= len(slots)
        order_memory()
        self._leases[idle] = 0


class PeerDirectories:
    """The directories of the other seats of a pool whose arenas match `arenas`, given by rank.

    A thread adds new ones and drops removed ones, until `close` or the end of this object, and
    calls `changed`. There are none while another process, which lost its ranks and is ending, still
    has the leases of this seat.
    """

    def __init__(
        self, arenas: Mapping[int, Path], changed: Callable[[], None] | None = None
    ) -> None:
        (self._seat,) = {arena.parent for arena in arenas.values()}
        self._kinds = {rank: _kind(arena.name) for rank, arena in arenas.items()}
        self._changed: Callable[[], None] | None = None
        self.all: tuple[PeerDirectory, ...] = ()
        """Replaced as a whole, so any thread may read it."""
        # By seat and inode; kept alive by the holders of leases.
        self._opened: WeakValueDictionary[tuple[Path, int], PeerDirectory] = WeakValueDictionary()
        self._dropped: list[PeerDirectory] = []
        self._reader: Callable[[], object] | None = None
        """Releases the lock of this seat's leases."""
        self._reader_inode = 0
        self._refreshing = threading.Lock()
        self._ended = threading.Event()
        self._finalizer = weakref.finalize(self, self._ended.set)
        self.refresh()
        self._changed = changed
        threading.Thread(
            target=_refresh,
            args=(weakref.ref(self), self._ended),
            name="kv-offload-peers",
            daemon=True,
        ).start()

    def refresh(self) -> None:
        """List the seats of the pool."""
        self._dropped.clear()
        with self._refreshing:
            if self._ended.is_set() or seat_number(self._seat) >= MAX_PEERS:
                return
            found: tuple[PeerDirectory, ...] = ()
            with contextlib.suppress(OSError):  # the seat or the pool was removed
                if self._may_read():
                    seats = [one for one in find_seats(self._seat.parent) if one != self._seat]
                    named = [one for one in seats if seat_number(one) < MAX_PEERS]
                    found = tuple(filter(None, map(self._find, named)))
            if found == self.all:
                return
            self.all = found
        if self._changed is not None:
            self._changed()

    def drop(self, peer: PeerDirectory) -> None:
        """Release a directory that nothing reads. The thread unmaps it, because that takes long."""
        self._dropped.append(peer)

    def _may_read(self) -> bool:
        """Return whether this process has the leases of its seat; locks them if it can.

        False once the seat was removed: another engine may have its number. Raises `OSError`.
        """
        if self._reader is None:
            lock = lock_file(self._seat / READER)
            if lock is None:
                return False
            self._reader = weakref.finalize(self, os.close, lock)
            self._reader_inode = os.fstat(lock).st_ino
        return os.stat(self._seat / READER, follow_symlinks=False).st_ino == self._reader_inode

    def _find(self, seat: Path) -> PeerDirectory | None:
        """Return the directory of a seat, if its arenas match and exist.

        A directory is not opened twice, because that would end the leases of the first time.
        """
        peer = self._opened.get((seat, _inode(seat)))
        if peer is None:
            peer = PeerDirectory.open(seat, self._kinds, seat_number(self._seat))
            if peer is None:
                return None
            self._opened[seat, peer.inode] = peer
        # An engine that starts may have removed an arena.
        has_arenas = all((seat / name).exists() for name in peer.files.values())
        return peer if has_arenas else None

    def close(self) -> None:
        """Drop all directories, and end the thread and all leases."""
        self._ended.set()
        with self._refreshing:
            self.all = ()
            if self._reader is not None:
                self._reader()


def arena_kinds(seat: Path) -> dict[int, str]:
    """Return the kinds of a seat's arenas by rank; seats of a pool with equal kinds are peers."""
    contents = open_directory(seat)
    files = {} if contents is None else read_names(contents.files)
    return {rank: _kind(name) for rank, name in files.items()}


def _inode(seat: Path) -> int:
    """Return the inode of a seat's directory; 0 if there is none."""
    try:
        return os.stat(seat / DIRECTORY, follow_symlinks=False).st_ino
    except OSError:
        return 0


def _kind(arena: str) -> str:
    """Return an arena's name without its token; the rest describes the layout."""
    return arena.rpartition(".")[0]


def _refresh(peers: weakref.ref[PeerDirectories], ended: threading.Event) -> None:
    while not ended.wait(REFRESH_SECONDS):
        alive = peers()
        if alive is None:
            return
        try:
            alive.refresh()
        except Exception:
            logger.exception("kv-offload: the engines of the host pool cannot be listed")
        del alive
