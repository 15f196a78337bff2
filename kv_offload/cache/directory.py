"""Which key is in which slot of an arena that outlives its process, in memory beside it.

FOLDER/directory        a header of `HEADER_BYTES`, then `ENTRY_BYTES` for each slot

One process writes it: the scheduler of the engine that has the arena. A process that ends, at any
instruction, leaves a directory that is true, for an entry says which key a slot holds only while
the slot holds all bytes of that key:

- `withdraw` comes before any byte of the slot is written, `publish` after every rank has reported
  that the last one is there.
- Each is whole or absent by one aligned write of 8 bytes, the sum of generation, slot and key. It
  is cleared first, and written last; so a torn entry has a sum that fits it by chance of 1 in 2^64.

docs/design/host_pool.md has the argument.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_offload.cache.slots import Slots

DIRECTORY = "directory"
MAGIC = b"kvpool-1"
"""It changes with the format."""
HEADER_BYTES = 64 << 10
GENERATION_BYTES = 16
KEY_BYTES = 47
"""vLLM's keys have 20 or 36 bytes. One that is longer is in no directory."""

TOUCH_SECONDS = 60.0
"""The file's time says how long ago it was last used, by so much too long at most."""

LOCK_SECONDS = 1.0
"""How long an engine waits for the directory of its arenas, before it makes a new one."""

NAMES_BYTES = 32 << 10
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("num_slots", "<u8"),
        ("generation", f"V{GENERATION_BYTES}"),
        ("files_bytes", "<u8"),
        ("files", f"V{NAMES_BYTES}"),
    ]
)
ENTRY = np.dtype([("sum", "<u8"), ("used", "<u8"), ("length", "u1"), ("key", "u1", (KEY_BYTES,))])
ENTRY_BYTES = ENTRY.itemsize


