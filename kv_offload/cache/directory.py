"""A file that maps the slots of an arena to their keys; it outlives the process and peers read it.

FOLDER/directory        a header of `HEADER_BYTES`, then `ENTRY_BYTES` for each slot, then the
                        index, `WAYS` cells of 8 bytes for each slot

Only the scheduler of the engine that owns the arena writes the file. A process may end at any
instruction and still leaves a true directory, because an entry names a key only while the slot
holds all bytes of that key:

- `withdraw` runs before any byte of the slot is written, and `publish` after every rank has
  reported the last byte.
- A single aligned write of 8 bytes makes an entry valid or invalid: its sum over generation, slot,
  version and key. The sum is cleared first and written last, so a torn entry passes with a chance
  of 1 in 2^64.
- No two publications share a version. If a peer finds the same sum before and after it copies a
  slot, its copy is the block that the entry names (`kv_offload.cache.peers`).

The index is only a hint to where a key may be; the entry decides. docs/design/host_pool.md has the
argument.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_offload.cache.slots import Slots

DIRECTORY = "directory"
MAGIC = b"kvpool-2"
"""Changes with the format."""
HEADER_BYTES = 64 << 10
GENERATION_BYTES = 16
NAME_WORDS = 5
KEY_BYTES = 8 * NAME_WORDS - 1
"""vLLM's keys have 20 or 36 bytes. A longer key is not published."""

WAYS = 8
"""Cells of the index that may hold a given key. There are as many buckets as slots, so about one
bucket in a million has more keys than cells, and peers miss one of its keys."""

TOUCH_SECONDS = 60.0
"""The file's modification time tells when the arena was last used; it lags by at most this much."""

LOCK_SECONDS = 1.0
"""How long an engine waits for the lock of its directory before it makes a new one."""

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
ENTRY = np.dtype(
    [("sum", "<u8"), ("used", "<u8"), ("version", "<u8"), ("name", "<u8", (NAME_WORDS,))]
)
ENTRY_BYTES = ENTRY.itemsize
SLOT_BYTES = ENTRY_BYTES + 8 * WAYS
"""Bytes of the file per slot."""

