"""The index of a disk's slots, and the thread that writes it.

Each transaction of the thread includes all changes since the last one. So the file always shows a
consistent state, usually less than a second old.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from kv_offload.cache.disk_index.changes import Changes
from kv_offload.cache.disk_index.contents import GENERATION_BYTES, DiskContents
from kv_offload.cache.disk_index.file import end_index, lock, open_index, refused
from kv_offload.cache.slots import Slots

logger = logging.getLogger(__name__)

COMMIT_SECONDS = 0.5
RETRY_SECONDS = 10.0
"""Delay after a failed write; the next attempt may have every slot to write."""


class DiskIndex:
    """The key of each slot of a disk. Called from one thread.

    Only `wait_ended` and `close` block.
    """

    def __init__(
        self, path: Path, description: Mapping[str, str], files: Mapping[str, str], num_slots: int
    ) -> None:
        """Open the file at `path`, or create it.

        No other engine can open it until `close` or a kill. Its contents are taken over if
        `description` (of the blocks), `files` (ids of the ranks' files, by rank) and `num_slots`
        match.

        Raises `ConfigError` if no file can be used at this path: the folder is missing, there is no
        permission or no space, or another engine uses it.
        """
        generation = secrets.token_bytes(GENERATION_BYTES)
        new = DiskContents(description, files, num_slots, generation)
        with refused(path), contextlib.ExitStack() as opened:
            self._lock = lock(path)
            opened.callback(os.close, self._lock)
            self._database, found, self.reason = open_index(path, new)
            opened.callback(self._database.close)
            # Descriptor of the file itself, wherever it is moved. Closing it releases SQLite's
            # locks.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            opened.pop_all()
        self.keys, self.slots = found.keys, found.slots
        """The keys found, least recently used first; `slots` has the slot of each."""
        self.generation = found.generation
        """Part of the name of every block: new with every created file and every `clear`."""
        self.errors = 0
        """Number of failed writes. The first one is logged."""
        self.problem = ""
        """Why the last attempt to end the file after `clear` failed."""
        self._path = path
        self._written_generation = found.generation
        self._changes = Changes(last_use=int(found.used.max(initial=0)))
        self._changing = threading.Lock()
        self._unwritten = Changes(last_use=0)  # used by the thread alone
        self._changed, self._urgent, self._closing = (threading.Event() for _ in range(3))
        self._cleared, self._ended = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._run, name="kv-offload-disk-index", daemon=True)
        self._writer.start()

    def put(self, keys: Sequence[bytes], slots: Slots) -> None:
        """Record that slots now hold these keys; the last one is the most recently used."""
        with self._changing:
            self._changes.put(slots.tolist(), keys)
        self._changed.set()

    def use(self, slots: Slots) -> None:
        """Record that slots were used, the last one most recently."""
        with self._changing:
            self._changes.use(slots.tolist())
        self._changed.set()

    def remove(self, slots: Slots) -> None:
        """Record that slots no longer hold anything."""
        with self._changing:
            self._changes.remove(slots.tolist())
        self._changed.set()

    def clear(self) -> None:
        """Drop all keys, choose another `generation`, and have the thread end the file.

        Blocks stored after this may belong to other weights than those of a restarted engine. So
        the new generation exists in this process alone: no restart can name a block of it, whatever
        is in the file. Once the file has ended, a restart cannot name an earlier block either;
        `wait_ended` reports that.
        """
        self.generation = secrets.token_bytes(GENERATION_BYTES)
        self._cleared.set()
        self._changed.set()
        self._urgent.set()

    def wait_ended(self, timeout_seconds: float) -> bool:
        """Block until the file has durably ended after `clear`; False after a timeout."""
        return self._ended.wait(timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write pending changes, and release the file for other engines.

        A second call does nothing. If the disk hangs for longer than the timeout, the thread is
        abandoned.
        """
        self._closing.set()
        self._changed.set()
        self._urgent.set()
        self._writer.join(timeout_seconds)

    def _run(self) -> None:
        """Write until the index is closed. Only this thread touches the file."""
        while not self._closing.is_set():
            self._changed.wait()
            self._urgent.wait(COMMIT_SECONDS)
            self._changed.clear()
            self._urgent.clear()
            if not self._work() and not self._closing.is_set():
                self._urgent.wait(RETRY_SECONDS)
                self._changed.set()
        self._work()
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        os.close(self._file)
        os.close(self._lock)

    def _work(self) -> bool:
        """Write all pending changes, or end the file; return whether that succeeded."""
        with self._changing:
            changes, self._changes = self._changes, Changes(self._changes.last_use)
        try:
            if not self._cleared.is_set():
                self._write(changes)
            elif not self._ended.is_set():
                end_index(self._path, self._file, self._database)
                self._ended.set()
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread must not end
            self.errors += 1
            if self._cleared.is_set():
                self.problem = f"{self._path} cannot be removed or emptied: {error}"
            elif self.errors == 1:
                logger.warning(
                    "kv-offload: %s: the disk index cannot be written: %s. The engine "
                    "continues, but a restart finds fewer blocks. Check that the folder exists, "
                    "has room and is writable",
                    self._path,
                    error,
                )
            return False
        return True

    def _write(self, changes: Changes) -> None:
        self._unwritten.add(changes)
        if not self._unwritten:
            return
        found, own = self._path.stat(), os.fstat(self._file)
        if not os.path.samestat(found, own):
            raise FileNotFoundError(f"{self._path} was replaced while it was open")
        self._unwritten.write(self._database, self._written_generation)
        self._unwritten.forget()