class Directory:
    """The directory of one arena, which this process alone writes until `close` or its end.

    `files` names the file of each rank's arena. What another directory says of other files, of
    another number of slots is not taken over: then a new one is made.
    """

    def __init__(self, folder: Path, files: Mapping[int, str], num_slots: int) -> None:
        path = folder / DIRECTORY
        opened = _take_over(path, files, num_slots)
        self.is_continued = opened is not None
        self._fd, self._memory = opened or _make(path, files, num_slots)
        header, self._entries = _views(self._memory, num_slots)
        self._header = header
        self._generation = header["generation"].tobytes()
        self._touch_due = 0.0
        self._clock = int(self._entries["used"].max(initial=0))

    def read(self, first: int, end: int) -> tuple[Slots, list[bytes]]:
        """Return the slots from `first` to `end` that hold a key, and these, latest use last."""
        return _read(self._entries, self._generation, first, end)

    def withdraw(self, slots: Slots) -> None:
        """Have slots hold nothing, before anything is written into them."""
        self._entries["sum"][slots] = 0

    def publish(self, slots: Slots, keys: Sequence[bytes]) -> None:
        """Have withdrawn slots hold keys, all bytes of which are there."""
        sums = np.zeros(len(slots), np.uint64)
        padded = bytearray(KEY_BYTES * len(slots))
        for row, (slot, key) in enumerate(zip(slots.tolist(), keys, strict=True)):
            if len(key) <= KEY_BYTES:
                padded[row * KEY_BYTES : row * KEY_BYTES + len(key)] = key
                sums[row] = _sum(self._generation, slot, key)
        entries = self._entries
        entries["length"][slots] = [min(len(key), KEY_BYTES) for key in keys]
        entries["key"][slots] = np.frombuffer(padded, np.uint8).reshape(-1, KEY_BYTES)
        entries["sum"][slots] = sums

    def use(self, slots: Slots) -> None:
        """Note a use of slots, the last of them the latest."""
        now = time.monotonic()
        if now >= self._touch_due:
            self._touch_due = now + TOUCH_SECONDS
            os.utime(self._fd)
        self._entries["used"][slots] = self._clock + 1 + np.arange(len(slots), dtype=np.uint64)
        self._clock += len(slots)

    def retire(self) -> None:
        """Have no process find anything here, nor what this one publishes from now on.

        The header gets a generation that no sum is of, and this process another one: what it has
        not read yet does not fit either. One other byte is enough. Effective when it returns,
        however the process ends.
        """
        self._header["generation"] = np.void(secrets.token_bytes(GENERATION_BYTES))
        self._generation = secrets.token_bytes(GENERATION_BYTES)

    def close(self) -> None:
        """Let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            # The mapping, which has the lock as well, ends with the views.
            del self._header, self._entries, self._memory


def read_directory(folder: Path) -> tuple[Slots, list[bytes], int] | None:
    """Return the slots that hold a key, these keys, and how many slots there are; None without.

    It is what another process would take over if the one that writes it ended now. Changes nothing.
    """
    try:
        fd = os.open(folder / DIRECTORY, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        nbytes = os.fstat(fd).st_size
        if nbytes < HEADER_BYTES:
            return None
        memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    num_slots = (nbytes - HEADER_BYTES) // ENTRY_BYTES
    header, entries = _views(memory, num_slots)
    if bytes(header["magic"].item()) != MAGIC:
        return None
    return *_read(entries, header["generation"].tobytes(), 0, num_slots), num_slots


def _read(
    entries: NDArray[np.void], generation: bytes, first: int, end: int
) -> tuple[Slots, list[bytes]]:
    part = entries[first:end]
    named = np.flatnonzero(part["sum"])
    named = named[np.argsort(part["used"][named], kind="stable")]
    padded, lengths = part["key"][named].tobytes(), part["length"][named].tolist()
    slots = (first + named).tolist()
    starts = range(0, len(padded), KEY_BYTES)
    keys = [padded[at : at + n] for at, n in zip(starts, lengths, strict=True)]
    sums = part["sum"][named].tolist()
    fits = [
        _sum(generation, *pair) == found for *pair, found in zip(slots, keys, sums, strict=True)
    ]
    kept = np.array([*compress(slots, fits)], np.int32)
    return kept, [*compress(keys, fits)]


def _sum(generation: bytes, slot: int, key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(b"%b%d:%b" % (generation, slot, key))


def _views(memory: mmap.mmap, num_slots: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
    header = np.frombuffer(memory, HEADER, 1).reshape(())
    return header, np.frombuffer(memory, ENTRY, num_slots, HEADER_BYTES)


def _take_over(
    path: Path, files: Mapping[int, str], num_slots: int
) -> tuple[int, mmap.mmap] | None:
    """Open and lock the directory of these files, if there is one that no process has."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and found.st_size == _file_bytes(num_slots):
            memory = mmap.mmap(fd, found.st_size)
            if _is_of(_views(memory, num_slots)[0], files, num_slots):
                _lock(fd)
                return fd, memory
    except OSError:
        pass  # a process has it: that of an engine which has lost its ranks, and ends
    os.close(fd)
    return None


def _lock(fd: int) -> None:
    """Lock a directory, if need be once an engine that ends has closed it: its ranks end before."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)
        else:
            return


def _is_of(header: NDArray[np.void], files: Mapping[int, str], num_slots: int) -> bool:
    named = header["files"].tobytes()[: int(header["files_bytes"])]
    return (
        bytes(header["magic"].item()) == MAGIC
        and header["num_slots"].item() == num_slots
        and named == _names(files)
    )


def _make(path: Path, files: Mapping[int, str], num_slots: int) -> tuple[int, mmap.mmap]:
    """Put a directory in which no slot holds anything in place of any other. Raises `OSError`."""
    for left in path.parent.glob(f"{DIRECTORY}.*"):
        left.unlink(missing_ok=True)
    new = path.with_name(f"{DIRECTORY}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # All of it: a touch of memory that the filesystem no longer has would end the process.
        os.posix_fallocate(fd, 0, _file_bytes(num_slots))
        memory = mmap.mmap(fd, _file_bytes(num_slots))
        header, _ = _views(memory, num_slots)
        names = _names(files)
        header["magic"], header["num_slots"] = MAGIC, num_slots
        header["generation"] = np.void(secrets.token_bytes(GENERATION_BYTES))
        header["files_bytes"], header["files"] = len(names), np.void(names.ljust(NAMES_BYTES))
        new.rename(path)
    except BaseException:
        os.close(fd)
        new.unlink(missing_ok=True)
        raise
    return fd, memory


def _file_bytes(num_slots: int) -> int:
    return HEADER_BYTES + num_slots * ENTRY_BYTES


def _names(files: Mapping[int, str]) -> bytes:
    return json.dumps(sorted(files.items())).encode()
