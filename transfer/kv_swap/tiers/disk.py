"""A tier in a file on a disk: records in the format of `record.py`, moved by `workers.py`.

Records are not flushed. A record that was not written completely, for any reason, is a mismatch
when it is read.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import explain
from kv_swap.tiers.engine import TierEngine
from kv_swap.tiers.file import open_file, revoke
from kv_swap.tiers.region import FileDescription
from kv_swap.tiers.transfers import NUM_THREADS, Transfers, chunk_slots


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
            way: [Transfers(file) for _ in range(count)] for way, count in NUM_THREADS.items()
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
