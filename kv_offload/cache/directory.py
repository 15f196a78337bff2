"""A file that maps the slots of an arena to their keys; it outlives the process and peers read it.

FOLDER/directory        a header of `HEADER_BYTES`; the marks, one byte per slot and one more; the
                        leases, `MAX_PEERS` bytes per slot; the entries, `ENTRY_BYTES` per slot; the
                        index of keys

Only the scheduler of the engine that owns the arena writes the file, except for marks and leases,
which peers write. A process can end at any instruction and still leave a correct directory, because
an entry names a key only while the slot holds all bytes of that key:

- `withdraw` runs before any byte of the slot is written, and `publish` after every rank has
  reported the last byte.
- A single aligned write of 8 bytes makes an entry valid or invalid: its sum over generation, slot,
  version and key. The sum is cleared first and written last, so a torn entry passes with a chance
  of 1 in 2^64.
- No two publications share a version, so an entry with the same sum is still the same entry.

A byte of the leases is not 0 while the engine with that seat may read the slot
(`kv_offload.cache.peers`). The index (`kv_offload.cache.key_index`) is only a hint to where a key
may be; the entry decides. A mark records that a peer has used a slot; the last mark records that
some other mark is set. Any value in them is harmless: it only changes which block the owner evicts
next. docs/design/host_pool.md has the argument.
"""

from __future__ import annotations

import contextlib
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

import numpy as np
import xxhash
from kv_swap.locks import lock
from numpy.typing import NDArray

from kv_offload.cache.key_index import (
    CELL_BYTES,
    NAME_WORDS,
    TAG_BYTES,
    WAYS,
    KeyIndex,
    Names,
    same_words,
)
from kv_offload.cache.slots import NO_SLOTS, Mask, Slots

DIRECTORY = "directory"
MAGIC = b"kvpool-4"
"""Changes with the format."""
HEADER_BYTES = 64 << 10
GENERATION_BYTES = 16
MARKS_AT_ONCE = 4096
"""Maximum uses by peers that the owner counts in one step; these take 1 ms."""
PAGES_BYTES = 64 << 10
"""Marks and leases fill whole pages on any CPU, so that peers can map them, and nothing else, for
writing."""
MAX_PEERS = 64
"""Engines with seats below this read slots of peers: each has a byte in the leases of a slot."""

TOUCH_SECONDS = 60.0
"""The file's modification time tells when the arena was last used; it lags by at most this much."""

LOCK_SECONDS = 1.0
"""How long an engine waits for the lock of its directory before it makes a new one."""

NAMES_BYTES = 32 << 10
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("num_slots", "<u8"),
        ("usable_slots", "<u8"),
        ("is_retired", "<u8"),
        ("generation", f"V{GENERATION_BYTES}"),
        ("files_bytes", "<u8"),
        ("files", f"V{NAMES_BYTES}"),
    ]
)
ENTRY = np.dtype(
    [("sum", "<u8"), ("used", "<u8"), ("version", "<u8"), ("name", "<u8", (NAME_WORDS,))]
)
ENTRY_BYTES = ENTRY.itemsize
SLOT_BYTES = ENTRY_BYTES + TAG_BYTES + CELL_BYTES + MAX_PEERS + 1
"""Bytes of the file per slot."""

_PLACE = struct.Struct("<QQ")


