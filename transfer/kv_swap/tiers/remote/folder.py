"""A client of a shared folder: NFS, Lustre, CephFS, or a local disk that several engines use.

    PATH/FILE_ID/ab/abcdef...          an object: header page and slot
    PATH/FILE_ID/ab/.abcdef....TOKEN   one that is being written, renamed when it is complete

A killed process leaves its unfinished file, which a later sweep removes. A file damaged by a power
cut or a server has a wrong size or checksum, and its reader removes it. A file that is removed
while another process reads it stays readable there, or becomes stale, as on NFS, and then counts as
missing. Files with other names are left alone.

Only paths are kept between calls, so a folder that is mounted again keeps working.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kv_swap.errors import TierError, explain
from kv_swap.tiers.record import PAGE_BYTES
from kv_swap.tiers.remote.client import PREFIX, Fate, Parts, RemoteClient, memory_of
from kv_swap.tiers.remote.sweep import Entry, Sweeper
from kv_swap.tiers.workers import in_parallel

TOUCH_SECONDS = 600.0
"""A read renews a file's mark only if the mark is older: one server operation for many reads."""

UNFINISHED_SECONDS = 86_400.0
"""An unfinished file this old belongs to a killed process. Clocks must differ by less."""

ASKING_THREADS = 8
"""A network filesystem takes about 0.3 ms per lookup, so several run concurrently."""

ASKED_ALONE = 16
"""Up to this many are looked up one after the other, on a single thread."""

