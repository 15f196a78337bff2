"""Page-locks a mapping piece by piece in the background, and unlocks it when its users are gone.

Each thread takes the next few pieces, allocates their pages, which takes most of the time, and
registers them one by one. Threads hold the mapping through this object, but not its users. The last
thread or `release`, whichever is later, unregisters and unmaps. So no thread touches unmapped
memory, and `release` waits for no thread.

Allocating shared pages holds the lock on the process's memory map; registering also holds the
driver's lock, so the launches of an engine's step wait for it. Therefore both are kept short. One
thread at a time registers, and then leaves the driver alone for `REST` times as long as that took:
a starting engine makes hundreds of driver calls per second.
"""

from __future__ import annotations

import atexit
import logging
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.mapping import Mapping, Pieces, PinnedRegistrar, describe_limits

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Maximum bytes of one registration, unless a slot is larger. Launches wait for it: 5 to 8 ms for
256 MiB on the host of an H200, longer than a step of decodes (bench/swap/pinning.py)."""

LARGEST_PIECE_BYTES = 256 << 20
"""Slots up to this size do not cross pieces: the copy engine refuses copies that cross them."""

BATCH_BYTES = 256 << 20
"""Bytes of the pieces that a thread takes at a time. It checks free memory before each batch."""

NUM_THREADS = 4
"""On an H200's host, one thread locked 5 GiB/s, two 9, four 12 and eight 10."""

REST = 7.0
"""On an H200's host, an engine with a pool of 50 GiB started 0.3 s later than one without; with a
rest of 3 and pieces of 256 MiB, 1.0 s later. The pool took 9 to 13 s instead of 5 to 7."""

POPULATE_BYTES = 32 << 20
"""Bytes that a thread allocates before it checks whether to stop: some milliseconds, or 0.2 s in a
virtual machine that has not used its memory recently."""

CAREFUL_BYTES = 16 << 30
"""With less than this above the headroom, a thread checks before every `POPULATE_BYTES`, not just
before a batch: 8 ranks may be allocating 8 GiB in batches. A check takes 0.3 ms (2 cores)."""

RETRY_SECONDS = 5.0
"""Seconds between two checks by a thread that found too little memory."""

PROGRESS_SECONDS = 10.0
"""Seconds between two progress lines in the log."""

_EXIT_SECONDS = 10.0
"""Maximum seconds to wait at process exit for running registrations."""


