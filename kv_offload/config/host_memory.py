"""How much host memory there is for this process, and how much of it can be had now."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kv_offload.errors import CapacityError

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

HEADROOM_BYTES = 2 << 30
"""Memory that no pool takes: where none is left, the kernel ends processes. One half is for what
engines need once they serve: requests, graphs, buffers of NCCL. The other half is for pools that
grow at the same time unseen: 32 MiB for each of 4 threads of 8 ranks. A sum, not a measurement."""

HEADROOM_PART = 16
"""A small machine keeps one part in so many of its memory free: 256 MiB of 4 GiB."""


class HostMemory(NamedTuple):
    """An amount of memory, in bytes, and the file that says so."""

    size_bytes: int
    source: str


def headroom_bytes(host: HostMemory) -> int:
    """Return how much of the memory that there is stays free of pools, in bytes."""
    return min(HEADROOM_BYTES, host.size_bytes // HEADROOM_PART)


def read_host_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """Return the smallest of the machine's memory and the limits of this process's cgroups.

    It is what exists, not what is free. Limits outside the cgroup namespace cannot be seen. Raises
    `CapacityError` if the machine's memory or a limit that exists cannot be read.
    """
    return _smallest(_amounts(proc, cgroups, free=False), proc, cgroups)


def read_available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> HostMemory:
    """Return what this process could take now without the kernel ending or slowing one for it.

    That is the smallest of the machine's `MemAvailable` and, in every cgroup with a limit, the
    limit less what is in use. Cached files do not count as in use: the kernel drops them first.
    Reads some ten files, in 0.3 ms on a machine with 2 cores. Any thread may call it. Raises
    `CapacityError` if the machine's memory, a limit or its use cannot be read.
    """
    return _smallest(_amounts(proc, cgroups, free=True), proc, cgroups)


def _smallest(amounts: Iterator[HostMemory], proc: Path, cgroups: Path) -> HostMemory:
    try:
        return min(amounts, key=lambda amount: amount.size_bytes)
    except (OSError, ValueError) as error:
        raise CapacityError(
            f"cannot tell how much memory this machine has: {error}. "
            f"Make {proc}/meminfo and the limits under {cgroups} readable to this process"
        ) from error


def _amounts(proc: Path, cgroups: Path, *, free: bool) -> Iterator[HostMemory]:
    """Yield the machine's memory and the limits of the cgroups: all of it, or what is free."""
    meminfo, name = proc / "meminfo", "MemAvailable" if free else "MemTotal"
    match = re.search(rf"^{name}:\s+([0-9]+) kB$", meminfo.read_text(), re.MULTILINE)
    if match is None:
        raise ValueError(f"no {name} in {meminfo}")
    yield HostMemory(int(match[1]) * 1024, f"{name} in {meminfo}" if free else str(meminfo))
    for version, file, limit in _cgroup_limits(proc, cgroups):
        if not free:
            yield HostMemory(limit, str(file))
        elif (used := _read_bytes(file.with_name(version.used))) is not None:
            in_use = max(0, used - _cached_bytes(file.with_name("memory.stat"), version.cached))
            source = f"{file} less what {version.used} says, without cached files"
            yield HostMemory(max(0, limit - in_use), source)


@dataclass(frozen=True, slots=True)
class _Version:
    """The names of one version of cgroups."""

    limits: tuple[str, ...]
    """Above `memory.high` the kernel takes back what it can and slows the processes down. It cannot
    take back locked memory, so they would stay slow."""
    used: str
    cached: tuple[str, str]
    """In `memory.stat`, with the cgroups below."""


_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def _read(file: Path) -> str | None:
    """Return a file of a cgroup; `None` for a root cgroup or one outside this namespace."""
    try:
        return file.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_bytes(file: Path) -> int | None:
    """Return the number in a file; `None` for no limit, or where no such file is."""
    text = _read(file)
    if text is None or text == "max":
        return None
    if not text.isdecimal():
        raise ValueError(f"{file} holds {text!r} where bytes belong")
    return int(text)


def _cached_bytes(file: Path, names: tuple[str, ...]) -> int:
    """Return the sum of the values of `names`; a name that the file lacks counts as nothing."""
    lines = [line.partition(" ") for line in (_read(file) or "").splitlines()]
    return sum(int(value) for name, _, value in lines if name in names)


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[_Version, Path, int]]:
    """Yield the limits of this process's cgroups and of every one above, each with its file."""
    try:
        text = (proc / "self/cgroup").read_text(errors="surrogateescape")
    except FileNotFoundError:
        return  # a kernel without cgroups
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, roots = _V2, [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            version, roots = _V1, [cgroups / "memory"]
        else:
            continue
        parts = PurePosixPath(path).parts[1:]
        if ".." in parts:
            parts = ()  # it lies outside the namespace; only the namespace's root can be seen
        folders = [r.joinpath(*parts[:depth]) for r in roots for depth in range(len(parts), -1, -1)]
        for file in (folder / name for folder in folders for name in version.limits):
            limit = _read_bytes(file)
            if limit is not None:
                yield version, file, limit