LOOKS_BETWEEN_PAUSES = 32
PAUSE_SECONDS = 0.001
"""Pause of a sweep, which checks files in a Python loop: the engine's threads need the GIL."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)

_FILE_ID, _PART = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
_OBJECT = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\.[0-9a-f]{16}")

Result = TypeVar("Result")


class FolderClient(RemoteClient):
    """Objects are files below `path`, which must exist, and take at most `max_bytes` together.

    Uses direct I/O if the folder supports it and pages are whole. Files are private to this user.
    """

    threads = 8
    probes = 4 * ASKING_THREADS

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._sweeper = Sweeper(self, max_bytes)
        self._is_direct = True
        self._closed = False

    def connect(self) -> None:
        self._check()

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self._check()
        threads = ASKING_THREADS if len(keys) > ASKED_ALONE else 1
        try:
            return in_parallel(lambda key: self._file(key).exists(), keys, threads)
        except OSError as error:
            raise TierError(f"cannot look into {self._path}: {explain(error)}") from error

    def put(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        self._check()
        return [self._write(self._file(key), own) for key, own in zip(keys, parts, strict=True)]

    def get(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        self._check()
        return [self._read(self._file(key), own) for key, own in zip(keys, parts, strict=True)]

    def remove(self, keys: Sequence[str]) -> None:
        """See `RemoteClient`. Raises only if all removals fail: one must not stop the others."""
        errors = []
        for key in keys:
            try:
                self._file(key).unlink(missing_ok=True)
            except OSError as error:
                if error.errno not in _GONE:
                    errors.append(error)
        if keys and len(errors) == len(keys):
            raise TierError(f"cannot remove {keys[0]}: {explain(errors[0])}") from errors[0]

    def close(self) -> None:
        self._closed = True
        self._sweeper.close()

    def entries(self) -> Iterator[Entry]:
        """See `Sweepable`. Also removes unfinished files of killed processes."""
        for looks, entry in enumerate(self._walk()):
            if self._closed:
                return
            if looks % LOOKS_BETWEEN_PAUSES == 0:
                time.sleep(PAUSE_SECONDS)
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:  # another process has removed it
                continue
            if not entry.name.startswith("."):
                file_id = Path(entry.path).parts[-3]
                yield Entry(f"{PREFIX}{file_id}/{entry.name}", found.st_size, found.st_mtime)
            elif time.time() - found.st_mtime > UNFINISHED_SECONDS:
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()

    def _walk(self) -> Iterator[os.DirEntry[str]]:
        """Yield the files that are objects, finished or not."""
        try:
            folders = _matching(self._path, _FILE_ID)
        except OSError as error:
            raise TierError(f"cannot read {self._path}: {explain(error)}") from error
        for folder in folders:
            with contextlib.suppress(OSError):
                for part in _matching(Path(folder.path), _PART):
                    with contextlib.suppress(OSError):
                        yield from _matching(Path(part.path), _OBJECT)

    def _file(self, key: str) -> Path:
        file_id, _, digest = key.removeprefix(PREFIX).partition("/")
        return self._path / file_id / digest[:2] / digest

    def _check(self) -> None:
        """Raise `TierError` if the folder does not exist, for example while it is not mounted."""
        if self._closed:
            raise TierError(f"the client of {self._path} is closed")
        try:
            self._path.stat()
        except OSError as error:
            raise TierError(f"cannot use the folder {self._path}: {explain(error)}") from error

    def _write(self, file: Path, parts: Parts) -> Fate | TierError:
        unfinished = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        nbytes = sum(size for _, size in parts)

        def write(direct: int) -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct
            with _closing(_open_in_folder(unfinished, flags)) as fd:
                _move(os.pwritev, fd, parts)

        try:
            try:
                self._directly(write, parts)
                unfinished.rename(file)
            except BaseException:
                with contextlib.suppress(OSError):
                    unfinished.unlink(missing_ok=True)
                raise
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._sweeper.wrote(0, is_full=True)
                return Fate.FULL
            return TierError(f"cannot write in {self._path}: {explain(error)}")
        self._sweeper.wrote(nbytes)
        return Fate.DONE

    def _read(self, file: Path, parts: Parts) -> Fate | TierError:
        nbytes = sum(size for _, size in parts)

        def read(direct: int) -> Fate:
            with _closing(os.open(file, os.O_RDONLY | os.O_CLOEXEC | direct)) as fd:
                found = os.fstat(fd)
                if found.st_size != nbytes or not _move(os.preadv, fd, parts):
                    return Fate.OTHER
                # Also renew marks in the future: this clock is slow, or the writer's fast.
                if abs(time.time() - found.st_mtime) > TOUCH_SECONDS:
                    with contextlib.suppress(OSError):  # reads also work in a read-only folder
                        os.utime(file)
            return Fate.DONE

        try:
            return self._directly(read, parts)
        except OSError as error:
            if error.errno in _GONE:
                return Fate.MISSING
            return TierError(f"cannot read in {self._path}: {explain(error)}")

    def _directly(self, call: Callable[[int], Result], parts: Parts) -> Result:
        """Call with `O_DIRECT` if pages are whole and the folder supports it, otherwise with 0."""
        if self._is_direct and all(a % PAGE_BYTES == n % PAGE_BYTES == 0 for a, n in parts):
            try:
                return call(os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
        return call(0)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    """Close a descriptor. May raise `OSError`: NFS reports a full server only on close."""
    try:
        yield fd
    finally:
        os.close(fd)


def _open_in_folder(file: Path, flags: int) -> int:
    """Create and open a file, with its folders if they are missing."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return os.open(file, flags | os.O_CLOEXEC, 0o600)
        # Not the top folder: if it is not mounted, a new one would be on another disk.
        file.parent.parent.mkdir(0o700, exist_ok=True)
        file.parent.mkdir(0o700, exist_ok=True)
    return os.open(file, flags | os.O_CLOEXEC, 0o600)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[os.DirEntry[str]]:
    """Return a folder's entries whose names match. Raises `OSError`."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if pattern.fullmatch(entry.name)]


def _move(call: Callable[..., int], fd: int, parts: Parts) -> bool:
    """Read or write all parts from the start of a file; return False if the file is too short."""
    memory = memory_of(parts)
    offset = 0
    while memory:
        moved = call(fd, memory, offset)
        if moved == 0:
            return False
        offset += moved
        while memory and moved >= len(memory[0]):
            moved -= len(memory.pop(0))
        if moved:
            memory[0] = memory[0][moved:]
    return True