def choose_piece_bytes(slot_bytes: int) -> int:
    """Return the bytes of a piece: whole pages and, within `LARGEST_PIECE_BYTES`, whole slots."""
    unit = math.lcm(slot_bytes, mmap.PAGESIZE)
    if unit > LARGEST_PIECE_BYTES:
        unit = mmap.PAGESIZE
    return max(1, PIECE_BYTES // unit) * unit


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """The memory available on this host, and the headroom that a growing pool leaves free.

    `read` returns the bytes that this process could take now, and the source of that figure.
    Several threads call it concurrently. An error in it counts as a failure to lock memory.
    """

    read: Callable[[], tuple[int, str]]
    headroom_bytes: int

    def spare_bytes(self, nbytes: int) -> tuple[int, str]:
        """Return the bytes left above the headroom after taking `nbytes`, and figures as text."""
        available_bytes, source = self.read()
        figures = (
            f"{available_bytes} bytes are available ({source}), {nbytes} are wanted next, and "
            f"{self.headroom_bytes} must stay free"
        )
        return available_bytes - nbytes - self.headroom_bytes, figures


class Registration:
    """Page-locks one mapping, which this object owns from now on."""

    def __init__(
        self,
        mapping: Mapping,
        registrar: PinnedRegistrar,
        piece_bytes: int,
        room: MemoryRoom | None = None,
    ) -> None:
        self._mapping = mapping
        self._pieces = Pieces(mapping, registrar, piece_bytes)
        self._pieces_of_batch = max(1, BATCH_BYTES // piece_bytes)
        self._room = room
        self._started = self._last_line = time.monotonic()
        self._background = False
        self._driver_turn = threading.Lock()
        # Guards everything below. Its lock is reentrant: `release` can run as a finaliser anywhere.
        self._changed = threading.Condition()
        self._next_piece = 0
        self._failures: dict[int, Exception] = {}
        # Bytes of claimed batches without pages yet, by first piece: they still count as free.
        self._missing: dict[int, int] = {}
        self._short = False
        self._running_threads = 0
        self._stopping = False
        self._released = False
        self._process = os.getpid()

    @property
    def ready_bytes(self) -> int:
        """Bytes registered without a gap from the start."""
        return self._pieces.ready_bytes

    def start(self, *, background: bool) -> None:
        """Register everything here, or with `background` one batch here and the rest on threads.

        Raises `PinnedMemoryError` if that fails on this thread. Other threads log failures; memory
        registered before a failure stays usable.
        """
        while (batch := self._claim()) is not None:
            self._register(batch)
            if background:
                break
        if self._failures:
            (cause,) = self._failures.values()
            raise PinnedMemoryError(self._describe_failure()) from cause
        self._background = background
        if background and self._next_piece < self._pieces.count:
            self._start_threads()

    def wait(self, timeout_seconds: float | None) -> bool:
        """Block until no thread is running; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running_threads, timeout_seconds)

    def release(self) -> None:
        """Stop, unregister and unmap on the last running thread. The memory must not be in use."""
        with self._changed:
            self._stopping = self._released = True
            self._changed.notify_all()  # threads that wait for room
            if self._running_threads:
                return
        self._pieces.close()

    def _start_threads(self) -> None:
        left = -(-(self._pieces.count - self._next_piece) // self._pieces_of_batch)
        count = min(NUM_THREADS, left, len(os.sched_getaffinity(0)))
        # A thread inside the driver could crash when the interpreter exits.
        atexit.register(self._stop)
        with self._changed:  # no thread may claim a batch or end before all are counted
            for _ in range(count):
                threading.Thread(target=self._work, name="kv-swap-pin", daemon=True).start()
                self._running_threads += 1

    def _work(self) -> None:
        while (batch := self._claim()) is not None:
            self._register(batch)
            self._log_progress()
        with self._changed:
            if self._running_threads > 1:
                self._running_threads -= 1
                return
        self._settle()
        with self._changed:
            self._running_threads = 0
            self._changed.notify_all()
            released = self._released
        if released:
            self._pieces.close()

    def _log_progress(self) -> None:
        now = time.monotonic()
        with self._changed:
            if self._is_over() or now - self._last_line < PROGRESS_SECONDS:
                return
            self._last_line = now
        logger.info(
            "page-locked %.1f of %.1f GiB after %.0f s; the pool grows meanwhile",
            self.ready_bytes / (1 << 30),
            self._mapping.nbytes / (1 << 30),
            now - self._started,
        )

    def _claim(self) -> range | None:
        """Return the pieces of the next batch; None if no batch should begin."""
        with self._changed:
            first = self._next_piece
            if self._is_over() or first == self._pieces.count:
                return None
            self._next_piece = min(first + self._pieces_of_batch, self._pieces.count)
            batch = range(first, self._next_piece)
            start, end = self._range(batch)
            self._missing[first] = end - start
            return batch

    def _range(self, batch: range) -> tuple[int, int]:
        return self._pieces.range(batch[0])[0], self._pieces.range(batch[-1])[1]

    def _is_over(self) -> bool:
        return self._stopping or bool(self._failures)

    def _register(self, batch: range) -> None:
        start, end = self._range(batch)
        piece = batch[0]
        spare_bytes = 0
        try:
            for offset in range(start, end, POPULATE_BYTES):
                if spare_bytes < CAREFUL_BYTES:
                    spare_bytes = self._wait_for_room(batch, offset)
                if self._stopping or spare_bytes < 0:
                    return
                nbytes = min(POPULATE_BYTES, end - offset)
                self._mapping.populate(offset, nbytes)
                with self._changed:
                    self._missing[batch[0]] = max(0, self._missing[batch[0]] - nbytes)
            with self._driver_turn:
                for piece in batch:
                    # A later failure leaves the pieces before it usable.
                    if self._stopping or min(self._failures, default=piece) < piece:
                        return
                    began = time.monotonic()
                    self._pieces.lock(piece)
                    if self._background:
                        time.sleep(REST * (time.monotonic() - began))
        except Exception as error:  # noqa: BLE001 - a thread that ends silently would leak memory
            with self._changed:
                self._failures[piece] = error
        finally:
            with self._changed:
                del self._missing[batch[0]]
                self._changed.notify_all()  # threads that wait for room

    def _wait_for_room(self, batch: range, offset: int) -> int:
        """Block until a batch's pages after `offset` leave the headroom free; return spare bytes.

        Earlier batches come first, so that slots become ready in order. Existing pages need no
        room: a process must not wait for shared pages that a faster one has already allocated. A
        negative result means that the thread should end.
        """
        if self._room is None or not self._background:
            return sys.maxsize
        first = batch[0]
        nbytes_left = self._range(batch)[1] - offset
        while True:
            missing_bytes = self._mapping.missing_bytes(offset, nbytes_left)
            with self._changed:
                if self._is_over():
                    return -1
                self._missing[first] = missing_bytes
                nbytes = sum(missing for p, missing in self._missing.items() if p <= first)
                lowest = min(self._missing)
            if not nbytes:
                return 0
            spare_bytes, figures = self._room.spare_bytes(nbytes)
            if spare_bytes >= 0:
                return spare_bytes
            with self._changed:
                # Earlier batches may still succeed; then the figure would be too small.
                warns = not self._short and first == lowest
                self._short |= warns
            if warns:
                logger.warning(
                    "host memory is short: the pool keeps %d of %d bytes, and grows when memory is "
                    "free: %s; free memory, or use a smaller pool",
                    self.ready_bytes,
                    self._mapping.nbytes,
                    figures,
                )
            with self._changed:  # until something changes, or until the next check
                deadline = time.monotonic() + RETRY_SECONDS
                while not self._is_over() and min(self._missing) == lowest:
                    if not self._changed.wait(deadline - time.monotonic()):
                        break

    def _stop(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has no threads, and one may have held the lock at the fork
        with self._changed:
            self._stopping = True
            self._changed.notify_all()  # threads that wait for room
        self.wait(_EXIT_SECONDS)

    def _settle(self) -> None:
        """End the background work on its last thread: undo unusable registrations, and report."""
        atexit.unregister(self._stop)
        if self._failures:
            self._pieces.unlock_after_gap()
            logger.error("%s", self._describe_failure())
        elif self.ready_bytes == self._mapping.nbytes:
            where, seconds = self._mapping.describe(), time.monotonic() - self._started
            logger.info("page-locked %d bytes %s, in %.1f s", self.ready_bytes, where, seconds)

    def _describe_failure(self) -> str:
        piece = min(self._failures)
        start, end = self._pieces.range(piece)
        kept = f"only the first {self.ready_bytes} are used; " if self._background else ""
        return (
            f"cannot page-lock {self._mapping.nbytes} bytes of host memory: registering bytes "
            f"{start} to {end} failed with {self._failures[piece]}; {kept}"
            f"{describe_limits()}; use a smaller pool, raise the limit, or free memory"
        )
