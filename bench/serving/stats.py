"""Statistics of the serving benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99, the maximum, and the number of values."""
    p50, p90, p99 = (float(np.percentile(values, share)) for share in (50, 90, 99))
    return {"p50": p50, "p90": p90, "p99": p99, "max": max(values), "count": len(values)}
