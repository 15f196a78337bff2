"""What jobs tell of the speed of the link."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from kv_swap.engine import Direction

from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND
from kv_offload.messages import Outcome
from kv_offload.scheduler.timing import CopyRate
from tests.support.manual_copies import ManualSwapEngine, manual_copies
from tests.support.rank import BLOCK_BYTES, Rank, load, store

LARGE, SMALL = 4, 1
LOAD, STORE = Direction.LOAD, Direction.STORE
SLOW, FAST = 84e6, 50e9


class Link:
    """A rank whose copies end when a test says so, and are as fast as it says."""

    def __init__(self) -> None:
        with manual_copies() as made:
            self.rank = Rank().start()
        self.copies: ManualSwapEngine = made[0]
        self.rank.report()
        self.store_rate = CopyRate()

    def start(self, direction: Direction, blocks: int) -> None:
        job_id, pairs = self.rank.next_job_id, [(index, index) for index in range(blocks)]
        if direction is STORE:
            self.rank.end(self.rank.begin(store(job_id, *pairs)))
            self.rank.half.submit_stores()
        else:
            self.rank.end(self.rank.begin(loads=[load(job_id, "a", *pairs)]))

    def end(self, speed: float, *, last: bool = False, fail: bool = False) -> None:
        self.copies.bytes_per_second = speed
        self.copies.run(-1 if last else 0, fail=fail)
        self.rank.half.poll()

    def copy(
        self,
        direction: Direction,
        blocks: int,
        speed: float,
        during: Direction | None = None,
        fail: bool = False,
    ) -> None:
        """Run a job, with another one that starts and ends while it runs, if `during` says so."""
        self.start(direction, blocks)
        if during is not None:
            self.start(during, SMALL)
            self.end(speed, last=True, fail=True)
        self.end(speed, fail=fail)

    def told(self) -> dict[str, float] | None:
        return self.rank.report().bytes_per_second

    def report_stores(self) -> float | None:
        """Report to the scheduler's half; return how fast it then takes stores to be."""
        if told := self.told():
            self.store_rate.add_reports({0: told["store"]})
        return self.store_rate.measured_bytes_per_second

    def stored(self, *speeds: float, blocks: int = LARGE) -> float | None:
        """Run and report stores at these speeds, each alone; return the resulting estimate."""
        for speed in speeds:
            self.copy(STORE, blocks, speed)
            self.report_stores()
        return self.store_rate.measured_bytes_per_second


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr("kv_offload.worker.jobs.MEASURED_BYTES", 2 * BLOCK_BYTES)
    made = Link()
    yield made
    made.rank.half.shutdown()


def test_a_large_load_that_ran_alone_tells_its_speed_once(link):
    link.copy(LOAD, LARGE, 2e9)
    assert link.told() == {"load": pytest.approx(2e9)}
    assert link.told() is None
    link.copy(LOAD, LARGE, 3e9, during=STORE)
    assert link.told() == {"load": pytest.approx(3e9)}, "stores give way to loads"


def test_a_copy_that_took_no_measurable_time_has_ended_well(link):
    link.copy(LOAD, LARGE, math.inf)
    assert link.rank.jobs() == {0: Outcome.OK}


def test_other_loads_tell_no_speed(link):
    link.copy(LOAD, SMALL, FAST)
    link.copy(LOAD, LARGE, FAST, during=LOAD)
    link.copy(LOAD, LARGE, math.inf)  # in no measurable time
    link.copy(LOAD, LARGE, FAST, fail=True)
    for _ in range(2):
        link.start(LOAD, LARGE)
    for _ in range(2):
        link.end(FAST)
    assert link.told() is None


def test_the_speed_of_stores_is_unknown_until_there_is_evidence(link):
    assert link.stored(SLOW, SLOW) is None
    assert link.stored(SLOW) == pytest.approx(SLOW)


def test_one_slow_store_changes_nothing(link):
    assert link.stored(SLOW, FAST, FAST) == pytest.approx(FAST)
    assert link.stored(FAST, FAST, SLOW) == pytest.approx(FAST)


def test_after_one_slow_store_small_ones_are_still_no_evidence(link):
    assert link.stored(*[FAST] * 15, SLOW) == pytest.approx(FAST)
    assert link.stored(*[2e9] * 15, blocks=SMALL) == pytest.approx(FAST)


def test_stores_that_were_small_or_not_alone_only_raise_the_speed(link):
    def others(speed: float) -> float | None:
        for _ in range(4):
            for blocks, during in ((SMALL, None), (LARGE, STORE), (LARGE, LOAD)):
                link.copy(STORE, blocks, speed, during=during)
                link.report_stores()
            link.copy(STORE, LARGE, SLOW, fail=True)
            link.report_stores()
        return link.store_rate.measured_bytes_per_second

    assert others(ASSUMED_BYTES_PER_SECOND / 2) is None, "they are slower than what is assumed"
    assert link.stored(*[2e9] * 3) == pytest.approx(2e9)
    assert others(1e9) == pytest.approx(2e9)
    assert others(3e9) == pytest.approx(3e9)


def test_small_stores_correct_a_speed_that_was_slow_for_long(link):
    link.stored(*[SLOW] * 100)
    assert link.stored(*[2e9] * 8, blocks=SMALL) == pytest.approx(2e9)
