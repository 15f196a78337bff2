"""The seat of an engine in a `host_pool`: a folder with its host memory.

POOL/seat-0/lock               locked by the engine that has the seat, as long as it lives
POOL/seat-0/about.json         describes that engine to tools that list the pool
POOL/seat-0/rank-0...          the arena of each rank (`kv_swap.memory.arena_file`)
POOL/seat-0/directory          which key is in which slot (`kv_offload.cache.directory`)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from kv_swap.errors import PinnedMemoryError
from kv_swap.memory.arena_file import ArenaFiles, find_arenas, make_private_folder
from kv_swap.memory.reading import Readers
from kv_swap.memory.registration import MemoryRoom
from kv_swap.tiers.probe import find_filesystem

from kv_offload.cache.directory import DIRECTORY
from kv_offload.cache.seats import LOCK, find_seats, lock_file, seat_number
from kv_offload.config import OffloadConfig
from kv_offload.config.host_memory import read_available_memory
from kv_offload.errors import ConfigError, UnsupportedError
from kv_offload.worker.capacity import read_boot
from kv_offload.worker.sharing import SharingRanks

logger = logging.getLogger(__name__)

ABOUT = "about.json"

FILESYSTEM = "tmpfs"
"""The only filesystem allowed for pools. A ramfs does not report its free space, and files of a
hugetlbfs cannot be written."""

ORPHAN_SECONDS = 24 * 3600.0
"""A pool that no engine holds or has used for this many seconds is emptied by the next engine that
starts with a pool in the same place."""

LOCK_SECONDS = 1.0
"""Seconds that an engine waits for a seat with its contents that an exiting process may still hold,
before it takes or creates another. The kernel releases locks only after it has torn down the memory
of a process."""


class About(msgspec.Struct):
    """The content of `ABOUT`."""

    pid: int | None = None
    """The process of the engine's first rank, in its own container."""
    started: float | None = None
    """When the engine started, in seconds since 1970."""
    contents: dict[str, str] = {}


@dataclass(frozen=True)
class Pool:
    """A pool of this host, in `folder`.

    `contents` names everything that determines the bytes of a block or the meaning of its key.
    """

    folder: Path
    contents: Mapping[str, str]

    def take_seat(self, rank: int, gather: Callable[[Any], list[Any]]) -> Seat:
        """Take a seat for an engine, if possible one with its contents. All ranks call this.

        `gather` collects a value from every rank, and waits for all. Raises `ConfigError`, or
        `UnsupportedError` for ranks on several hosts.
        """
        seat, problem = None, ""
        if rank == 0:
            try:
                seat = self._take()
            except (PinnedMemoryError, OSError) as error:
                problem = str(error)
        own = None if seat is None else (seat.folder, seat.kept_bytes)
        places = gather((read_boot(), own, problem))
        for _, _, problem in places:
            if problem:
                raise ConfigError(f"host_pool: {problem}")
        if len({boot for boot, _, _ in places}) > 1:
            if seat is not None:
                seat.leave()
            raise UnsupportedError(
                "host_pool: the ranks of this engine are on several hosts, which share no memory: "
                "remove the key"
            )
        ((folder, kept_bytes),) = (taken for _, taken, _ in places if taken is not None)
        return seat or Seat(folder, self.contents, kept_bytes)

    def _take(self) -> Seat:
        make_private_folder(self.folder.parent)
        make_private_folder(self.folder)
        _free_orphans(self.folder)
        wanted = digest(self.contents)
        until = time.monotonic() + LOCK_SECONDS
        while seats := find_seats(self.folder):
            is_over = time.monotonic() >= until
            own = [seat for seat in seats if _has(seat, wanted)]
            others = [seat for seat in seats if seat not in own] if is_over or not own else []
            for seat in own + others:
                if (lock := lock_file(seat / LOCK)) is not None:
                    return self._begin(seat, lock)
            if is_over:
                break
            time.sleep(0.05)
        number = 1 + max(map(seat_number, find_seats(self.folder)), default=-1)
        while True:
            seat = self.folder / f"seat-{number}"
            make_private_folder(seat)
            if (lock := lock_file(seat / LOCK)) is not None:
                return self._begin(seat, lock)
            number += 1

    def _begin(self, seat: Path, lock: int) -> Seat:
        """Prepare a seat for all ranks: stale memory is freed before any rank takes memory."""
        arenas = find_arenas(seat)
        stale = [name for name in arenas if not _is_of(name, digest(self.contents))]
        if len(stale) == len(arenas):  # removed before them, because peers trust it
            (seat / DIRECTORY).unlink(missing_ok=True)
        for name in stale:
            (seat / name).unlink(missing_ok=True)
        about = About(os.getpid(), time.time(), {**self.contents})
        new = seat / f"{ABOUT}.new"
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(about))
        new.rename(seat / ABOUT)
        return Seat(seat, self.contents, _free_bytes(seat), lock)


