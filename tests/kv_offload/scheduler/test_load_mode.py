from __future__ import annotations

import pytest

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND, RecentMedian
from kv_offload.scheduler.loads import (
    ASSUMED_DECODE_SECONDS,
    BUSY_SECONDS,
    IDLE_SECONDS,
    WHOLE_SECONDS,
    LoadMode,
)
from kv_offload.scheduler.rates import LoadRate

SLOT_BYTES = 1_000_000


def make_mode(rate: LoadRate | None = None, decodes: RecentMedian | None = None) -> LoadMode:
    return LoadMode(
        SLOT_BYTES,
        LoadRate() if rate is None else rate,
        RecentMedian() if decodes is None else decodes,
    )


def slots_in(seconds: float, bytes_per_second: float = ASSUMED_BYTES_PER_SECOND) -> int:
    return int(seconds * bytes_per_second / SLOT_BYTES)


@pytest.mark.parametrize(("idle", "seconds"), [(True, IDLE_SECONDS), (False, BUSY_SECONDS)])
def test_a_load_is_synchronous_up_to_its_limit(idle: bool, seconds: float) -> None:
    mode = make_mode()
    assert mode.is_synchronous(slots_in(seconds), idle=idle)
    assert not mode.is_synchronous(slots_in(seconds) + 1, idle=idle)


def test_the_loads_of_a_step_share_the_limit() -> None:
    mode = make_mode()
    half = slots_in(BUSY_SECONDS) // 2
    mode.count(half)
    assert mode.is_synchronous(half, idle=False)
    mode.count(half)
    assert not mode.is_synchronous(half, idle=False)
    mode.next_step()
    assert mode.is_synchronous(half, idle=False)


def test_the_measured_speed_replaces_the_assumed_one() -> None:
    rate = LoadRate()
    mode = make_mode(rate)
    slots = slots_in(BUSY_SECONDS, 50e9)
    assert not mode.is_synchronous(slots, idle=False)
    rate.learn(50e9)
    assert mode.is_synchronous(slots, idle=False)
    assert not mode.is_synchronous(slots + 1, idle=False)


def test_none_is_synchronous_where_that_is_not_possible() -> None:
    mode = make_mode()
    mode.allowed = False
    assert not mode.is_synchronous(1, idle=True)


def test_a_lone_request_gets_its_last_slot_if_load_and_decode_are_short_together() -> None:
    decode_seconds = RecentMedian()
    mode = make_mode(decodes=decode_seconds)
    slots = slots_in(WHOLE_SECONDS - ASSUMED_DECODE_SECONDS)
    assert mode.brings_last_slot(slots - 1, idle=True)
    assert not mode.brings_last_slot(slots + 2, idle=True)
    decode_seconds.add(0.002)
    assert mode.brings_last_slot(slots_in(WHOLE_SECONDS - 0.0021), idle=True)
    assert not mode.brings_last_slot(slots_in(WHOLE_SECONDS - 0.0019), idle=True)
    decode_seconds.add(0.01)
    decode_seconds.add(0.01)
    assert not mode.brings_last_slot(1, idle=True)


def test_beside_others_every_load_brings_the_last_slot() -> None:
    assert make_mode().brings_last_slot(slots_in(1.0), idle=False)
