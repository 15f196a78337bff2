"""Parses sizes as people write them, and formats them for messages."""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "Ki", "Mi", "Gi", "Ti")
SMALLEST_BYTES = 1 << 20
"""The smallest pool. A pool needs thousands of blocks, and one block of a small model takes a third
of this (SmolLM2-135M: 360 KiB). So a smaller number probably lacks a unit, and a smaller percentage
is a mistake. Rates may be smaller if they have a unit."""

TOO_LITTLE = "less than 1 MiB (1048576 bytes), hardly one block"
_UNIT_BYTES = {
    unit.lower(): (1024 if "i" in unit else 1000) ** "bkmgt".index(unit[0].lower())
    for unit in UNITS
}
_SIZE = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([a-z%]*)\s*", re.ASCII | re.IGNORECASE)


def parse_size(size: str | float, whole_bytes: int | None) -> int:
    """Return `size` in bytes, rounded down: `48GiB`, `1.5 TB`, or `40%` of `whole_bytes`.

    `%` is not allowed if `whole_bytes` is None. An integer is in bytes. Units ignore case, so `Gb`
    is a gigabyte, not a gigabit. `Gi`, as in Kubernetes, is `GiB`.

    Raises `ValueError`, which says what to write, for anything that is not a positive number with a
    unit of `UNITS` or `%`, and for an integer or a percentage below `SMALLEST_BYTES`.
    """
    if isinstance(size, float):
        raise ValueError("a number with a fraction needs a unit.")  # noqa: TRY004 - a wrong value
    if isinstance(size, int):
        return _check_bare_size(size, has_whole=whole_bytes is not None)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError("not a positive number and a unit.")
    number, unit = match.groups()
    if not unit:
        meant = _with_units(number, has_whole=whole_bytes is not None)
        raise ValueError(f"the unit is missing, write {meant}.")
    if unit == "%" and whole_bytes is not None:
        one = Fraction(whole_bytes, 100)
    elif unit.lower() in _UNIT_BYTES:
        one = Fraction(_UNIT_BYTES[unit.lower()])
    else:
        *others, last = [*UNITS, *(["%"] if whole_bytes is not None else [])]
        known = f"known are {', '.join(others)} and {last}"
        if f"{unit}b".lower() in _UNIT_BYTES:  # `G`: 10^9 for Kubernetes, 2^30 for Docker
            known = f"write {number}{unit.upper()}B or {number}{unit.upper()}iB"
        raise ValueError(f"unknown unit {unit!r}, {known}.")
    size_bytes = int(Fraction(number) * one)
    if size_bytes < 1:
        raise ValueError("less than one byte.")
    if unit == "%" and size_bytes < SMALLEST_BYTES:
        raise ValueError(f"that is {size_bytes} bytes here, {TOO_LITTLE}.")
    return size_bytes


def _check_bare_size(size_bytes: int, *, has_whole: bool) -> int:
    if size_bytes >= SMALLEST_BYTES:
        return size_bytes
    if size_bytes < 1:
        raise ValueError(f"{TOO_LITTLE}.")
    meant = _with_units(str(size_bytes), has_whole=has_whole)
    raise ValueError(f"without a unit this means bytes, {TOO_LITTLE}. Did you mean {meant}?")


def _with_units(number: str, *, has_whole: bool) -> str:
    """Return suggestions for a number without a unit: a pool's size, or bytes."""
    value = float(number)
    if value >= SMALLEST_BYTES:
        return f"{number}B"
    units = ["GiB", *(["%"] if has_whole else [])] if value <= 100 else ["MiB"]
    return " or ".join(f"{number}{unit}" for unit in units)


def format_size(size_bytes: int) -> str:
    """Return a size in the largest binary unit not above it, with up to two decimals."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _UNIT_BYTES[unit.lower()]:
            hundredths = round(Fraction(100 * size_bytes, _UNIT_BYTES[unit.lower()]))
            number = f"{hundredths // 100}.{hundredths % 100:02}".rstrip("0").rstrip(".")
            return f"{number} {unit}"
    return f"{size_bytes} B"


def describe_bytes(size_bytes: int) -> str:
    """Return a size rounded and in exact bytes, for errors that compare sizes."""
    exactly = f"{size_bytes} byte{'' if size_bytes == 1 else 's'}"
    return exactly if size_bytes < 1024 else f"{format_size(size_bytes)} ({exactly})"
