"""Sizes as people write them, and how much host memory this process may use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath

from kv_offload.errors import CapacityError

UNITS = ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
_BINARY_UNITS = ("TiB", "GiB", "MiB", "KiB")
_UNIT_BYTES = {
    unit.lower(): (1024 if "i" in unit else 1000) ** "bkmgt".index(unit[0].lower())
    for unit in UNITS
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z%]*)\s*", re.ASCII | re.IGNORECASE)
_MEM_TOTAL = re.compile(r"^MemTotal:\s+([0-9]+) kB$", re.MULTILINE)


def parse_size(text: str, whole_bytes: int) -> int:
    """Return the bytes that `text` means, rounded down: `48GiB`, `1.5 TB`, or `40%` of a whole.

    Units are matched without regard to case, so `Gb` is a gigabyte, not a gigabit.

    Raises:
        ValueError: not a positive number with a unit of `UNITS` or `%`, or less than one byte.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError("not a positive number and a unit")
    number, unit = match.groups()
    if not unit:
        raise ValueError("the unit is missing")
    if unit != "%" and unit.lower() not in _UNIT_BYTES:
        raise ValueError(f"unknown unit {unit!r}, known are {', '.join(UNITS)} and %")
    one = Fraction(whole_bytes, 100) if unit == "%" else _UNIT_BYTES[unit.lower()]
    size_bytes = int(Fraction(number) * one)
    if size_bytes < 1:
        raise ValueError("less than one byte")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` in the largest binary unit that it fills, with up to two decimals.

    Not exact: an error message that compares sizes gives the bytes too.
    """
    for unit in _BINARY_UNITS:
        if size_bytes >= _UNIT_BYTES[unit.lower()]:
            number = f"{size_bytes / _UNIT_BYTES[unit.lower()]:.2f}".rstrip("0").rstrip(".")
            return f"{number} {unit}"
    return f"{size_bytes} B"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory that this process may use, and the file that sets that limit."""

    size_bytes: int
    source: str


def read_host_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> HostMemory:
    """Return the smallest of the machine's memory and the limits of this process's cgroups.

    It is what exists, not what is free. Limits outside the cgroup namespace cannot be seen.

    Raises:
        CapacityError: the machine's memory or a limit that exists cannot be read.
    """
    try:
        return min(_limits(proc, cgroups), key=lambda limit: limit.size_bytes)
    except (OSError, ValueError) as error:
        raise CapacityError(
            f"cannot tell how much memory this machine has: {error}. "
            f"Make {proc}/meminfo and the limits under {cgroups} readable to this process"
        ) from error


def _limits(proc: Path, cgroups: Path) -> Iterator[HostMemory]:
    meminfo = proc / "meminfo"
    match = _MEM_TOTAL.search(meminfo.read_text())
    if match is None:
        raise ValueError(f"no MemTotal in {meminfo}")
    yield HostMemory(int(match[1]) * 1024, str(meminfo))
    for file in _limit_files(proc, cgroups):
        try:
            text = file.read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            continue  # no such controller, a root cgroup, or a path outside this namespace
        if text == "max":
            continue
        if not text.isdecimal():
            raise ValueError(f"{file} holds {text!r} where bytes belong")
        yield HostMemory(int(text), str(file))


def _limit_files(proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield where a limit may stand: in this process's cgroups and in every one above them."""
    try:
        text = (proc / "self/cgroup").read_text(errors="surrogateescape")
    except FileNotFoundError:
        return  # a kernel without cgroups
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            name, roots = "memory.max", [cgroups, cgroups / "unified"]
        elif "memory" in controllers.split(","):
            name, roots = "memory.limit_in_bytes", [cgroups / "memory"]
        else:
            continue
        parts = PurePosixPath(path).parts[1:]
        if ".." in parts:
            parts = ()  # it lies outside the namespace; only the namespace's root can be seen
        for root in roots:
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(*parts[:depth], name)
