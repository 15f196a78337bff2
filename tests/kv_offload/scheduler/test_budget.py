from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS
from kv_offload.scheduler.stores.budget import (
    HORIZON_STEPS,
    MIN_HORIZON_SECONDS,
    SHARE_BESIDE_LOADS,
    StoreBudget,
)
from kv_offload.scheduler.timing import MAX_STEP_SECONDS, StepTime, StepWatch

SLOT_BYTES = 1 << 20
SPEED = 1000 * SLOT_BYTES
"""A thousand slots a second."""


class Steps:
    """A budget whose steps take as long as the test says."""

    def __init__(self, speed: float | None = SPEED) -> None:
        self.now = 0.0
        self.requests = SimpleNamespace(admitted=1)
        self.time = StepTime(lambda: self.now)
        self.watch = StepWatch()
        core: Any = SimpleNamespace(
            config=SimpleNamespace(max_pinned_share=0.7),
            engine=SimpleNamespace(pool=SimpleNamespace(blocks=range(101))),
            slots=SimpleNamespace(block_bytes=SLOT_BYTES),
            requests=self.requests,
            transfers=SimpleNamespace(step_time=self.time),
            watch=self.watch,
        )
        self.budget = StoreBudget(core)
        if speed is not None:
            self.learn(speed)

    def learn(self, speed: float) -> None:
        for _ in range(15):
            self.watch.store_rate.learn(speed)

    def step(
        self, seconds: float = 0.0, *, load_seconds: float = 0.0, grown_blocks: int = 0
    ) -> StoreBudget:
        self.now += seconds
        self.time.next_step()
        self.budget.next_step(load_seconds=load_seconds, grown_blocks=grown_blocks)
        return self.budget

    def settle(self, seconds: float) -> None:
        for _ in range(100):
            self.step(seconds)


def test_what_is_in_flight_ends_within_the_horizon():
    steps = Steps()
    slots = int(1000 * MIN_HORIZON_SECONDS)
    assert steps.step().link_slots(0) == slots
    assert steps.budget.link_slots(slots - 7) == 7
    assert steps.budget.link_slots(slots) == 0
    assert steps.budget.link_slots(slots + 1) == 0
    steps.learn(1.0)
    assert [steps.budget.link_slots(slots) for slots in (0, 1)] == [1, 0], "one alone always may"


def test_no_more_is_pinned_than_may_be_nor_than_the_link_moves():
    steps = Steps()
    budget = steps.step()
    assert [budget.slots_left(pinned) for pinned in (0, 69, 70, 71)] == [70, 1, 0, -1]
    steps.learn(SPEED / 2)
    assert budget.slots_left(0) == 50


def test_the_speed_is_assumed_until_it_was_measured():
    steps = Steps(speed=None)
    assumed = steps.budget.link_slots(0)
    assert assumed == int(ASSUMED_BYTES_PER_SECOND * MIN_HORIZON_SECONDS / SLOT_BYTES)
    for _ in range(MIN_MEASUREMENTS):
        assert steps.budget.link_slots(0) == assumed, "one slow store holds back no others"
        steps.watch.store_rate.learn(ASSUMED_BYTES_PER_SECOND / 2)
    assert steps.budget.link_slots(0) == pytest.approx(assumed / 2, abs=1)


def test_the_horizon_grows_with_long_steps_but_not_with_pauses():
    steps = Steps()
    steps.settle(0.2)
    slots = int(1000 * 0.2 * HORIZON_STEPS)
    assert steps.budget.link_slots(0) == pytest.approx(slots, abs=1)
    steps.step(3600.0)
    longest = HORIZON_STEPS * (0.2 + (MAX_STEP_SECONDS - 0.2) / 8)
    assert steps.budget.link_slots(0) == pytest.approx(1000 * longest, abs=2)


SHARE = int(1000 * 0.08 * SHARE_BESIDE_LOADS)


@pytest.mark.parametrize(("load_seconds", "slots"), [(0.03, 50), (0.079, SHARE), (1.0, SHARE)])
def test_stores_get_what_loads_leave_of_a_step_and_a_share_at_least(load_seconds, slots):
    steps = Steps()
    steps.settle(0.08)
    assert steps.budget.link_slots(0) == pytest.approx(240, abs=1)
    for in_flight in (0, slots):
        budget = steps.step(0.08, load_seconds=load_seconds)
        assert budget.link_slots(in_flight) == pytest.approx(slots, abs=1)
        budget.count_planned(slots - 2)
        assert budget.link_slots(slots - 2) == pytest.approx(2, abs=1)
    budget = Steps().step(load_seconds=load_seconds)  # no step has taken any time yet
    assert [budget.link_slots(slots) for slots in (0, 1)] == [1, 0]


def test_blocks_are_reserved_for_the_growth_of_running_requests():
    steps = Steps()
    assert steps.budget.reserved_blocks == 0
    for grown_blocks in (5, 0, 0, 0, 7, 0, 0, 1):
        steps.step(grown_blocks=grown_blocks)
    assert steps.budget.reserved_blocks == 12, "one pin may have seen the 5 and the 7"
    steps.budget.prompt_growth = 30
    assert steps.budget.reserved_blocks == 42
    steps.requests.admitted = 0
    assert steps.budget.reserved_blocks == 0
    steps.requests.admitted = 1
    steps.budget.prompt_growth = 0
    for _ in range(1000):
        steps.step()
    assert steps.budget.reserved_blocks == 0, "that was long ago"
