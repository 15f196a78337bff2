from __future__ import annotations

from kv_offload.medians import RecentMedian


def test_the_lower_median_of_the_last_values() -> None:
    median = RecentMedian(size=4)
    assert not median
    seen = []
    for value in (5.0, 1.0, 9.0, 7.0, 8.0, 8.0):
        median.add(value)
        seen.append(median.value)
    assert seen == [5.0, 1.0, 5.0, 5.0, 7.0, 8.0]
    assert len(median) == 4