def order_memory() -> None:
    """Make all CPUs see this thread's earlier reads and writes before its later ones.

    A release followed by an acquire ensures that order on x86-64 and on Arm.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


class Contents:
    """The mapped file of a directory. The attributes are views of it."""

    def __init__(self, fd: int, num_slots: int, *, writes: bool = False) -> None:
        """Map a file of `num_slots` slots; without `writes`, only marks and leases are writable.

        Raises `OSError`.
        """
        self.num_slots = num_slots
        prot = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
        memory = mmap.mmap(fd, file_bytes(num_slots), prot=prot)
        self.header = np.frombuffer(memory, HEADER, 1).reshape(())
        marks, leases = _pages(num_slots + 1), _pages(num_slots * MAX_PEERS)
        shared = mmap.mmap(fd, marks + leases, offset=HEADER_BYTES)
        self.marks = np.frombuffer(shared, np.uint8, num_slots + 1)
        """Per slot, and a last one for all slots: not 0 if a peer has used it since the owner last
        looked."""
        self.leases = np.frombuffer(shared, np.uint8, num_slots * MAX_PEERS, marks)
        """Per slot and seat of a reader, `(num_slots, MAX_PEERS)`: not 0 while it may read."""
        self.leases = self.leases.reshape(num_slots, MAX_PEERS)
        at = HEADER_BYTES + marks + leases
        self.entries = np.frombuffer(memory, ENTRY, num_slots, at)
        self._words = self.entries.view("<u8").reshape(num_slots, -1)
        at += num_slots * ENTRY_BYTES
        tags = np.frombuffer(memory, "<u2", num_slots * WAYS, at)
        at += num_slots * TAG_BYTES
        cells = np.frombuffer(memory, "<u4", num_slots * WAYS, at)
        shape = num_slots, WAYS
        self.index = KeyIndex(tags.reshape(shape), cells.reshape(shape))

    @classmethod
    def open(cls, fd: int, *, writes: bool = False) -> Contents | None:
        """Map a file; None if it is not a valid directory. Raises `OSError`."""
        text = os.pread(fd, HEADER.itemsize, 0)
        if len(text) < HEADER.itemsize:
            return None
        header = np.frombuffer(text, HEADER, 1).reshape(())
        num_slots = int(header["num_slots"])
        sizes = file_bytes(num_slots), os.fstat(fd).st_size
        if bytes(header["magic"].item()) != MAGIC or not num_slots or sizes[0] != sizes[1]:
            return None
        return cls(fd, num_slots, writes=writes)

    @property
    def generation(self) -> bytes:
        """The generation that the sums of valid entries include."""
        return self.header["generation"].tobytes()

    @property
    def is_retired(self) -> bool:
        """True if no entry is valid, whatever it says."""
        return bool(self.header["is_retired"])

    def has_leases(self, slots: Slots) -> Mask:
        """Return for each slot whether some reader may read it; reads one cache line per slot."""
        leased: Mask = (self.leases.view("<u8")[slots] != 0).any(axis=1)
        return leased

    @property
    def files(self) -> bytes:
        """The names of the ranks' arenas, in the format of `file_names`."""
        return self.header["files"].tobytes()[: int(self.header["files_bytes"])]

    def read(self, first: int, end: int, generation: bytes) -> tuple[Slots, list[bytes]]:
        """Return the slots in `[first, end)` with a key, and their keys, last use last."""
        if self.is_retired:
            return NO_SLOTS, []
        part = self.entries[first:end]
        named = np.flatnonzero(part["sum"] != 0)
        named = named[np.argsort(part["used"][named], kind="stable")]
        slots = (first + named).astype(np.int32)
        fits = self.fits(slots, part[named], generation)
        return slots[fits], [*compress(Names.of_words(part["name"][named]).keys(), fits.tolist())]

    def fits(self, slots: Slots, read: NDArray[np.void], generation: bytes) -> Mask:
        """Return for each entry in `read` whether its sum matches its contents."""
        text, step = np.ascontiguousarray(read["name"]).tobytes(), 8 * NAME_WORDS
        columns = slots.tolist(), read["version"].tolist(), read["sum"].tolist()
        fits = [
            entry_sum(generation, slot, version, text[row * step : (row + 1) * step]) == found
            for row, (slot, version, found) in enumerate(zip(*columns, strict=True))
        ]
        return np.array(fits, bool)

    def have(self, slots: NDArray[np.signedinteger], words: NDArray[np.uint64]) -> Mask:
        """Return for each slot whether its entry has the name in `words`; sums are not verified."""
        entries = self._words.take(slots, axis=0)
        have: Mask = same_words(entries[:, -NAME_WORDS:], words) & (entries[:, 0] != 0)
        return have

    def mark(self, slots: Slots) -> None:
        """Mark a use of slots, which the owner counts when it evicts. For any process."""
        self.marks[slots] = 1
        order_memory()
        self.marks[-1] = 1


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
        self._former = _find_former(folder, self._contents)
        """Replaced directories in which readers still have leases."""
        if self._contents.is_retired:
            self._revive()
        self._generation = self._contents.generation
        self._touch_due = 0.0
        self._marks_from = 0
        entries = self._contents.entries
        self._clock = int(entries["used"].max(initial=0))
        self._version = int(entries["version"].max(initial=0))

    def _revive(self) -> None:
        """Empty a retired directory, and make it valid for new entries.

        No other process uses it, except readers of slots that they leased earlier.
        """
        contents = self._contents
        contents.entries["sum"][:] = 0
        order_memory()
        contents.header["generation"] = np.void(secrets.token_bytes(GENERATION_BYTES))
        order_memory()
        contents.header["is_retired"] = 0
        self.is_continued = False

    def read(self, first: int, end: int) -> tuple[Slots, list[bytes]]:
        """Return the slots in `[first, end)` with a key, and their keys, last use last."""
        return self._contents.read(first, end, self._generation)

    def allow(self, usable_slots: int) -> None:
        """Record that the slots below this have memory on all ranks."""
        header = self._contents.header
        if usable_slots > header["usable_slots"]:
            header["usable_slots"] = usable_slots

    def withdraw(self, slots: Slots) -> None:
        """Mark slots as empty. Must run before any byte is written into them.

        Slots that then `are_leased` must not be written until their leases end.
        """
        entries = self._contents.entries
        entries["sum"][slots] = 0
        order_memory()
        self._contents.index.remove(slots, Names.of_words(entries["name"][slots]).hashes)

    def are_leased(self, slots: Slots) -> Mask:
        """Return for each withdrawn slot whether some reader may still read it."""
        leased = self._contents.has_leases(slots)
        for former in self._former:
            known = slots < former.num_slots
            leased[known] |= former.has_leases(slots[known])
        return leased

    def end_leases(self, slots: Slots, reader: int) -> None:
        """End a reader's leases on slots. The reader has ended, and its seat is locked."""
        for contents in (self._contents, *self._former):
            contents.leases[slots[slots < contents.num_slots], reader] = 0

    def readers_of(self, slots: Slots) -> list[int]:
        """Return the seats of the readers that have leases on slots."""
        leased = np.zeros(MAX_PEERS, bool)
        for contents in (self._contents, *self._former):
            leased |= contents.leases[slots[slots < contents.num_slots]].any(axis=0)
        found: list[int] = np.flatnonzero(leased).tolist()
        return found

    def publish(self, slots: Slots, keys: Sequence[bytes]) -> None:
        """Record the keys of withdrawn slots, which must hold all bytes of these keys.

        Does nothing once the directory is retired.
        """
        if self._contents.is_retired:
            return
        names = Names.of(keys)
        text, step = names.words.tobytes(), 8 * NAME_WORDS
        self._version += 1
        sums = np.zeros(len(slots), np.uint64)
        for row, (slot, key) in enumerate(zip(slots.tolist(), keys, strict=True)):
            name = text[row * step : (row + 1) * step]
            if len(key) + 1 == name[0] and name.startswith(key, 1):  # else it has no name
                sums[row] = entry_sum(self._generation, slot, self._version, name)
        entries = self._contents.entries
        entries["name"][slots] = names.words
        entries["version"][slots] = self._version
        order_memory()
        entries["sum"][slots] = sums
        self._contents.index.add(slots, names.hashes)

    def take_marks(self) -> Slots:
        """Return slots that peers have used since they were last returned, not in order of use.

        A call returns at most `MARKS_AT_ONCE`, and takes 0.1 ms for a million slots.
        """
        marks = self._contents.marks
        if not marks[-1]:
            return NO_SLOTS
        marks[-1] = 0
        order_memory()
        # The comparison copies, because numpy raises if the values change while it counts them.
        slots = np.flatnonzero(marks[:-1] != 0).astype(np.int32)
        if len(slots) > MARKS_AT_ONCE:
            slots = np.roll(slots, -int(slots.searchsorted(self._marks_from)))[:MARKS_AT_ONCE]
            self._marks_from = int(slots[-1]) + 1
            marks[-1] = 1
        marks[slots] = 0
        return slots

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
        """Hide all blocks from other processes, and publish no more.

        A single aligned write does this, so it takes effect on return, however the process ends.
        """
        self._contents.index.clear()  # first: peers must not find blocks that they cannot lease
        order_memory()
        self._contents.header["is_retired"] = 1
        order_memory()

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


