from __future__ import annotations

from itertools import pairwise

import pytest

from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS
from kv_offload.scheduler.timing import CopyRate, LoadQueue, PrefillRate


def test_the_speed_of_loads_is_assumed_until_one_was_measured():
    rate = CopyRate()
    assert rate.seconds(6_000_000_000) == 6e9 / ASSUMED_BYTES_PER_SECOND
    assert rate.measured_bytes_per_second is None
    rate.learn(2e9)
    assert rate.seconds(6_000_000_000) == 3.0
    assert rate.measured_bytes_per_second is None, "one load is no evidence"
    for speed in (2e9, 1e3, 2e9):
        rate.learn(speed)
    assert rate.measured_bytes_per_second == 2e9, "one load that hung changes nothing"


def test_a_queue_of_loads_runs_down_with_time_and_with_completions():
    queue = LoadQueue()
    assert queue.seconds_ahead(0.1, 100.0) == 0
    queue.add(10, 100.0)
    assert queue.seconds_ahead(0.1, 100.0) == pytest.approx(1.0)
    queue.add(20, 100.4)
    assert queue.seconds_ahead(0.1, 100.4) == pytest.approx(2.6)
    queue.remove(10, 101.0)
    assert queue.seconds_ahead(0.1, 101.0) == pytest.approx(2.0)
    assert queue.seconds_ahead(0.1, 109.0) == 0, "slower than expected, but not less than nothing"
    queue.remove(20, 109.0)
    queue.add(10, 200.0)
    assert queue.seconds_ahead(0.1, 200.0) == pytest.approx(1.0)


def learnt(*steps: tuple[int, float], requests: int = 1) -> PrefillRate:
    rate = PrefillRate()
    for tokens, seconds in steps:
        for _ in range(MIN_MEASUREMENTS):
            rate.learn(tokens, requests, seconds)
    return rate


def test_one_step_is_no_evidence_and_one_that_compiles_changes_nothing():
    rate = PrefillRate()
    rate.learn(8192, 1, 30.0)
    for _ in range(MIN_MEASUREMENTS - 1):
        assert rate.seconds(8192) is None
        assert rate.tokens_per_second is None
        rate.learn(8192, 1, 0.2)
    assert rate.seconds(8192) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("tokens", "requests", "tells"),
    [(16, 1, False), (63, 1, False), (256, 256, False), (1280, 256, False), (8192, 256, True)],
)
def test_steps_that_mostly_decode_say_nothing_about_prompts(tokens, requests, tells):
    rate = learnt((tokens, 0.2), requests=requests)
    assert rate.seconds(8192) == (pytest.approx(0.2) if tells else None)


def test_the_time_is_that_of_the_largest_measured_steps_up_to_that_size():
    rate = learnt((128, 0.008), (8192, 0.2))
    assert rate.seconds(128) == pytest.approx(0.008)
    assert rate.seconds(1024) == pytest.approx(0.064)
    assert rate.seconds(8192) == pytest.approx(0.2)
    assert rate.seconds(32768) == pytest.approx(0.8)
    assert rate.tokens_per_second == pytest.approx(8192 / 0.2)


def test_fewer_tokens_than_any_step_had_take_no_longer_than_a_step():
    assert 0.2 <= (learnt((8192, 0.2)).seconds(100) or 0) <= 2 * 0.2


def test_more_tokens_never_take_less_time_where_larger_steps_are_not_much_faster():
    rate = learnt((100, 0.006), (1000, 0.03), (8000, 0.21))
    times = [rate.seconds(tokens) or 0.0 for tokens in range(64, 40000, 7)]
    drops = [after / before for before, after in pairwise(times)]
    # Where the next size begins its better rate sets in; elsewhere time only grows.
    assert sum(drop < 1 for drop in drops) <= 2
