from __future__ import annotations

import pytest

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND
from kv_offload.scheduler.loads.mode import (
    ASSUMED_DECODE_SECONDS,
    BUSY_SECONDS,
    BUSY_SHARE,
    IDLE_SECONDS,
    START_SECONDS,
    TRUSTED_SHARE,
    WAVES_SHARE,
    WHOLE_SECONDS,
    LoadMode,
)
from kv_offload.scheduler.timing import StepWatch

SLOT_BYTES = 1_000_000


def make_mode(watch: StepWatch | None = None, *, overlaps: bool = False) -> LoadMode:
    return LoadMode(SLOT_BYTES, StepWatch() if watch is None else watch, overlaps=overlaps)


def fits(
    mode: LoadMode, slots: int, tokens: int = 1, *, idle: bool = False, queued_seconds: float = 0.0
) -> bool:
    return mode.is_synchronous(slots, tokens, idle=idle, queued_seconds=queued_seconds)


def slots_in(seconds: float, bytes_per_second: float = ASSUMED_BYTES_PER_SECOND) -> int:
    return int(seconds * bytes_per_second / SLOT_BYTES)


@pytest.mark.parametrize(("idle", "seconds"), [(True, IDLE_SECONDS), (False, BUSY_SECONDS)])
@pytest.mark.parametrize("speed", [ASSUMED_BYTES_PER_SECOND, 50e9])
def test_a_load_is_synchronous_up_to_its_limit(idle: bool, seconds: float, speed: float) -> None:
    """At the speed that was measured, or is assumed until then."""
    watch = StepWatch()
    if speed != ASSUMED_BYTES_PER_SECOND:
        watch.load_rate.learn(speed)
    mode, slots = make_mode(watch), slots_in(seconds, speed)
    assert fits(mode, slots, idle=idle)
    assert not fits(mode, slots + 1, idle=idle, queued_seconds=BUSY_SECONDS)


def test_the_loads_of_a_step_share_the_limit() -> None:
    mode = make_mode()
    half = slots_in(BUSY_SECONDS) // 2
    mode.count(half, 1)
    assert fits(mode, half)
    mode.count(half, 1)
    assert not fits(mode, half, queued_seconds=BUSY_SECONDS)
    mode.next_step()
    assert fits(mode, half)


def test_a_lone_request_gets_its_last_slot_if_load_and_decode_are_short_together() -> None:
    watch = StepWatch()
    mode, decode_seconds = make_mode(watch), watch.decode_seconds
    slots = slots_in(WHOLE_SECONDS - ASSUMED_DECODE_SECONDS)
    assert mode.brings_last_slot(slots - 1, idle=True)
    assert not mode.brings_last_slot(slots + 2, idle=True)
    decode_seconds.add(0.002)
    assert mode.brings_last_slot(slots_in(WHOLE_SECONDS - 0.0021), idle=True)
    assert not mode.brings_last_slot(slots_in(WHOLE_SECONDS - 0.0019), idle=True)
    decode_seconds.add(0.01)
    decode_seconds.add(0.01)
    assert not mode.brings_last_slot(1, idle=True)
    assert mode.brings_last_slot(slots_in(1.0), idle=False), "beside others every load does"


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
    assert not fits(make_mode(Computing(0.1)), slots)
    mode = make_mode(Computing(0.1), overlaps=True)
    assert fits(mode, slots)
    assert not fits(mode, slots + 1)
    assert not fits(mode, slots, queued_seconds=BUSY_SECONDS), "loads before it take the link"


def test_a_step_that_has_all_but_ended_hides_nothing() -> None:
    mode = make_mode(Computing(START_SECONDS / 2), overlaps=True)
    assert fits(mode, slots_in(BUSY_SECONDS))
    assert not fits(mode, slots_in(BUSY_SECONDS) + 1)


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
    mode, slots = make_mode(Prompts()), slots_in(LONGEST)
    assert fits(mode, slots, TOKENS)
    assert not fits(mode, slots + 1, TOKENS)
    assert not fits(mode, slots, TOKENS // 2)
    assert not fits(mode, slots, TOKENS, queued_seconds=BUSY_SECONDS)


def test_a_forward_hides_no_more_than_its_share() -> None:
    mode, forward = make_mode(Prompts()), FORWARD / 10
    slots = slots_in(forward * (WAVES_SHARE + BUSY_SHARE) + BUSY_SECONDS)
    assert slots > slots_in(forward), "the load takes longer than the forward"
    assert fits(mode, slots, TOKENS // 10)
    assert not fits(mode, slots + 1, TOKENS // 10)


def test_the_prompts_of_a_step_hide_its_loads_together() -> None:
    mode, slots = make_mode(Prompts()), slots_in(LONGEST) // 2
    mode.count(slots, TOKENS // 2)
    arrived = {"queued_seconds": slots * SLOT_BYTES / ASSUMED_BYTES_PER_SECOND}
    assert fits(mode, slots - 1, TOKENS // 2, **arrived)
    mode.count(0, TOKENS)
    assert fits(mode, 2 * slots, TOKENS // 2, **arrived), "prompts without a load count as well"
    mode.next_step()
    assert not fits(mode, 2 * slots, TOKENS // 2, **arrived)


def test_nothing_hides_loads_that_cannot_arrive_in_waves() -> None:
    """The forward writes to what a load of all tokens brings, so all loads come before it."""
    mode, slots = make_mode(Prompts()), slots_in(LONGEST)
    assert not fits(mode, slots, 0)
    mode.count(1, 0)
    assert not fits(mode, slots, TOKENS)
    mode.next_step()
    assert fits(mode, slots, TOKENS)
