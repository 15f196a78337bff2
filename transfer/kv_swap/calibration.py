"""What was measured of a device's copy paths, and the file that keeps it.

The file lies in the user's cache folder. Its name and its content carry everything that the figures
depend on, so a machine that has changed finds nothing and nobody has to clear a cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.copy_path import PATHS, PathName
from kv_swap.engine import Direction

logger = logging.getLogger(__name__)

MEASURED_BY = 1
"""Version of the measuring code: raise it when figures of before and after cannot be compared."""

PAGE_BYTES = (16 << 10, 64 << 10, 256 << 10, 2 << 20)
"""Page sizes that are measured."""

PAGES = (8, 32)
"""Numbers of pages that are measured, of each size: what the copy engine gets in one slice."""

_CACHE_VARIABLE = "XDG_CACHE_HOME"

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """All that the figures depend on. `link` is what the device negotiated, as the system says."""

    name: str
    capability: tuple[int, int]
    driver: str
    link: str
    measured_by: int = MEASURED_BY


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: a job of `pages` scattered pages, from its queueing to its last byte."""

    path: PathName
    direction: Direction
    page_bytes: int
    pages: int
    gbps: PositiveFloat


@dataclass(frozen=True, slots=True)
class Calibration:
    """A point for every path, direction, page size and number of pages."""

    key: DeviceKey
    points: tuple[Point, ...]

    def grids(self) -> dict[tuple[PathName, Direction], NDArray[np.float64]]:
        """Return GB/s by path and direction, `(len(PAGE_BYTES), len(PAGES))`.

        Raises `ValueError` if a point is missing.
        """
        gbps = {(p.path, p.direction, p.page_bytes, p.pages): p.gbps for p in self.points}
        try:
            return {
                (path, direction): np.array(
                    [[gbps[path, direction, size, n] for n in PAGES] for size in PAGE_BYTES]
                )
                for path in PATHS
                for direction in Direction
            }
        except KeyError as error:
            raise ValueError(f"the measurement {error} is missing") from error


def cache_folder() -> Path:
    """Return the folder of this project in the user's cache folder; it need not exist.

    Raises `RuntimeError` if the user has no home.
    """
    base = os.environ.get(_CACHE_VARIABLE)
    # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "kv-offload"


def cache_file(key: DeviceKey) -> Path:
    """Return where the calibration of a device is kept. Raises `RuntimeError` without a home."""
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]
    return cache_folder() / f"calibration-{digest}.json"


def read_cached(key: DeviceKey) -> Calibration | None:
    """Return what was kept for this device, or None; a file that is no good is warned of, once."""
    return _or_none("read", key, lambda path: _read(path, key))


def write_cached(calibration: Calibration) -> Path | None:
    """Keep a calibration and return its file; None, with a warning, where it cannot be written."""
    return _or_none("written", calibration.key, lambda path: _write(path, calibration))


_T = TypeVar("_T")

_warned_of: set[str] = set()


def _or_none(what: str, key: DeviceKey, use: Callable[[Path], _T]) -> _T | None:
    """Use the cache file; whatever is wrong with it becomes one warning."""
    place = "the user's cache folder"
    try:
        path = cache_file(key)
        place = str(path)
        return use(path)
    except (OSError, RuntimeError, ValueError, msgspec.MsgspecError) as error:
        subject = f"the calibration in {place} cannot be {what}"
        if subject not in _warned_of:
            _warned_of.add(subject)
            logger.warning("%s: %s", subject, error)
        return None


def _read(path: Path, key: DeviceKey) -> Calibration | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    calibration = msgspec.json.decode(content, type=Calibration)
    if calibration.key != key:
        raise ValueError(f"it is one of {calibration.key}, this is {key}")
    calibration.grids()
    return calibration


def _write(path: Path, calibration: Calibration) -> Path:
    """Write beside the file and rename, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
    try:
        Path(file.name).replace(path)
    except OSError:
        Path(file.name).unlink()
        raise
    return path
