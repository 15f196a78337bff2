"""Medians of recent measurements, which a single outlier does not change."""

from __future__ import annotations

from collections import deque

ASSUMED_BYTES_PER_SECOND = 12e9
"""The copy speed assumed until it is measured: PCIe Gen4 x8's, so that no copy is too long."""

MIN_MEASUREMENTS = 3
"""A median of fewer measurements is not evidence."""

CLEARLY = 2.0
"""A speed that is this many times the median is not a chance result."""


class RecentMedian:
    """The lower median of the last `size` values."""

    def __init__(self, size: int = 15) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._median: float | None = None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append(value)
        self._median = None

    @property
    def value(self) -> float:
        """The median; there must be at least one value."""
        if self._median is None:
            self._median = sorted(self._values)[(len(self._values) - 1) // 2]
        return self._median

    @property
    def has_risen(self) -> bool:
        """True if the last value is so far above the median that the median may be outdated."""
        return bool(self._values) and self._values[-1] >= CLEARLY * self.value
