from __future__ import annotations

from dataclasses import replace

import pytest

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND
from kv_offload.scheduler.loads.costs import (
    ASSUMED_DECODE_SECONDS,
    START_SECONDS,
    TRUSTED_SHARE,
    LoadCosts,
)
from kv_offload.scheduler.loads.decision import (
    BUSY_SECONDS,
    BUSY_SHARE,
    IDLE_SECONDS,
    WAVES_SHARE,
    WHOLE_SECONDS,
    brings_last_slot,
    is_synchronous,
)
from kv_offload.scheduler.timing import LoadQueue, StepWatch

SLOT_BYTES = 1_000_000


def make_costs(watch: StepWatch | None = None, *, overlaps: bool = False) -> LoadCosts:
    watch = StepWatch() if watch is None else watch
    return LoadCosts("measured", SLOT_BYTES, watch, LoadQueue(), overlaps=overlaps)


def fits(
    costs: LoadCosts,
    slots: int,
    tokens: int = 1,
    *,
    idle: bool = False,
    queued_seconds: float = 0.0,
) -> bool:
    """Return whether a load that leaves `tokens` to be computed is synchronous."""
    hit = costs.of(0, 0, tokens, slots, idle=idle)
    return is_synchronous(replace(hit, queued=queued_seconds))


def whole(costs: LoadCosts, slots: int, *, idle: bool) -> bool:
    """Return whether a load brings all tokens of a request."""
    return brings_last_slot(costs.of(0, 0, 0, slots, idle=idle))


def slots_in(seconds: float, bytes_per_second: float = ASSUMED_BYTES_PER_SECOND) -> int:
    return int(seconds * bytes_per_second / SLOT_BYTES)


@pytest.mark.parametrize(("idle", "seconds"), [(True, IDLE_SECONDS), (False, BUSY_SECONDS)])
@pytest.mark.parametrize("speed", [ASSUMED_BYTES_PER_SECOND, 50e9])
def test_a_load_is_synchronous_up_to_its_limit(idle: bool, seconds: float, speed: float) -> None:
    """At the speed that was measured, or is assumed until then."""
    watch = StepWatch()
    if speed != ASSUMED_BYTES_PER_SECOND:
        watch.load_rate.learn(speed)
    costs, slots = make_costs(watch), slots_in(seconds, speed)
    assert fits(costs, slots, idle=idle)
    assert not fits(costs, slots + 1, idle=idle, queued_seconds=BUSY_SECONDS)


def test_the_loads_of_a_step_share_the_limit() -> None:
    costs = make_costs()
    half = slots_in(BUSY_SECONDS) // 2
    costs.count(half, 1)
    assert fits(costs, half)
    costs.count(half, 1)
    assert not fits(costs, half, queued_seconds=BUSY_SECONDS)
    costs.next_step()
    assert fits(costs, half)


def test_a_lone_request_gets_its_last_slot_if_load_and_decode_are_short_together() -> None:
    watch = StepWatch()
    costs, decode_seconds = make_costs(watch), watch.decode_seconds
    slots = slots_in(WHOLE_SECONDS - ASSUMED_DECODE_SECONDS)
    assert whole(costs, slots - 1, idle=True)
    assert not whole(costs, slots + 2, idle=True)
    decode_seconds.add(0.002)
    assert whole(costs, slots_in(WHOLE_SECONDS - 0.0021), idle=True)
    assert not whole(costs, slots_in(WHOLE_SECONDS - 0.0019), idle=True)
    decode_seconds.add(WHOLE_SECONDS)
    decode_seconds.add(WHOLE_SECONDS)
    assert not whole(costs, 1, idle=True)
    assert whole(costs, slots_in(1.0), idle=False), "beside others every load does"


class Computing(StepWatch):
    """Steps under way that will yet compute for a given time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.left = seconds

    def seconds_left(self) -> float:
        return self.left


def test_a_load_that_overlaps_may_take_until_the_steps_under_way_have_ended() -> None:
    hidden = TRUSTED_SHARE * 0.1 - START_SECONDS
    slots = slots_in(hidden + BUSY_SECONDS)
    assert not fits(make_costs(Computing(0.1)), slots)
    costs = make_costs(Computing(0.1), overlaps=True)
    assert fits(costs, slots)
    assert not fits(costs, slots + 1)
    assert not fits(costs, slots, queued_seconds=BUSY_SECONDS), "loads before it take the link"


def test_a_step_that_has_all_but_ended_hides_nothing() -> None:
    costs = make_costs(Computing(START_SECONDS / 2), overlaps=True)
    assert fits(costs, slots_in(BUSY_SECONDS))
    assert not fits(costs, slots_in(BUSY_SECONDS) + 1)


FORWARD = 0.02
"""Seconds in which `Prompts` computes `TOKENS`."""
TOKENS = 1000


class Prompts(StepWatch):
    """No step is under way; one computes prompts at a steady speed."""

    def prompt_seconds(self, tokens: int) -> float:
        return FORWARD * tokens / TOKENS


LONGEST = (FORWARD * BUSY_SHARE + BUSY_SECONDS) / (1 - WAVES_SHARE)
"""A load that is hidden by `FORWARD` up to what may delay others."""


def test_a_forward_over_prompts_hides_most_of_a_load() -> None:
    assert LONGEST < FORWARD
    costs, slots = make_costs(Prompts()), slots_in(LONGEST)
    assert fits(costs, slots, TOKENS)
    assert not fits(costs, slots + 1, TOKENS)
    assert not fits(costs, slots, TOKENS // 2)
    assert not fits(costs, slots, TOKENS, queued_seconds=BUSY_SECONDS)


def test_the_prompts_of_a_step_hide_its_loads_together() -> None:
    costs, slots = make_costs(Prompts()), slots_in(LONGEST) // 2
    costs.count(slots, TOKENS // 2)
    arrived = {"queued_seconds": slots * SLOT_BYTES / ASSUMED_BYTES_PER_SECOND}
    assert fits(costs, slots - 1, TOKENS // 2, **arrived)
    costs.count(0, TOKENS)
    assert fits(costs, 2 * slots, TOKENS // 2, **arrived), "prompts without a load count as well"
    costs.next_step()
    assert not fits(costs, 2 * slots, TOKENS // 2, **arrived)


def test_nothing_hides_loads_that_cannot_arrive_in_waves() -> None:
    """The forward writes to what a load of all tokens brings, so all loads come before it."""
    costs, slots = make_costs(Prompts()), slots_in(LONGEST)
    assert not fits(costs, slots, 0)
    costs.count(1, 0)
    assert not fits(costs, slots, TOKENS)
    costs.next_step()
    assert fits(costs, slots, TOKENS)
