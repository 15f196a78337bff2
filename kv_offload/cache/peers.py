"""Finds the other engines of a host pool and reads their directories.

Nothing here waits for another engine. The only bytes of another engine that are written are the
marks of used slots. The bytes of another engine's slot are copied between `PeerDirectory.claim` and
`PeerDirectory.still_holds`:

    claim = peer.claim(keys)         the entries with valid sums
    ... copy the slots ...
    good = peer.still_holds(claim)   the entries whose sums have not changed

The owner clears an entry before any byte of its slot is written, and no two publications have the
same sum. So if the sum is unchanged, the copied bytes are those of the key. This holds at whatever
instruction the owner stops or ends, and also after its end.

docs/design/host_pool.md has the argument.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.directory import (
    DIRECTORY,
    Contents,
    file_names,
    open_directory,
    order_memory,
)
from kv_offload.cache.key_index import Names, hash_keys, may_have
from kv_offload.cache.slots import Slots

REFRESH_SECONDS = 1.0
"""Interval at which the seats of a pool are listed. It delays the first read from a new engine, and
the unmapping of an arena that was removed."""

MAX_PEERS = 64
"""At most so many peers are read, those with the lowest seat numbers."""

SEAT = re.compile(r"seat-(\d+)")


@dataclass(frozen=True, slots=True)
class Claim:
    """The entries found for a list of keys: their `rows` in that list, slots and sums."""

    rows: NDArray[np.intp]
    slots: Slots
    sums: NDArray[np.uint64]
    generation: bytes


class PeerDirectory:
    """The directory of another seat, which an engine writes, or has left. Any thread reads it."""

    def __init__(self, seat: Path, contents: Contents, inode: int, files: Mapping[int, str]):
        self.seat, self.files = seat, files
        self.contents, self._inode = contents, inode
        self._arenas: dict[str, NDArray[np.uint8]] = {}

    @classmethod
    def open(cls, seat: Path, kinds: Mapping[int, str]) -> PeerDirectory | None:
        """Open the directory of a seat; None where there is none of arenas of these kinds."""
        try:
            inode = os.stat(seat / DIRECTORY, follow_symlinks=False).st_ino
        except OSError:
            return None
        contents = open_directory(seat)
        if contents is None:
            return None
        files = read_names(contents.files)
        is_alike = all(files.get(rank, "").startswith(f"{kind}.") for rank, kind in kinds.items())
        peer = cls(seat, contents, inode, files)
        # Between the two it may have been replaced.
        return peer if is_alike and peer.is_current and peer.has_arenas else None

    @property
    def is_current(self) -> bool:
        """True while it is the directory of the seat: another engine may have replaced it."""
        try:
            return os.stat(self.seat / DIRECTORY, follow_symlinks=False).st_ino == self._inode
        except OSError:
            return False

    @property
    def has_arenas(self) -> bool:
        """True while the arenas are there: an engine that starts may have removed one."""
        return all((self.seat / name).exists() for name in self.files.values())

    def claim(self, keys: Sequence[bytes]) -> Claim:
        """Return the valid entries of some keys; called before their slots are read."""
        contents, names = self.contents, Names.of(keys)
        generation = contents.generation
        slots = contents.find(names)
        rows = np.flatnonzero(slots >= 0)
        read = contents.entries[slots[rows]]
        fits = (read["name"] == names.words[rows]).all(axis=1)
        fits &= contents.fits(slots[rows], read, generation)
        rows = rows[fits]
        order_memory()
        return Claim(rows, slots[rows], read["sum"][fits], generation)

    def still_holds(self, claim: Claim) -> NDArray[np.bool_]:
        """Return for each slot of a claim whether its bytes, read since then, are those claimed."""
        order_memory()
        same: NDArray[np.bool_] = self.contents.entries["sum"][claim.slots] == claim.sums
        if self.contents.generation != claim.generation or not self.is_current:
            same[:] = False
        return same

    def arena(self, rank: int, num_slots: int, slot_bytes: int) -> NDArray[np.uint8] | None:
        """Return the slots of a rank, uint8 of `(num_slots, slot_bytes)`; None if they are gone.

        Mapped read-only on the first call. A file that became shorter is not touched: reading past
        its end would kill the process.
        """
        path = self.seat / self.files[rank]
        nbytes = num_slots * slot_bytes
        try:
            if os.stat(path, follow_symlinks=False).st_size < nbytes:
                return None
            if (known := self._arenas.get(path.name)) is None:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
                finally:
                    os.close(fd)
                known = np.frombuffer(memory, np.uint8).reshape(num_slots, slot_bytes)
                self._arenas[path.name] = known
        except (OSError, ValueError):
            return None
        return known


class PeerDirectories:
    """The directories of the other seats of a pool whose arenas match `arenas`, given by rank.

    A thread adds new ones and drops removed ones, until `close` or the end of this object.
    """

    def __init__(self, arenas: Mapping[int, Path]) -> None:
        (self._seat,) = {arena.parent for arena in arenas.values()}
        self._kinds = {rank: _kind(arena.name) for rank, arena in arenas.items()}
        self.all: tuple[PeerDirectory, ...] = ()
        """Replaced as a whole, so any thread may read it."""
        self._ended = threading.Event()
        self._finalizer = weakref.finalize(self, self._ended.set)
        self.refresh()
        threading.Thread(
            target=_refresh,
            args=(weakref.ref(self), self._ended),
            name="kv-offload-peers",
            daemon=True,
        ).start()

    def refresh(self) -> None:
        """List the seats of the pool."""
        known = {peer.seat: peer for peer in self.all if peer.is_current and peer.has_arenas}
        found = []
        for seat in _seats(self._seat):
            peer = known.get(seat) or PeerDirectory.open(seat, self._kinds)
            if peer is not None:
                found.append(peer)
        if found != [*self.all]:
            self.all = tuple(found)

    def have(self, keys: Sequence[bytes], *, uses: bool = False) -> NDArray[np.bool_]:
        """Return for each key whether a peer seems to have it; sums are not verified.

        Takes 0.3 ms for 2,048 keys that none of seven peers has. With `uses`, each key found counts
        as a use for its owner. See `hash_keys` for the keys.
        """
        peers, found = self.all, np.zeros(len(keys), bool)
        maybe = may_have([peer.contents.index for peer in peers], hash_keys(keys))
        if not maybe.any():
            return found
        for peer, its in zip(peers, maybe, strict=True):
            rows = np.flatnonzero(its & ~found)
            if not len(rows):
                continue
            slots = peer.contents.find(Names.of([keys[row] for row in rows.tolist()]))
            found[rows] = has = slots >= 0
            if uses and has.any():
                peer.contents.mark(slots[has])
        return found

    def close(self) -> None:
        """Drop all of them and end the thread."""
        self._ended.set()
        self.all = ()


def arena_kinds(seat: Path) -> dict[int, str]:
    """Return the kinds of a seat's arenas by rank; seats of a pool with equal kinds are peers."""
    contents = open_directory(seat)
    files = {} if contents is None else read_names(contents.files)
    return {rank: _kind(name) for rank, name in files.items()}


def _kind(arena: str) -> str:
    """Return an arena's name without its token; the rest describes the layout."""
    return arena.rpartition(".")[0]


def read_names(text: bytes) -> dict[int, str]:
    """Return the files that a header names; none if it has another format."""
    try:
        files = {int(rank): str(name) for rank, name in json.loads(text)}
    except (ValueError, TypeError):
        return {}
    return files if file_names(files) == text else {}


def _seats(own: Path) -> list[Path]:
    try:
        with os.scandir(own.parent) as entries:
            found = {entry.name: SEAT.fullmatch(entry.name) for entry in entries}
    except OSError:
        return []
    numbers = sorted((int(seat[1]), name) for name, seat in found.items() if seat)
    seats = [own.parent / name for _, name in numbers]
    return [seat for seat in seats if seat != own][:MAX_PEERS]


def _refresh(peers: weakref.ref[PeerDirectories], ended: threading.Event) -> None:
    while not ended.wait(REFRESH_SECONDS):
        alive = peers()
        if alive is None:
            return
        alive.refresh()
        del alive
