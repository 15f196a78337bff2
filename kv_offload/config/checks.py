"""Checks a configuration against this machine, for `config`, `doctor` and the engine.

The engine runs them before it loads the model, which takes minutes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kv_offload.config.disk_folder import find_ranks, find_replicas
from kv_offload.config.schema import DiskConfig
from kv_offload.config.sizes import SMALLEST_BYTES, TOO_LITTLE, describe_bytes, format_size
from kv_offload.config.trace import ResolvedConfig
from kv_offload.errors import CapacityError, ConfigError

ANSWER_SECONDS = 5.0
"""Seconds that a start waits for a network filesystem to answer."""


def check_sizes(traced: ResolvedConfig) -> None:
    """Refuse memory or a disk that is too small for blocks, or larger than its filesystem.

    Ignores how much is free now. Accepts a disk that does not exist yet. Raises `CapacityError`.
    """
    disk = traced.config.disk
    sizes = {"cpu_bytes": traced.config.cpu_bytes}
    if disk is not None:
        sizes["disk.bytes"] = disk.bytes
    remote = traced.config.remote
    if remote is not None and remote.kind != "mooncake" and (remote.bytes or remote.path):
        sizes["remote.bytes"] = remote.bytes
    for name, size_bytes in sizes.items():
        given = traced.given[name]
        if size_bytes < SMALLEST_BYTES:
            raise CapacityError(
                f"{given.source}: {name}: {given.shown}: asks for {describe_bytes(size_bytes)}, "
                f"{TOO_LITTLE}. Give gigabytes, for example 48GiB"
            )
    if disk is not None:
        with contextlib.suppress(ConfigError, OSError):  # `check_disk` reports it
            _check_total(
                find_place(Path(disk.path)),
                disk.bytes * traced.replicas,
                _describe_request(traced, disk),
                "Ask for less, or name a folder on another disk.",
            )
    if traced.config.host_pool is not None:
        with contextlib.suppress(OSError):  # `check_pool_folder` reports it
            _check_total(
                Path(traced.config.host_pool_path),
                traced.config.cpu_bytes * traced.replicas,
                f"{traced.describe_request()} in the host pool",
                "Mount it larger (in a container --shm-size, in Kubernetes an emptyDir with medium "
                "Memory), name another as host_pool_path, or lower cpu_bytes",
            )


def _check_total(place: Path, needed_bytes: int, request: str, remedy: str) -> None:
    """Refuse a request for more than a filesystem could ever hold."""
    filesystem_bytes = shutil.disk_usage(place).total
    if needed_bytes > filesystem_bytes:
        raise CapacityError(
            f"{request}, but the filesystem of {place} has {describe_bytes(filesystem_bytes)} in "
            f"all. {remedy}"
        )


def find_place(path: Path) -> Path:
    """Return the folder in which a disk's files would be created: `path`, or its parent.

    An engine creates `path` but not its parents: if a disk is not mounted, they would be on another
    disk. Raises `ConfigError` if the engine could not create a file.
    """
    try:
        place = path if os.path.lexists(path) else path.parent
        _check_writable(place)
    except OSError as error:
        raise unusable_folder(path, error) from error
    return place


def _check_writable(folder: Path) -> None:
    """Raise `OSError` unless this user may create files in this folder."""
    if not stat.S_ISDIR(folder.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "this user may not write there", str(folder))


def unusable_folder(path: Path, error: OSError) -> ConfigError:
    """Return the error that refuses a `disk.path`."""
    return ConfigError(
        f"disk.path: {str(path)!r}: the folder cannot be created or used: {error}. Create it for "
        "the user that runs the engine, or name another"
    )


def check_shared_folder(path: Path) -> None:
    """Refuse a shared folder that is missing or not writable. Raises `ConfigError`.

    Accepts a folder that does not answer within `ANSWER_SECONDS`: once its server is back, it can
    be used.
    """
    problems: list[OSError] = []

    def look() -> None:
        try:
            _check_writable(path)
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=look, name="kv-offload-look", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if problems:
        raise ConfigError(
            f"remote.path: {str(path)!r}: the folder cannot be used: {problems[0]}. Mount the "
            "filesystem and make the folder, for the user that runs the engines, or name another"
        ) from problems[0]


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """Bytes that are free on a disk, and bytes that kv-offload's files already take there."""

    free_bytes: int
    taken_bytes: int

    def fits(self, needed_bytes: int) -> bool:
        """Return whether this many bytes fit, including those of existing files."""
        return needed_bytes <= self.free_bytes + self.taken_bytes


def read_room(path: Path) -> DiskRoom:
    """Read the free and taken bytes on the disk of a `disk.path`.

    Raises `ConfigError` as `find_place` does, and `OSError` for another user's replica folder.
    """
    place = find_place(path)
    folders = find_replicas(path) if place == path else []
    files = [file for folder in folders for file in find_ranks(folder).values()]
    taken_bytes = sum(file.stat().st_blocks * 512 for file in files)
    return DiskRoom(shutil.disk_usage(place).free, taken_bytes)


def check_disk(traced: ResolvedConfig) -> None:
    """Refuse a disk whose folder cannot be created or written to, or with too little room now.

    Does nothing without a disk. Raises `ConfigError` or `CapacityError`.
    """
    disk = traced.config.disk
    if disk is None:
        return
    path = Path(disk.path)
    try:
        room = read_room(path)
    except OSError:  # the folder of another replica, perhaps of another user
        return
    if not room.fits(disk.bytes * traced.replicas):
        taken = f", and files of kv-offload have {format_size(room.taken_bytes)}"
        raise CapacityError(
            f"{_describe_request(traced, disk)}, but only "
            f"{describe_bytes(room.free_bytes)} are free on the filesystem of {path}"
            f"{taken if room.taken_bytes else ''}. Free space, or ask for less"
        )


def check_recording(path: Path) -> None:
    """Raise `ConfigError` if a trace could not be recorded at `path`. Creates no file."""
    with refused_recording(path):
        with contextlib.suppress(FileNotFoundError):
            if not check_regular(path.stat()).st_size:
                return
        path.parent.stat()
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "its folder is not writable")


@contextlib.contextmanager
def refused_recording(path: Path) -> Iterator[None]:
    """Turn errors on opening a trace file into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"record_trace: {str(path)!r}: the file cannot be created: {error.strerror}. Name one "
            "in a folder that this user may write, or leave record_trace out"
        ) from error


def check_regular(found: os.stat_result) -> os.stat_result:
    """Return `found` if the file is regular; raise `OSError` for a folder, device or pipe."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return found


def _describe_request(traced: ResolvedConfig, disk: DiskConfig) -> str:
    given = traced.given["disk.bytes"]
    text = f"{given.source}: disk.bytes: {given.shown}: asks for {describe_bytes(disk.bytes)}"
    if traced.replicas > 1:
        text += f" for each of {traced.replicas} replicas on this host"
    return text