_PLACE = struct.Struct("<QQ")
_FACTORS = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xFF51AFD7ED558CCD,
    ],
    np.uint64,
)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def order_memory() -> None:
    """Make all CPUs see this thread's earlier reads and writes before its later ones.

    A release followed by an acquire ensures that order on x86-64 and on Arm.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class Names(NamedTuple):
    """Keys as they are stored in entries, with their hashes.

    `words` is uint64 of shape `(n, NAME_WORDS)`: a byte with the length plus one, the key, and
    zeros. A key that is too long is all zeros. `hashes` is uint64 of shape `(n,)`.
    """

    words: NDArray[np.uint64]
    hashes: NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Names:
        """Return the names of keys; fast if all keys have the same length."""
        names = np.zeros((len(keys), 8 * NAME_WORDS), np.uint8)
        lengths = [*map(len, keys)]
        for length in {*lengths}:
            if length <= KEY_BYTES:
                own = [row for row, other in enumerate(lengths) if other == length]
                text = b"".join(keys if len(own) == len(keys) else [keys[row] for row in own])
                read = np.frombuffer(text, np.uint8).reshape(len(own), length)
                names[own, 0], names[own, 1 : length + 1] = length + 1, read
        return cls.of_words(names.view("<u8"))

    @classmethod
    def of_words(cls, words: NDArray[np.uint64]) -> Names:
        """Return names with their hashes."""
        hashes = (words * _FACTORS).sum(axis=1, dtype=np.uint64)
        hashes ^= hashes >> _HALF
        hashes *= _FACTORS[0]
        hashes ^= hashes >> np.uint64(29)
        return cls(words, hashes)

    def keys(self) -> list[bytes]:
        """Return the keys."""
        text = self.words.tobytes()
        step = 8 * NAME_WORDS
        return [text[at + 1 : at + max(1, text[at])] for at in range(0, len(text), step)]


class Contents:
    """The mapped file of a directory. `header`, `entries` and `index` are views of it."""

    def __init__(self, fd: int, *, writes: bool = False) -> None:
        """Raises `OSError`, or `ValueError` for a file that is not a directory."""
        self.num_slots = (os.fstat(fd).st_size - HEADER_BYTES) // SLOT_BYTES
        if self.num_slots < 1:
            raise ValueError("it has no slots")
        prot = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
        memory = mmap.mmap(fd, file_bytes(self.num_slots), prot=prot)
        self.header = np.frombuffer(memory, HEADER, 1).reshape(())
        self.entries = np.frombuffer(memory, ENTRY, self.num_slots, HEADER_BYTES)
        first = HEADER_BYTES + self.num_slots * ENTRY_BYTES
        cells = np.frombuffer(memory, "<u8", self.num_slots * WAYS, first)
        self.index = cells.reshape(self.num_slots, WAYS)

    @property
    def is_one(self) -> bool:
        """True if the file has a valid header."""
        magic, slots = bytes(self.header["magic"].item()), self.header["num_slots"].item()
        return magic == MAGIC and slots == self.num_slots

    @property
    def generation(self) -> bytes:
        """The generation that the sums of valid entries include."""
        return self.header["generation"].tobytes()

    @property
    def files(self) -> bytes:
        """The names of the ranks' arenas, in the format of `file_names`."""
        return self.header["files"].tobytes()[: int(self.header["files_bytes"])]

    def read(self, first: int, end: int, generation: bytes) -> tuple[Slots, list[bytes]]:
        """Return the slots in `[first, end)` with a key, and their keys, last use last."""
        part = self.entries[first:end]
        named = np.flatnonzero(part["sum"])
        named = named[np.argsort(part["used"][named], kind="stable")]
        slots = (first + named).astype(np.int32)
        fits = self.fits(slots, part[named], generation)
        return slots[fits], [*compress(Names.of_words(part["name"][named]).keys(), fits.tolist())]

    def fits(self, slots: Slots, read: NDArray[np.void], generation: bytes) -> NDArray[np.bool_]:
        """Return for each entry in `read` whether its sum matches its contents."""
        text, step = np.ascontiguousarray(read["name"]).tobytes(), 8 * NAME_WORDS
        columns = slots.tolist(), read["version"].tolist(), read["sum"].tolist()
        fits = [
            entry_sum(generation, slot, version, text[row * step : (row + 1) * step]) == found
            for row, (slot, version, found) in enumerate(zip(*columns, strict=True))
        ]
        return np.array(fits, bool)

    def buckets(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the row of the index in which each key may be."""
        rows = ((hashes >> _HALF) * np.uint64(self.num_slots)) >> _HALF
        return rows.astype(np.intp)

    def find(self, names: Names) -> Slots:
        """Return the slot whose entry names each key, -1 if none does; sums are not verified."""
        found = np.full(len(names.hashes), -1, np.int32)
        cells = self.index[self.buckets(names.hashes)]
        rows, ways = np.nonzero((cells >> _HALF) == (names.hashes & _LOW)[:, None])
        if len(rows):
            slots = (cells[rows, ways] & _LOW).astype(np.int64) - 1
            valid = (slots >= 0) & (slots < self.num_slots)
            rows, slots = rows[valid], slots[valid]
            entries = self.entries[slots]
            same = (entries["name"] == names.words[rows]).all(axis=1) & (entries["sum"] != 0)
            found[rows[same]] = slots[same]
        return found


class Directory:
    """The directory of one arena. Only this process writes it, until `close` or its end.

    `files` names the file of each rank's arena. An existing directory for other files or another
    number of slots is replaced by a new one.
    """

    def __init__(self, folder: Path, files: Mapping[int, str], num_slots: int) -> None:
        path = folder / DIRECTORY
        opened = _take_over(path, files, num_slots)
        self.is_continued = opened is not None
        self._fd, self._contents = opened or _make(path, files, num_slots)
        self._generation = self._contents.generation
        self._is_retired = False
        self._touch_due = 0.0
        entries = self._contents.entries
        self._clock = int(entries["used"].max(initial=0))
        self._version = int(entries["version"].max(initial=0))

    def read(self, first: int, end: int) -> tuple[Slots, list[bytes]]:
        """Return the slots in `[first, end)` with a key, and their keys, last use last."""
        return self._contents.read(first, end, self._generation)

    def withdraw(self, slots: Slots) -> None:
        """Mark slots as empty. Must run before any byte is written into them."""
        entries, index = self._contents.entries, self._contents.index
        entries["sum"][slots] = 0
        order_memory()
        buckets = self._contents.buckets(Names.of_words(entries["name"][slots]).hashes)
        cells = slots.astype(np.uint64)[:, None] + np.uint64(1)
        rows, ways = np.nonzero((index[buckets] & _LOW) == cells)
        index[buckets[rows], ways] = 0

    def publish(self, slots: Slots, keys: Sequence[bytes]) -> None:
        """Record the keys of withdrawn slots, which must hold all bytes of these keys."""
        names = Names.of(keys)
        text, step = names.words.tobytes(), 8 * NAME_WORDS
        self._version += 1
        sums = np.zeros(len(slots), np.uint64)
        for row, (slot, key) in enumerate(zip(slots.tolist(), keys, strict=True)):
            if len(key) <= KEY_BYTES:
                name = text[row * step : (row + 1) * step]
                sums[row] = entry_sum(self._generation, slot, self._version, name)
        entries = self._contents.entries
        entries["name"][slots] = names.words
        entries["version"][slots] = self._version
        order_memory()
        entries["sum"][slots] = sums
        if not self._is_retired:
            self._show(slots, names.hashes)

    def _show(self, slots: Slots, hashes: NDArray[np.uint64]) -> None:
        """Add keys to the index; in a full bucket, one cell is replaced."""
        index = self._contents.index
        buckets = self._contents.buckets(hashes)
        cells = ((hashes & _LOW) << _HALF) | (slots.astype(np.uint64) + np.uint64(1))
        for _ in range(WAYS):
            ways = (index[buckets] == 0).argmax(axis=1)
            index[buckets, ways] = cells
            # If several keys share a bucket, only the last write survives.
            left = index[buckets, ways] != cells
            if not left.any():
                return
            buckets, cells = buckets[left], cells[left]

    def use(self, slots: Slots) -> None:
        """Record a use of slots, the last of them the most recent."""
        now = time.monotonic()
        if now >= self._touch_due:
            self._touch_due = now + TOUCH_SECONDS
            os.utime(self._fd)
        used = self._clock + 1 + np.arange(len(slots), dtype=np.uint64)
        self._contents.entries["used"][slots] = used
        self._clock += len(slots)

    def retire(self) -> None:
        """Hide all blocks from other processes, also those that this process publishes later.

        The header gets a generation that no sum includes, and this process continues with a
        different one, so the entries that it has not read yet are invalid for it too. Changing a
        single byte is enough, so this takes effect on return, however the process ends.
        """
        self._contents.header["generation"] = np.void(secrets.token_bytes(GENERATION_BYTES))
        order_memory()
        self._generation = secrets.token_bytes(GENERATION_BYTES)
        self._is_retired = True
        self._contents.index[:] = 0

    def close(self) -> None:
        """Release the lock so that another process can take over the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            # The mapping also holds the lock, and ends when its views do.
            del self._contents


def read_directory(folder: Path) -> tuple[Slots, list[bytes], int] | None:
    """Return the slots with a key, their keys, and the number of slots; None if there is no file.

    Another process would take over exactly this if the writer ended now. Changes nothing.
    """
    contents = open_directory(folder)
    if contents is None:
        return None
    return *contents.read(0, contents.num_slots, contents.generation), contents.num_slots


def open_directory(folder: Path) -> Contents | None:
    """Map the directory in `folder` for reading, without a lock; None if there is none."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(folder / DIRECTORY, flags | os.O_NONBLOCK)  # a pipe has no directory, either
    except OSError:
        return None
    try:
        contents = Contents(fd)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return contents if contents.is_one else None


def entry_sum(generation: bytes, slot: int, version: int, name: bytes) -> int:
    """Return the checksum of a valid entry."""
    return xxhash.xxh3_64_intdigest(generation + _PLACE.pack(slot, version) + name)


def _take_over(path: Path, files: Mapping[int, str], num_slots: int) -> tuple[int, Contents] | None:
    """Open and lock the directory of these files; None if there is none or it is locked."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and found.st_size == file_bytes(num_slots):
            contents = Contents(fd, writes=True)
            if contents.is_one and contents.files == file_names(files):
                _lock(fd)
                return fd, contents
    except OSError:
        pass  # held by the process of an engine that has lost its ranks and is ending
    os.close(fd)
    return None


def _lock(fd: int) -> None:
    """Lock a directory, waiting for an ending engine to close it: its ranks end before it does."""
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


def _make(path: Path, files: Mapping[int, str], num_slots: int) -> tuple[int, Contents]:
    """Replace any directory by an empty one. Raises `OSError`."""
    for left in path.parent.glob(f"{DIRECTORY}.*"):
        left.unlink(missing_ok=True)
    new = path.with_name(f"{DIRECTORY}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Allocate all of it: touching a page that the filesystem cannot provide would kill the
        # process.
        os.posix_fallocate(fd, 0, file_bytes(num_slots))
        contents = Contents(fd, writes=True)
        header, names = contents.header, file_names(files)
        header["magic"], header["num_slots"] = MAGIC, num_slots
        header["generation"] = np.void(secrets.token_bytes(GENERATION_BYTES))
        header["files_bytes"], header["files"] = len(names), np.void(names.ljust(NAMES_BYTES))
        new.rename(path)
    except BaseException:
        os.close(fd)
        new.unlink(missing_ok=True)
        raise
    return fd, contents


def file_bytes(num_slots: int) -> int:
    """Return the size of a directory in bytes."""
    return HEADER_BYTES + num_slots * SLOT_BYTES


def file_names(files: Mapping[int, str]) -> bytes:
    """Return the header's encoding of the names of the ranks' arenas."""
    return json.dumps(sorted(files.items())).encode()
