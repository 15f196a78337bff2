from __future__ import annotations

import itertools

import numpy as np
import pytest
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND
from kv_offload.worker.rates import MEASURED_BYTES, CopySpeeds, StoreRate

# -- the rate of stores ------------------------------------------------------------------------

SLOW, FAST = 84e6, 50e9


def stored(*speeds: float, exact: bool = True, rate: StoreRate | None = None) -> StoreRate:
    rate = rate or StoreRate()
    for speed in speeds:
        rate.learn(speed, exact=exact)
    return rate


def test_the_speed_of_stores_is_assumed_until_there_is_evidence() -> None:
    assert stored(SLOW, SLOW).bytes_per_second == ASSUMED_BYTES_PER_SECOND
    assert stored(SLOW, SLOW, SLOW).bytes_per_second == SLOW


def test_one_slow_store_changes_nothing() -> None:
    assert stored(SLOW, FAST, FAST).bytes_per_second == FAST
    assert stored(FAST, FAST, FAST, SLOW, FAST).bytes_per_second == FAST


def test_a_small_store_says_how_fast_the_link_is_at_least() -> None:
    rate = stored(*[2e9] * 3)
    stored(*[1e9] * 20, exact=False, rate=rate)
    assert rate.bytes_per_second == 2e9, "its start took its time"
    stored(*[3e9] * 4, exact=False, rate=rate)
    assert rate.bytes_per_second == 3e9
    assert stored(*[1e9] * 20, exact=False).bytes_per_second == ASSUMED_BYTES_PER_SECOND


def test_small_stores_correct_a_rate_that_was_slow_for_long() -> None:
    rate = stored(*[SLOW] * 1000)
    stored(*[2e9] * 4, exact=False, rate=rate)
    assert rate.bytes_per_second == 2e9


def test_a_speed_of_stores_is_told_when_it_changes() -> None:
    rate = stored(FAST, FAST)
    assert rate.take_change() is None
    stored(FAST, rate=rate)
    assert rate.take_change() == FAST
    assert rate.take_change() is None
    stored(FAST, FAST, rate=rate)
    assert rate.take_change() is None


# -- which jobs are measured -------------------------------------------------------------------

LARGE, SMALL = 2 * MEASURED_BYTES, MEASURED_BYTES // 2
LOAD, STORE = Direction.LOAD, Direction.STORE
_job_ids = itertools.count()


@pytest.fixture
def speeds() -> CopySpeeds:
    return CopySpeeds()


def start(speeds: CopySpeeds, direction: Direction) -> int:
    job_id = next(_job_ids)
    speeds.starts(SwapJob(job_id, direction, np.zeros((1, 2), np.int32)))
    return job_id


def copy(
    speeds: CopySpeeds,
    direction: Direction,
    nbytes: int,
    seconds: float = 1.0,
    beside: Direction | None = None,
    error: CopyError | None = None,
) -> None:
    """Run a job, with another one that starts and ends while it runs, if `beside` says so."""
    job_id = start(speeds, direction)
    if beside is not None:
        other = start(speeds, beside)
        speeds.ended(Completion(other, beside, 0, 0.0, CopyError("not of interest")))
    speeds.ended(Completion(job_id, direction, nbytes, seconds, error))


def test_a_large_load_that_ran_alone_tells_its_speed_once(speeds: CopySpeeds) -> None:
    copy(speeds, LOAD, LARGE, 0.5)
    assert speeds.take_load_speed() == 2 * LARGE
    assert speeds.take_load_speed() is None


def test_other_loads_tell_no_speed(speeds: CopySpeeds) -> None:
    copy(speeds, LOAD, SMALL)
    copy(speeds, LOAD, LARGE, beside=LOAD)
    copy(speeds, LOAD, LARGE, seconds=0.0)
    copy(speeds, LOAD, LARGE, error=CopyError("injected"))
    assert speeds.take_load_speed() is None
    copy(speeds, LOAD, LARGE, beside=STORE)
    assert speeds.take_load_speed() == LARGE, "stores give way to loads"


def test_a_load_that_starts_beside_another_tells_no_speed(speeds: CopySpeeds) -> None:
    first, second = start(speeds, LOAD), start(speeds, LOAD)
    speeds.ended(Completion(first, LOAD, LARGE, 1.0))
    speeds.ended(Completion(second, LOAD, LARGE, 1.0))
    assert speeds.take_load_speed() is None


def test_stores_that_were_small_or_not_alone_only_raise_the_speed(speeds: CopySpeeds) -> None:
    for _ in range(4):
        copy(speeds, STORE, SMALL)
        copy(speeds, STORE, LARGE, beside=STORE)
        copy(speeds, STORE, LARGE, beside=LOAD)
        copy(speeds, STORE, LARGE, error=CopyError("injected"))
    assert speeds.take_store_speed() is None, "they are slower than what is assumed"
    for _ in range(3):
        copy(speeds, STORE, LARGE)
    assert speeds.take_store_speed() == LARGE
    assert speeds.take_store_speed() is None
    for _ in range(4):
        copy(speeds, STORE, SMALL, SMALL / (3 * LARGE), beside=LOAD)
    assert speeds.take_store_speed() == pytest.approx(3 * LARGE)