@dataclass
class Seat:
    """The seat of an engine. The rank that took it has the lock."""

    folder: Path
    contents: Mapping[str, str]
    kept_bytes: int
    """Bytes of memory that an earlier process left here and that no process holds."""
    lock: int = -1

    def __post_init__(self) -> None:
        self._readers = Readers(self.folder)

    def wait_for_readers(self, lack: str) -> bool:
        """Wait briefly for peers that still hold memory of this seat, whose arenas were removed.

        Returns False on all ranks but one, and once waiting is useless. See `Readers.wait`.
        """
        return self.lock >= 0 and not find_arenas(self.folder) and self._readers.wait(lack)

    def arena_files(
        self,
        rank: int,
        num_ranks: int,
        pages: str,
        sharing: SharingRanks,
        num_slots: int,
        *,
        reserve: bool,
    ) -> ArenaFiles:
        """Return the arena files of a rank; `pages` describes the layout of a slot."""
        place = [rank, num_ranks, sharing.index, sharing.count, pages, num_slots, read_boot()]
        kind = f"{digest(self.contents)}-{digest(place)}"
        room = MemoryRoom(read_available_memory, 0) if reserve else None
        return ArenaFiles(self.folder, rank, kind, room, reserve=reserve)

    def leave(self) -> None:
        """Release the seat, so that another engine can take it."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def check_pool_folder(path: str) -> None:
    """Raise `ConfigError` if `host_pool_path` is not writable, or not in memory."""
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"host_pool_path: {path!r}: there is no such folder, or this user may not write there. "
            "Mount a memory filesystem there, or name another"
        )
    filesystem = find_filesystem(Path(path))
    if filesystem != FILESYSTEM:
        raise ConfigError(
            f"host_pool_path: {path!r} is on {filesystem}, and must be on {FILESYSTEM}: a "
            "disk gets pages in any order, so blocks may be wrong after a power loss. Mount a "
            "tmpfs there (in Kubernetes an emptyDir with medium Memory), or name another folder, "
            "such as /dev/shm"
        )


def pool_folder(config: OffloadConfig) -> Path:
    """Return the folder of the pool named in a configuration."""
    assert config.host_pool is not None
    return user_folder(Path(config.host_pool_path)) / config.host_pool


def user_folder(path: Path) -> Path:
    """Return the folder of this user's pools."""
    return path / f"kv-offload-{os.geteuid()}"


def free_seat(seat: Path) -> int | None:
    """Free the memory of a seat; return its bytes, or None if an engine holds the seat."""
    lock = lock_file(seat / LOCK)
    if lock is None:
        return None
    # The empty seat stays, because an engine may be about to lock it.
    for directory in seat.glob(f"{DIRECTORY}*"):
        directory.unlink(missing_ok=True)
    arenas = find_arenas(seat)
    for name in arenas:
        (seat / name).unlink(missing_ok=True)
    os.close(lock)
    return sum(arenas.values())


def is_held(seat: Path) -> bool:
    """Return whether an engine holds a seat. No engine can take the seat during the check."""
    lock = lock_file(seat / LOCK)
    if lock is None:
        return True
    os.close(lock)
    return False


def _free_orphans(pool: Path) -> None:
    """Empty other pools that were abandoned long ago; this pool's seats are about to be used."""
    oldest = time.time() - ORPHAN_SECONDS
    for other in pool.parent.iterdir():
        with contextlib.suppress(OSError):
            seats = find_seats(other) if other != pool and other.is_dir() else []
            # An engine also reads seats that no engine holds.
            if any(_last_used(seat) >= oldest or is_held(seat) for seat in seats):
                continue
            for seat in seats:
                if freed := free_seat(seat):
                    logger.info("kv-offload: freed %d bytes that %s had kept", freed, seat)


def _last_used(seat: Path) -> float:
    """Return when an engine last used a seat, or started to; 0 if none did."""
    times = [0.0]
    for name in (ABOUT, DIRECTORY):
        with contextlib.suppress(FileNotFoundError):
            times.append((seat / name).stat().st_mtime)
    return max(times)


def digest(value: Any) -> str:
    """Return a digest of a value: 16 hexadecimal digits."""
    text = json.dumps(value if not isinstance(value, Mapping) else {**value}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _free_bytes(seat: Path) -> int:
    """Return the bytes of a seat's arenas that no process uses.

    Locks each arena for a moment, during which no process can adopt it.
    """
    free_bytes = 0
    for name, nbytes in find_arenas(seat).items():
        with contextlib.suppress(OSError):
            if (lock := lock_file(seat / name)) is not None:
                os.close(lock)
                free_bytes += nbytes
    return free_bytes


def _has(seat: Path, contents: str) -> bool:
    return any(_is_of(name, contents) for name in find_arenas(seat))


def _is_of(arena: str, contents: str) -> bool:
    return arena.split(".")[1].startswith(contents)
