"""Statistics of the serving bench."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

# Two-sided 95 % quantiles of Student's t distribution for 1 to 30 degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99, the maximum, and how many values there were."""
    p50, p90, p99 = (float(np.percentile(values, share)) for share in (50, 90, 99))
    return {"p50": p50, "p90": p90, "p99": p99, "max": max(values), "count": len(values)}


def ratio_interval(ratios: Sequence[float]) -> dict[str, float]:
    """Return the geometric mean of paired ratios with its 95 % interval, by Student's t of logs.

    Raises `ValueError` for fewer than 2 ratios.
    """
    if len(ratios) < 2:
        raise ValueError(f"{len(ratios)} pairs have no interval: measure 2 or more")
    logs = [math.log(ratio) for ratio in ratios]
    degrees = min(len(logs) - 1, len(_T95))
    half = _T95[degrees - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return {
        "ratio": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "pairs": len(logs),
    }