def open_directory(folder: Path, name: str = DIRECTORY) -> Contents | None:
    """Map the directory in `folder` for reading, without a lock; None if there is none."""
    try:
        # Not O_RDONLY alone, which would wait if it were a pipe.
        fd = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return Contents.open(fd)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


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
            contents = Contents.open(fd, writes=True)
            is_ours = contents is not None and contents.files == file_names(files)
            # An engine that has lost its ranks and is ending may have the lock.
            if contents is not None and is_ours and lock(fd, LOCK_SECONDS):
                return fd, contents
    except OSError:
        pass
    os.close(fd)
    return None


def _make(path: Path, files: Mapping[int, str], num_slots: int) -> tuple[int, Contents]:
    """Replace any directory by an empty one. Raises `OSError`."""
    for left in path.parent.glob(f"{DIRECTORY}-new.*"):
        left.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none
        os.link(path, path.with_name(f"{DIRECTORY}-former.{secrets.token_hex(8)}"))
    new = path.with_name(f"{DIRECTORY}-new.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        lock(fd)
        # Allocate all of it: touching a page that the filesystem cannot provide would kill the
        # process.
        os.posix_fallocate(fd, 0, file_bytes(num_slots))
        contents = Contents(fd, num_slots, writes=True)
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


def _find_former(folder: Path, own: Contents) -> list[Contents]:
    """Return the replaced directories whose readers still have leases on slots of our arenas.

    Called after the new directory has taken the name: readers take no more leases in the old ones.
    Directories without a lease, or of other arenas, are removed.
    """
    order_memory()
    former, arenas = [], {*read_names(own.files).values()}
    for path in folder.glob(f"{DIRECTORY}-former.*"):
        contents = open_directory(folder, path.name)
        shares = contents is not None and not arenas.isdisjoint(read_names(contents.files).values())
        if contents is not None and shares and contents.leases.any():
            former.append(contents)
        else:
            path.unlink(missing_ok=True)
    return former


def file_bytes(num_slots: int) -> int:
    """Return the size of a directory in bytes."""
    others = ENTRY_BYTES + TAG_BYTES + CELL_BYTES
    shared = _pages(num_slots + 1) + _pages(num_slots * MAX_PEERS)
    return HEADER_BYTES + shared + num_slots * others


def _pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages of any CPU."""
    return -(-nbytes // PAGES_BYTES) * PAGES_BYTES


def file_names(files: Mapping[int, str]) -> bytes:
    """Return the header's encoding of the names of the ranks' arenas."""
    return json.dumps(sorted(files.items())).encode()


def read_names(text: bytes) -> dict[int, str]:
    """Return the files that a header names; none if it has another format."""
    try:
        files = {int(rank): str(name) for rank, name in json.loads(text)}
    except (ValueError, TypeError):
        return {}
    return files if file_names(files) == text else {}
