from __future__ import annotations

from kv_offload.measurement import RecentMedian


def test_a_last_value_that_is_clearly_above_the_median():
    median = RecentMedian(size=4)
    assert not median.has_risen
    seen = []
    for value in (5.0, 9.0, 12.0, 18.0, 18.0, 18.0):
        median.add(value)
        seen.append(median.has_risen)
    assert seen == [False, False, False, True, False, False]


def test_the_lower_median_of_the_last_values():
    median = RecentMedian(size=4)
    assert not median
    seen = []
    for value in (5.0, 1.0, 9.0, 7.0, 8.0, 8.0):
        median.add(value)
        seen.append(median.value)
    assert seen == [5.0, 1.0, 5.0, 5.0, 7.0, 8.0]
    assert len(median) == 4
