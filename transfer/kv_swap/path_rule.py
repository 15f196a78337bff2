"""Which path copies a job: the kernels, unless measurements of this device say otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_swap.calibration import PAGE_BYTES, PAGES, Calibration
from kv_swap.cuda.copy_path import PATHS, PathName
from kv_swap.cuda.dma import SLICE_BYTES, SLICE_COPIES
from kv_swap.engine import Direction

MARGINS = {Direction.LOAD: 0.05, Direction.STORE: 0.10}
"""By how much the copy engine must be faster. It spends the host's time on every page, which
kernels do not; in the direction of stores the copy of the sampled tokens stands in its queue."""


class PathRule(Protocol):
    """Chooses the path of a job."""

    def paths(self, direction: Direction, page_bytes: int) -> frozenset[PathName]:
        """Return all that `choose` may return for pages of this size, whatever their number."""

    def choose(self, direction: Direction, page_bytes: int, pages: int) -> PathName:
        """Return the path for a job of `pages` pages of `page_bytes` bytes on average."""


@dataclass(frozen=True)
class OnlyPath:
    """One path for everything; also for a device of which nothing was measured."""

    path: PathName

    def paths(self, direction: Direction, page_bytes: int) -> frozenset[PathName]:
        """See `PathRule`."""
        return frozenset([self.path])

    def choose(self, direction: Direction, page_bytes: int, pages: int) -> PathName:
        """See `PathRule`."""
        return self.path


@dataclass(frozen=True)
class MeasuredRule:
    """The copy engine where it was measured to be faster by `MARGINS`, for a single slice.

    A larger job goes to the kernels in any case: what exceeds a slice waits for later polls (see
    `dma.py`), which a table measured without an engine's steps in between cannot know.
    Between the measured sizes and numbers of pages GB/s are interpolated over their logarithms;
    beyond them the nearest ones count.
    """

    calibration: Calibration
    _gbps: dict[tuple[PathName, Direction], NDArray[np.float64]] = field(
        init=False, repr=False, compare=False
    )
    # An engine asks for one page size and at most SLICE_COPIES numbers: 0.1 ms each, once.
    _won: dict[tuple[Direction, int, int], bool] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_gbps", self.calibration.grids())

    def paths(self, direction: Direction, page_bytes: int) -> frozenset[PathName]:
        """See `PathRule`."""
        # Interpolated in between, so if the engine wins anywhere, then at a measured number.
        wins = any(self._dma_wins(direction, page_bytes, pages) for pages in PAGES)
        return frozenset(["kernel", "dma"] if wins else ["kernel"])

    def choose(self, direction: Direction, page_bytes: int, pages: int) -> PathName:
        """See `PathRule`."""
        if pages > SLICE_COPIES or pages * page_bytes > SLICE_BYTES:
            return "kernel"
        return "dma" if self._dma_wins(direction, page_bytes, pages) else "kernel"

    def _dma_wins(self, direction: Direction, page_bytes: int, pages: int) -> bool:
        key = direction, page_bytes, pages
        if key not in self._won:
            kernel, dma = (self.gbps(path, *key) for path in PATHS)
            self._won[key] = dma > kernel * (1 + MARGINS[direction])
        return self._won[key]

    def gbps(self, path: PathName, direction: Direction, page_bytes: int, pages: int) -> float:
        """Return the expected GB/s of a path."""
        by_pages = [
            np.interp(np.log2(page_bytes), np.log2(PAGE_BYTES), column)
            for column in self._gbps[path, direction].T
        ]
        return float(np.interp(np.log2(pages), np.log2(PAGES), by_pages))
