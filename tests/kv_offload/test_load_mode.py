from __future__ import annotations

import pytest

from kv_offload.load_mode import BUSY_SECONDS, IDLE_SECONDS, LoadMode
from kv_offload.rates import ASSUMED_BYTES_PER_SECOND, LoadRate

SLOT_BYTES = 1_000_000


def slots_in(seconds: float, bytes_per_second: float = ASSUMED_BYTES_PER_SECOND) -> int:
    return int(seconds * bytes_per_second / SLOT_BYTES)


@pytest.mark.parametrize(("idle", "seconds"), [(True, IDLE_SECONDS), (False, BUSY_SECONDS)])
def test_a_load_is_synchronous_up_to_its_limit(idle: bool, seconds: float) -> None:
    mode = LoadMode(SLOT_BYTES, LoadRate())
    assert mode.is_synchronous(slots_in(seconds), idle=idle)
    assert not mode.is_synchronous(slots_in(seconds) + 1, idle=idle)


def test_the_loads_of_a_step_share_the_limit() -> None:
    mode = LoadMode(SLOT_BYTES, LoadRate())
    half = slots_in(BUSY_SECONDS) // 2
    mode.plan(half)
    assert mode.is_synchronous(half, idle=False)
    mode.plan(half)
    assert not mode.is_synchronous(half, idle=False)
    mode.begin_step()
    assert mode.is_synchronous(half, idle=False)


def test_the_measured_speed_replaces_the_assumed_one() -> None:
    rate = LoadRate()
    mode = LoadMode(SLOT_BYTES, rate)
    slots = slots_in(BUSY_SECONDS, 50e9)
    assert not mode.is_synchronous(slots, idle=False)
    rate.learn(50e9)
    assert mode.is_synchronous(slots, idle=False)
    assert not mode.is_synchronous(slots + 1, idle=False)


def test_none_is_synchronous_where_that_is_not_possible() -> None:
    mode = LoadMode(SLOT_BYTES, LoadRate())
    mode.allowed = False
    assert not mode.is_synchronous(1, idle=True)
