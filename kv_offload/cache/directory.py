"""Which key is in which slot of an arena that outlives its process, in memory that others read.

FOLDER/directory        a header of `HEADER_BYTES`, then `ENTRY_BYTES` for each slot, then the
                        index, `WAYS` cells of 8 bytes for each slot

One process writes it: the scheduler of the engine that has the arena. A process that ends, at any
instruction, leaves a directory that is true, for an entry says which key a slot holds only while
the slot holds all bytes of that key:

- `withdraw` comes before any byte of the slot is written, `publish` after every rank has reported
  that the last one is there.
- Each is whole or absent by one aligned write of 8 bytes, the sum of generation, slot, version and
  key. It is cleared first, and written last; so a torn entry has a sum that fits it by chance of 1
  in 2^64.
- No two publications have the same version. A peer that copies a slot, and finds the same sum
  before and after, has copied what the entry says (`kv_offload.cache.peers`).

The index says where a key may be: nothing but the entry is believed. docs/design/host_pool.md has
the argument.
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
"""It changes with the format."""
HEADER_BYTES = 64 << 10
GENERATION_BYTES = 16
NAME_WORDS = 5
KEY_BYTES = 8 * NAME_WORDS - 1
"""vLLM's keys have 20 or 36 bytes. One that is longer is in no directory."""

