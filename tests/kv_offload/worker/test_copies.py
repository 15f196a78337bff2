"""How jobs are counted, and what they tell of the speed of the link."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError

from kv_offload.worker.copies import MEASURED_BYTES, CopySpeeds

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
    during: Direction | None = None,
    error: CopyError | None = None,
) -> None:
    """Run a job, with another one that starts and ends while it runs, if `during` says so."""
    job_id = start(speeds, direction)
    if during is not None:
        other = start(speeds, during)
        speeds.ended(Completion(other, during, 0, 0.0, CopyError("not of interest")))
    speeds.ended(Completion(job_id, direction, nbytes, seconds, error))


def test_a_large_load_that_ran_alone_tells_its_speed_once(speeds: CopySpeeds) -> None:
    copy(speeds, LOAD, LARGE, 0.5)
    assert speeds.take_load_speed() == 2 * LARGE
    assert speeds.take_load_speed() is None


def test_other_loads_tell_no_speed(speeds: CopySpeeds) -> None:
    copy(speeds, LOAD, SMALL)
    copy(speeds, LOAD, LARGE, during=LOAD)
    copy(speeds, LOAD, LARGE, seconds=0.0)
    copy(speeds, LOAD, LARGE, error=CopyError("injected"))
    assert speeds.take_load_speed() is None
    copy(speeds, LOAD, LARGE, during=STORE)
    assert speeds.take_load_speed() == LARGE, "stores give way to loads"


def test_a_load_that_starts_during_another_tells_no_speed(speeds: CopySpeeds) -> None:
    first, second = start(speeds, LOAD), start(speeds, LOAD)
    speeds.ended(Completion(first, LOAD, LARGE, 1.0))
    speeds.ended(Completion(second, LOAD, LARGE, 1.0))
    assert speeds.take_load_speed() is None


def test_stores_that_were_small_or_not_alone_only_raise_the_speed(speeds: CopySpeeds) -> None:
    for _ in range(4):
        copy(speeds, STORE, SMALL)
        copy(speeds, STORE, LARGE, during=STORE)
        copy(speeds, STORE, LARGE, during=LOAD)
        copy(speeds, STORE, LARGE, error=CopyError("injected"))
    assert speeds.take_store_speed() is None, "they are slower than what is assumed"
    for _ in range(3):
        copy(speeds, STORE, LARGE)
    assert speeds.take_store_speed() == LARGE
    assert speeds.take_store_speed() is None
    for _ in range(4):
        copy(speeds, STORE, SMALL, SMALL / (3 * LARGE), during=LOAD)
    assert speeds.take_store_speed() == pytest.approx(3 * LARGE)


# -- the speed of stores -----------------------------------------------------------------------

SLOW, FAST = 84e6, 50e9


def stored(*speeds: float, nbytes: int = LARGE, after: CopySpeeds | None = None) -> float | None:
    """Run stores at these speeds, each alone; return the speed that the last one changed, if so."""
    measured = after or CopySpeeds()
    told = None
    for speed in speeds:
        copy(measured, STORE, nbytes, nbytes / speed)
        told = measured.take_store_speed()
    return told


def test_the_speed_of_stores_is_assumed_until_there_is_evidence() -> None:
    assert stored(SLOW) is None
    assert stored(SLOW, SLOW) is None
    assert stored(SLOW, SLOW, SLOW) == pytest.approx(SLOW)


def test_one_slow_store_changes_nothing(speeds: CopySpeeds) -> None:
    assert stored(SLOW, FAST, FAST) == pytest.approx(FAST)
    assert stored(FAST, FAST, FAST, after=speeds) == pytest.approx(FAST)
    assert stored(SLOW, after=speeds) is None


def test_a_small_store_says_how_fast_the_link_is_at_least(speeds: CopySpeeds) -> None:
    assert stored(*[2e9] * 3, after=speeds) == pytest.approx(2e9)
    assert stored(*[1e9] * 20, nbytes=SMALL, after=speeds) is None, "its start took its time"
    assert stored(*[3e9] * 4, nbytes=SMALL, after=speeds) == pytest.approx(3e9)


def test_small_stores_correct_a_speed_that_was_slow_for_long(speeds: CopySpeeds) -> None:
    stored(*[SLOW] * 1000, after=speeds)
    assert stored(*[2e9] * 4, nbytes=SMALL, after=speeds) == pytest.approx(2e9)
