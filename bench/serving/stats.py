"""Statistics of the serving benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, p50, p90, p99, the maximum, and the number of values."""
    found = {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}
    mean = statistics.mean(values)
    return {"mean": mean, **found, "max": max(values), "count": len(values)}
