"""A tier in a file on a disk: records in the format of `record.py`, moved by `workers.py`.

Records are not flushed. A record that was not written completely, for any reason, is a mismatch
when it is read.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError, explain
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.engine import TierDirection, TierEngine
from kv_swap.tiers.file import OpenFile, open_file, revoke
from kv_swap.tiers.record import PAGE_BYTES
from kv_swap.tiers.region import FileDescription
from kv_swap.tiers.workers import Mover, MoveResult, Row

NUM_THREADS = {TierDirection.PROMOTE: 4, TierDirection.DEMOTE: 3}
"""Requests wait for promotions, but not for demotions. With three writers, one can compute a
checksum while two write: slots of 2 MiB reached 0.93 of the rate of plain writes; with two writers,
0.84 (two cores, a virtual disk that takes 4.2 GB/s)."""

CHUNK_BYTES = 8 << 20
"""Bytes of slots that a thread takes from a job at a time. Adjacent records need one call."""

RETRY_SECONDS = 5.0
"""Seconds for which records are tried one by one after a call for all of them failed. If each one
takes half a minute to fail, as on some disks, the thread must not try all."""

_MAX_BUFFERS = 1024
"""Maximum buffers per call: Linux's IOV_MAX. A record has at most three."""

Buffers = list[memoryview]


