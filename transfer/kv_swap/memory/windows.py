"""Windows: address ranges after an arena where other processes' arenas are mapped for reading.

All windows have the same length, at least the arena's. So slot `s` of window `w` is
`(w + 1) * window_slots + s` slots after slot 0 of the arena, and a copy needs only this number to
read it. Windows begin where a piece of page-locked memory may begin.

A thread maps files, and page-locks and unlocks them piece by piece. After locking a piece, it
leaves the driver alone for `REST` times as long as that took, because launches wait for the call.
Meanwhile it faults in the pages of the next piece.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.mapping import (
    Pieces,
    PinnedRegistrar,
    release_addresses,
    reserve_addresses,
    whole_pages,
)
from kv_swap.memory.reading import ReadMapping
from kv_swap.memory.registration import REST, choose_piece_bytes

logger = logging.getLogger(__name__)

UNLOCK_REST = 1.0
"""Replaces `REST` for unlocking: the memory's owner is gone, and its successor may need it."""

MAX_RESERVED_BYTES = 32 << 40
"""A process has 128 TiB of addresses, some of which CUDA reserves for all mappable memory."""

_EXIT_SECONDS = 10.0
"""Maximum seconds to wait at process exit for a driver call."""


def window_slots(num_slots: int, slot_bytes: int) -> int:
    """Return the length of an arena's windows in slots."""
    unit = math.lcm(choose_piece_bytes(slot_bytes), slot_bytes) // slot_bytes
    return -(-num_slots // unit) * unit


@dataclass(eq=False, slots=True)
class _Peer:
    """A file, or the first part of it, in a window."""

    path: str
    num_slots: int
    mapping: ReadMapping | None = None
    pieces: Pieces | None = None
    """None without page-locking."""
    next_piece: int = 0
    is_populated: bool = False
    """True if the pages of `next_piece` are faulted in."""
    is_done: bool = False
    """True if no more of it will be mapped or locked."""


class Windows:
    """At most `count` windows; fewer, or none, if the process has too few addresses.

    The arena itself is mapped at `arena_address`. `ready_slots` has, by window, the number of
    slots, from slot 0, that copies may read. The arena owns this object and calls `release` once
    its copies have ended.
    """

    def __init__(
        self, count: int, num_slots: int, slot_bytes: int, register: PinnedRegistrar | None
    ) -> None:
        self.window_slots = window_slots(num_slots, slot_bytes)
        self._slot_bytes = slot_bytes
        self._piece_bytes = choose_piece_bytes(slot_bytes)
        self._register = None if register is None else register.for_reading()
        self._window_bytes = self.window_slots * slot_bytes
        # Slot numbers are int32, and the largest number is not used for a slot.
        most = min((2**31 - 1) // self.window_slots, MAX_RESERVED_BYTES // self._window_bytes) - 1
        wanted, count = count, min(count, most)
        self.arena_address = 0
        while count > 0 and not self.arena_address:
            try:
                self.arena_address = reserve_addresses((count + 1) * self._window_bytes)
            except OSError:
                count //= 2
        self.ready_slots = [0] * max(0, count)
        if count < wanted:
            logger.info(
                "this process has addresses for %d windows of %d bytes, not for %d: it reads the "
                "slots of fewer others",
                len(self.ready_slots),
                self._window_bytes,
                wanted,
            )
        self._unused = self.arena_address + whole_pages(num_slots * slot_bytes)
        # Only the thread uses these three. Windows are stuck if they could not be unmapped.
        self._mapped: dict[int, _Peer] = {}
        self._stuck: set[int] = set()
        self._rests_until = 0.0
        # Guards everything below. Its lock is reentrant: `release` can run as a finaliser.
        self._changed = threading.Condition()
        self._wanted: dict[int, _Peer] = {}
        self._thread: threading.Thread | None = None
        self._stopping = self._released = False
        self._process = os.getpid()

    def __len__(self) -> int:
        return len(self.ready_slots)

    def attach(self, window: int, path: str, num_slots: int) -> None:
        """Map the first `num_slots` slots of the arena in a file, in the background.

        First detaches another file. The owner must have allocated these slots, because this
        allocates no pages. The file must not shrink. Errors are logged; the slots before an error
        become ready.
        """
        with self._changed:
            wanted = self._wanted.get(window)
            if wanted is None or wanted.path != path:
                self.ready_slots[window] = 0
                self._wanted[window] = _Peer(path, num_slots)
                self._changed.notify_all()
                if self._thread is None:
                    self._start()

    def detach(self, window: int) -> None:
        """Unmap a window in the background. No copy may still read it."""
        with self._changed:
            self.ready_slots[window] = 0
            self._wanted.pop(window, None)
            self._changed.notify_all()

    def release(self) -> None:
        """Unmap everything, on the thread if it was ever started."""
        with self._changed:
            self._released = True
            self._wanted.clear()
            self.ready_slots = [0] * len(self)
            self._changed.notify_all()
            if self._thread is None:
                self._release_addresses()

    def _start(self) -> None:
        # A thread inside the driver could crash when the interpreter exits.
        atexit.register(self._stop)
        self._thread = threading.Thread(target=self._work, name="kv-swap-window", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has no thread
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_EXIT_SECONDS)

    def _release_addresses(self) -> None:
        if self.arena_address and not self._mapped:
            end = self.arena_address + (len(self) + 1) * self._window_bytes
            release_addresses(self._unused, end - self._unused)

    def _work(self) -> None:
        while (found := self._wait()) is not None:
            act, window, peer = found
            try:
                act(window, peer)
            except Exception as error:  # noqa: BLE001 - other windows must still be served
                if act == self._unmap_more:
                    self._stuck.add(window)
                self._failed(window, peer, error)
        atexit.unregister(self._stop)

    def _wait(self) -> tuple[Callable[[int, _Peer], None], int, _Peer] | None:
        """Block until there is something to do, and return it; None if the thread should end."""
        with self._changed:
            while not self._stopping:
                if (found := self._next()) is not None:
                    rest = self._rests_until - time.monotonic()
                    if rest <= 0 or self._released or found[0] == self._populate:
                        return found
                    self._changed.wait(rest)
                    continue
                if self._released:
                    self._release_addresses()
                    return None
                self._changed.wait()
            return None

    def _next(self) -> tuple[Callable[[int, _Peer], None], int, _Peer] | None:
        """Return the next action. Unmapping comes first: the owner may have removed its arena."""
        for window, peer in self._mapped.items():
            if self._wanted.get(window) is not peer and window not in self._stuck:
                return self._unmap_more, window, peer
        for window, peer in self._wanted.items():
            if not peer.is_done and window not in self._stuck:
                return self._lock_more if peer.is_populated else self._populate, window, peer
        return None

    def _populate(self, window: int, peer: _Peer) -> None:
        """Map a file, or fault in the pages of its next piece."""
        if peer.mapping is None:
            peer.mapping = mapping = self._map(window, peer)
            self._mapped[window] = peer
            if self._register is None:
                self._publish(window, peer, peer.num_slots)
            else:
                peer.pieces = Pieces(mapping, self._register, self._piece_bytes)
            return
        assert peer.pieces is not None, "a window without page-locking is mapped at once"
        start, end = peer.pieces.range(peer.next_piece)
        peer.mapping.populate(start, end - start)
        peer.is_populated = True

    def _lock_more(self, window: int, peer: _Peer) -> None:
        assert peer.pieces is not None, "only populated pieces are locked"
        self._call_driver(peer.pieces.lock, peer.next_piece, REST)
        peer.is_populated = False
        peer.next_piece += 1
        self._publish(window, peer, peer.pieces.ready_bytes // self._slot_bytes)

    def _map(self, window: int, peer: _Peer) -> ReadMapping:
        if not 0 < peer.num_slots <= self.window_slots:
            raise PinnedMemoryError(
                f"{peer.num_slots} slots are wanted, and a window has {self.window_slots}"
            )
        writable = self._register is not None and self._register.writes
        address = self.arena_address + (window + 1) * self._window_bytes
        nbytes = peer.num_slots * self._slot_bytes
        return ReadMapping(address, nbytes, Path(peer.path), writable=writable)

    def _call_driver(self, call: Callable[[int], None], piece: int, rest: float) -> None:
        began = time.monotonic()
        call(piece)
        ended = time.monotonic()
        self._rests_until = ended + rest * (ended - began)

    def _publish(self, window: int, peer: _Peer, ready_slots: int) -> None:
        ready_slots = min(peer.num_slots, ready_slots)
        with self._changed:
            if self._wanted.get(window) is peer:
                self.ready_slots[window] = ready_slots
                peer.is_done = ready_slots == peer.num_slots
        if peer.is_done:
            logger.info("copies can read all %d slots of %s", ready_slots, peer.path)

    def _unmap_more(self, window: int, peer: _Peer) -> None:
        if peer.pieces is not None and peer.next_piece:
            peer.next_piece -= 1
            self._call_driver(peer.pieces.unlock, peer.next_piece, UNLOCK_REST)
            return
        assert peer.mapping is not None, "only mapped windows are unmapped"
        is_unmapped = True
        if peer.pieces is not None:
            is_unmapped = peer.pieces.close()
        else:
            peer.mapping.close()
        if is_unmapped:
            del self._mapped[window]
        else:
            self._stuck.add(window)

    def _failed(self, window: int, peer: _Peer, error: Exception) -> None:
        peer.is_done = True
        logger.warning(
            "copies can read %d of %d slots of %s: %s",
            self.ready_slots[window],
            peer.num_slots,
            peer.path,
            error,
        )


def readable(
    slots: NDArray[np.signedinteger], ready_slots: int, windows: Windows | None
) -> NDArray[np.bool_]:
    """Return a mask of the numbers that are ready slots of an arena or its windows."""
    if windows is None or not len(windows):
        return (slots >= 0) & (slots < ready_slots)
    limits = np.array([ready_slots, *windows.ready_slots])
    window, slot = np.divmod(slots, windows.window_slots)
    exists = (window >= 0) & (window < len(limits))
    found: NDArray[np.bool_] = exists & (slot < limits[np.where(exists, window, 0)])
    return found
