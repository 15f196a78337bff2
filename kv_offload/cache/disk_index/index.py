"""What each slot of a disk holds, and the thread that writes it.

The thread takes all that has come in since its last transaction into the next one. So the file
always shows what there was at one moment, mostly less than a second ago.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_offload.cache.disk_index.changes import Changes
from kv_offload.cache.disk_index.contents import GENERATION_BYTES, DiskContents
from kv_offload.cache.disk_index.file import lock, open_index, refused
from kv_offload.cache.slots import Slots

logger = logging.getLogger(__name__)

COMMIT_SECONDS = 0.5
RETRY_SECONDS = 10.0
"""From a write that failed to the next, which may have every slot to write."""


class DiskIndex:
    """What each slot of a disk holds. One thread calls it; no method waits but `close`."""

    def __init__(
        self, path: Path, description: Mapping[str, str], files: Mapping[str, str], num_slots: int
    ) -> None:
        """Open the file at `path`, or make it. No other engine can until `close`, or a kill.

        What it says is taken over if it has the same `description` of its blocks, the same `files`
        (ids of the ranks' files, by rank), and as many slots.

        Raises `ConfigError` if no file can be used at this path: the folder is missing, there is no
        permission or no space, or another engine uses it.
        """
        generation = secrets.token_bytes(GENERATION_BYTES)
        new = DiskContents(description, files, num_slots, generation)
        with refused(path), contextlib.ExitStack() as opened:
            self._lock = lock(path)
            opened.callback(os.close, self._lock)
            self._database, found, self.reason = open_index(path, new)
            self._inode = _inode(path)
            opened.pop_all()
        self.keys, self.slots = found.keys, found.slots
        """What was there, the least recently used first; `slots` has the slot of each key."""
        self.generation = found.generation
        """Part of the name of every block: new with every file that is made, and by `clear`."""
        self.errors = 0
        """Writes that failed. The first one is logged."""
        self._path = path
        self._changes = Changes(last_use=int(found.used.max(initial=0)))
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._changed, self._urgent, self._closing = (threading.Event() for _ in range(3))
        self._unlinked = False
        self._writer = threading.Thread(target=self._run, name="kv-offload-disk-index", daemon=True)
        self._writer.start()

    def put(self, keys: Sequence[bytes], slots: Slots) -> None:
        """Note that slots hold these keys from now on; the last one is the most recently used."""
        self._add(self._changes.put, slots.tolist(), list(keys))

    def use(self, slots: Slots) -> None:
        """Note that slots were used, the last one most recently."""
        self._add(self._changes.use, slots.tolist())

    def remove(self, slots: Slots) -> None:
        """Note that slots hold nothing any more."""
        self._add(self._changes.remove, slots.tolist())

    def clear(self) -> None:
        """Note that no slot holds anything, and take another `generation`.

        The index ends with this process: what comes now may be of other weights than a restarted
        engine has. The file says so before it has anything of what comes now.
        """
        self.generation = secrets.token_bytes(GENERATION_BYTES)
        self._add(self._changes.reset, self.generation)
        self._urgent.set()

    def close(self, timeout_seconds: float) -> None:
        """Write what is left, and let other engines have the file. To close twice does nothing.

        Where that takes longer, because the disk hangs, the thread is left alone.
        """
        self._closing.set()
        self._changed.set()
        self._urgent.set()
        self._writer.join(timeout_seconds)

    def _add(self, change: Callable[..., None], *arguments: Any) -> None:
        self._queue.append((change, arguments))
        self._changed.set()

    def _run(self) -> None:
        """Write until the index is closed. Only this thread touches the changes and the file."""
        while not self._closing.is_set():
            self._changed.wait()
            self._urgent.wait(COMMIT_SECONDS)
            self._changed.clear()
            self._urgent.clear()
            if not self._write() and not self._closing.is_set():
                self._urgent.wait(RETRY_SECONDS)
                self._changed.set()
        self._write()
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        os.close(self._lock)

    def _write(self) -> bool:
        """Write all that came in and was not written yet; say whether that went well."""
        while self._queue:
            change, arguments = self._queue.popleft()
            change(*arguments)
        if not self._changes or self._unlinked:
            self._changes.forget()
            return True
        try:
            if _inode(self._path) != self._inode:
                raise FileNotFoundError(f"{self._path} was replaced while it was open")
            self._changes.write(self._database)
        except (sqlite3.Error, OSError) as error:
            if self.errors == 0:
                logger.warning(
                    "kv-offload: %s: what is on the disk cannot be noted: %s. The engine goes on, "
                    "but finds less there after a restart. See whether the folder is still there, "
                    "has room, and may be written",
                    self._path,
                    error,
                )
            self.errors += 1
            if self._changes.has_reset:
                # Without a file the next engine begins empty, too. That needs no room on the disk.
                with contextlib.suppress(OSError):
                    self._path.unlink()
                    self._unlinked = True
            return False
        self._changes.forget()
        return True


def _inode(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