def chunk_slots(slot_bytes: int) -> int:
    """Return the number of slots in a chunk."""
    return max(1, min(CHUNK_BYTES // slot_bytes, _MAX_BUFFERS // 3))


class DiskMover(Mover):
    """Moves records on one thread, which owns memory for the headers of a chunk.

    The kernel copies directly between the file and the arena's slots.
    """

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._records = file.content.records
        # Direct I/O needs whole pages. A forked child must not share them: it could get data that
        # is read for this process.
        num_headers = chunk_slots(file.content.slot_bytes)
        pages = HostArena(num_headers + 1, PAGE_BYTES, register=None).view()
        self._headers = [page.data for page in pages[:num_headers]]
        self._pad = pages[num_headers].data[: self._records.pad_bytes]

    def move(self, direction: TierDirection, rows: Sequence[Row]) -> MoveResult:
        """See `Mover`. Adjacent records are moved in one call.

        A demotion reads its arena slots twice, for the checksum and for the file; they must not
        change in between. A promotion writes its arena slots before it verifies the bytes.
        """
        outcome = MoveResult()
        for neighbours in _split(rows):
            self._move(direction, neighbours, outcome)
        return outcome

    def _move(self, direction: TierDirection, rows: Sequence[Row], outcome: MoveResult) -> None:
        moved_bytes, cause = self._call(direction, rows)
        whole = moved_bytes // self._records.record_bytes
        if direction is TierDirection.PROMOTE:
            self._verify(rows[:whole], outcome)
        rest = rows[whole:]
        if not rest:
            return
        error = self._error(direction, rest[0], cause)
        until = time.monotonic() + RETRY_SECONDS
        for row in rest:
            # A failed call does not say which record failed, so try them one by one.
            if len(rest) > 1 and cause is not None and time.monotonic() < until:
                self._move(direction, [row], outcome)
            else:
                outcome.fail(row, error)

    def _call(self, direction: TierDirection, rows: Sequence[Row]) -> tuple[int, OSError | None]:
        """Read or write adjacent records; return the bytes moved, and the error if some were not.

        At the end of the file, the error is None.
        """
        demotes = direction is TierDirection.DEMOTE
        buffers = self._buffers(rows)
        if demotes:
            for row, header, slot in zip(rows, buffers[::3], buffers[1::3], strict=True):
                header[:] = self._records.header(row.name, slot)
        file, call = self._file, os.pwritev if demotes else os.preadv
        # With buffered I/O, a written page can leave the page cache only once it is on the disk.
        flags = os.RWF_DSYNC if demotes and not file.direct else 0
        offset = file.content.offset(rows[0].tier_slot)
        nbytes = len(rows) * self._records.record_bytes
        moved_bytes = 0
        try:
            while moved_bytes < nbytes:
                more = call(file.fd, buffers, offset + moved_bytes, flags)
                if more == 0:
                    break
                moved_bytes += more
                buffers = _rest(buffers, more)
        except OSError as error:
            return moved_bytes, error
        finally:
            if not file.direct:
                # Free the page cache for others: these bytes are already in the arena.
                os.posix_fadvise(file.fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        return moved_bytes, None

    def _buffers(self, rows: Sequence[Row]) -> Buffers:
        """Return each row's header, slot and padding (which may be empty), in order."""
        buffers: Buffers = []
        for row, header in zip(rows, self._headers, strict=False):
            buffers += (header, self._file.arena[row.arena_slot].data, self._pad)
        return buffers

    def _verify(self, rows: Sequence[Row], outcome: MoveResult) -> None:
        for row, header in zip(rows, self._headers, strict=False):
            data = self._file.arena[row.arena_slot]
            if not self._records.verify(header, data, row.name):
                outcome.failed.append(row.number)
                outcome.mismatches += 1

    def _error(self, direction: TierDirection, row: Row, cause: OSError | None) -> TierError:
        demotes = direction is TierDirection.DEMOTE
        size, nbytes = os.fstat(self._file.fd).st_size, self._file.content.nbytes
        # Direct reads fail at an unaligned end of the file.
        if cause is None or (size < nbytes and not demotes):
            why = f"the file has {size} of {nbytes} bytes: it was cut"
        else:
            why = explain(cause)
        verb = "write" if demotes else "read"
        return TierError(f"cannot {verb} slot {row.tier_slot} of {self._file.path}: {why}")


def _split(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield runs of rows whose tier slots are adjacent."""
    first = 0
    for last in range(1, len(rows) + 1):
        if last == len(rows) or rows[last].tier_slot != rows[last - 1].tier_slot + 1:
            yield rows[first:last]
            first = last


def _rest(buffers: Buffers, nbytes: int) -> Buffers:
    """Return the buffers without their first `nbytes` bytes."""
    for index, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[index + 1 :]]
        nbytes -= len(buffer)
    return []


class DiskTier(TierEngine):
    """Moves slots between an arena and a file, which it creates or reuses.

    `path` is the file. `arena` is a view of a `HostArena`, uint8 of shape `(slots, slot_bytes)`,
    which keeps the memory alive. `description` contains everything that determines the meaning of a
    slot's bytes. The file takes all its space at once, and is locked while a thread can use it.

    `file_id` is random, drawn when the file was started. `continued` is True if an existing file is
    reused; if not, `reason` says why. `direct` is True if the disk reads and writes the arena
    directly; if slots are not a multiple of 512 bytes, or the filesystem refuses, the kernel copies
    through its page cache.

    Raises `TierError` if the file is unavailable: no folder, no permission, no space, a read-only
    filesystem, something else with that name, or another engine that uses it.
    """

    def __init__(
        self,
        path: Path,
        num_slots: int,
        arena: NDArray[np.uint8],
        description: Mapping[str, str],
    ) -> None:
        file = open_file(path, num_slots, arena, description)
        self.file_id = file.content.file_id
        self.reason = file.reason
        self.continued = not file.reason
        self.direct = file.direct
        movers = {
            way: [DiskMover(file) for _ in range(count)] for way, count in NUM_THREADS.items()
        }
        release = functools.partial(os.close, file.fd)
        self._fd, self._path, self._content = file.fd, file.path, file.content
        self._revoked: Future[None] | None = None
        super().__init__(num_slots, arena.shape, movers, chunk_slots(arena.shape[1]), release)

    def revoke(self, timeout_seconds: float) -> str:
        """See `TierEngine`. The file gets another id on disk; the id in memory stays the same.

        After a timeout, the write continues on its thread, and the next call waits for it.
        """
        path, revoked = self._path, self._revoked
        if self._closed:
            return f"{path} is closed"
        if revoked is None or (revoked.done() and revoked.exception() is not None):
            revoked = Future()
            arguments = os.dup(self._fd), self._content, revoked
            thread = threading.Thread(
                target=_revoke, args=arguments, name="kv-swap-revoke", daemon=True
            )
            thread.start()
            self._revoked = revoked
        futures.wait([revoked], timeout_seconds)
        if not revoked.done():
            return f"{path} could not be written within {timeout_seconds:g} s"
        if (error := revoked.exception()) is None:
            return ""
        why = explain(error) if isinstance(error, OSError) else repr(error)
        return f"cannot write {path}: {why}"


def _revoke(fd: int, content: FileDescription, revoked: Future[None]) -> None:
    """Revoke a file's id and close its descriptor, which keeps the file locked until then."""
    try:
        with os.fdopen(fd, "r+b", buffering=0):
            revoke(fd, content)
    except Exception as error:  # noqa: BLE001 - the caller must get any error
        revoked.set_exception(error)
    else:
        revoked.set_result(None)