WAYS = 8
"""Cells of the index in which a key may be. There are as many buckets as slots, so a bucket with
more keys than cells is one in a million; of its keys one is not found by others."""

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
ENTRY = np.dtype(
    [("sum", "<u8"), ("used", "<u8"), ("version", "<u8"), ("name", "<u8", (NAME_WORDS,))]
)
ENTRY_BYTES = ENTRY.itemsize
SLOT_BYTES = ENTRY_BYTES + 8 * WAYS
"""Bytes of the file for each slot."""

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
    """Have all CPUs see what this thread has read and written before what it does afterwards.

    A release that is followed by an acquire orders that, on x86-64 and on Arm.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class Names(NamedTuple):
    """Keys as entries have them: the number of bytes and one more, the bytes, zeros; 0 if too long.

    `words` is uint64 of shape `(n, NAME_WORDS)`, `hashes` of shape `(n,)`.
    """

    words: NDArray[np.uint64]
    hashes: NDArray[np.uint64]

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> Names:
        """Return the names of keys; fast where all have the same number of bytes."""
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
    """A directory's file, mapped. `header`, `entries` and `index` are views of it."""

    def __init__(self, fd: int, *, writes: bool = False) -> None:
        """Raises `OSError`, or `ValueError` for a file that is no directory."""
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
        """True if the header is that of a directory."""
        magic, slots = bytes(self.header["magic"].item()), self.header["num_slots"].item()
        return magic == MAGIC and slots == self.num_slots

    @property
    def generation(self) -> bytes:
        """The generation that sums are of."""
        return self.header["generation"].tobytes()

    @property
    def files(self) -> bytes:
        """The names of the ranks' arenas, as `file_names` makes them."""
        return self.header["files"].tobytes()[: int(self.header["files_bytes"])]

    def read(self, first: int, end: int, generation: bytes) -> tuple[Slots, list[bytes]]:
        """Return the slots from `first` to `end` that hold a key, and these, latest use last."""
        part = self.entries[first:end]
        named = np.flatnonzero(part["sum"])
        named = named[np.argsort(part["used"][named], kind="stable")]
        slots = (first + named).astype(np.int32)
        fits = self.fits(slots, part[named], generation)
        return slots[fits], [*compress(Names.of_words(part["name"][named]).keys(), fits.tolist())]

    def fits(self, slots: Slots, read: NDArray[np.void], generation: bytes) -> NDArray[np.bool_]:
        """Say for entries that were `read` whether their sums are those of what they say."""
        text, step = np.ascontiguousarray(read["name"]).tobytes(), 8 * NAME_WORDS
        columns = slots.tolist(), read["version"].tolist(), read["sum"].tolist()
        fits = [
            entry_sum(generation, slot, version, text[row * step : (row + 1) * step]) == found
            for row, (slot, version, found) in enumerate(zip(*columns, strict=True))
        ]
        return np.array(fits, bool)

    def buckets(self, hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
        """Return the rows of the index in which keys may be."""
        rows = ((hashes >> _HALF) * np.uint64(self.num_slots)) >> _HALF
        return rows.astype(np.intp)

    def find(self, names: Names) -> Slots:
        """Return the slot whose entry has each key, -1 where none has. Nothing is proven."""
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
    """The directory of one arena, which this process alone writes until `close` or its end.

    `files` names the file of each rank's arena. What another directory says of other files, of
    another number of slots is not taken over: then a new one is made.
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
        """Return the slots from `first` to `end` that hold a key, and these, latest use last."""
        return self._contents.read(first, end, self._generation)

    def withdraw(self, slots: Slots) -> None:
        """Have slots hold nothing, before anything is written into them."""
        entries, index = self._contents.entries, self._contents.index
        entries["sum"][slots] = 0
        order_memory()
        buckets = self._contents.buckets(Names.of_words(entries["name"][slots]).hashes)
        cells = slots.astype(np.uint64)[:, None] + np.uint64(1)
        rows, ways = np.nonzero((index[buckets] & _LOW) == cells)
        index[buckets[rows], ways] = 0

    def publish(self, slots: Slots, keys: Sequence[bytes]) -> None:
        """Have withdrawn slots hold keys, all bytes of which are there."""
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
        """Have others find keys in the index; one cell of a bucket that is full is replaced."""
        index = self._contents.index
        buckets = self._contents.buckets(hashes)
        cells = ((hashes & _LOW) << _HALF) | (slots.astype(np.uint64) + np.uint64(1))
        for _ in range(WAYS):
            ways = (index[buckets] == 0).argmax(axis=1)
            index[buckets, ways] = cells
            # If several went into one bucket, only the last is there.
            left = index[buckets, ways] != cells
            if not left.any():
                return
            buckets, cells = buckets[left], cells[left]

    def use(self, slots: Slots) -> None:
        """Note a use of slots, the last of them the latest."""
        now = time.monotonic()
        if now >= self._touch_due:
            self._touch_due = now + TOUCH_SECONDS
            os.utime(self._fd)
        used = self._clock + 1 + np.arange(len(slots), dtype=np.uint64)
        self._contents.entries["used"][slots] = used
        self._clock += len(slots)

    def retire(self) -> None:
        """Have no process find anything here, nor what this one publishes from now on.

        The header gets a generation that no sum is of, and this process another one: what it has
        not read yet does not fit either. One other byte is enough. Effective when it returns,
        however the process ends.
        """
        self._contents.header["generation"] = np.void(secrets.token_bytes(GENERATION_BYTES))
        order_memory()
        self._generation = secrets.token_bytes(GENERATION_BYTES)
        self._is_retired = True
        self._contents.index[:] = 0

    def close(self) -> None:
        """Let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            # The mapping, which has the lock as well, ends with the views.
            del self._contents


def read_directory(folder: Path) -> tuple[Slots, list[bytes], int] | None:
    """Return the slots that hold a key, these keys, and how many slots there are; None without.

    It is what another process would take over if the one that writes it ended now. Changes nothing.
    """
    contents = open_directory(folder)
    if contents is None:
        return None
    return *contents.read(0, contents.num_slots, contents.generation), contents.num_slots


def open_directory(folder: Path) -> Contents | None:
    """Map the directory of a seat to read it; None where there is none. Takes no lock."""
    try:
        fd = os.open(folder / DIRECTORY, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
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
    """Return the sum of an entry."""
    return xxhash.xxh3_64_intdigest(generation + _PLACE.pack(slot, version) + name)


def _take_over(path: Path, files: Mapping[int, str], num_slots: int) -> tuple[int, Contents] | None:
    """Open and lock the directory of these files, if there is one that no process has."""
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


def _make(path: Path, files: Mapping[int, str], num_slots: int) -> tuple[int, Contents]:
    """Put a directory in which no slot holds anything in place of any other. Raises `OSError`."""
    for left in path.parent.glob(f"{DIRECTORY}.*"):
        left.unlink(missing_ok=True)
    new = path.with_name(f"{DIRECTORY}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # All of it: a touch of memory that the filesystem no longer has would end the process.
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
    """Return the bytes of a directory."""
    return HEADER_BYTES + num_slots * SLOT_BYTES


def file_names(files: Mapping[int, str]) -> bytes:
    """Return what a header says of the ranks' arenas."""
    return json.dumps(sorted(files.items())).encode()
