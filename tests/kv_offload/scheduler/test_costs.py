"""What a hit costs, by what was measured and what the step has already."""

from __future__ import annotations

import pytest

from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND
from kv_offload.scheduler.loads.costs import (
    ASSUMED_DECODE_SECONDS,
    START_SECONDS,
    TRUSTED_SHARE,
    LoadCosts,
)
from kv_offload.scheduler.timing import LoadQueue, StepWatch

SLOT_BYTES = 1_000_000
SLOT_SECONDS = SLOT_BYTES / ASSUMED_BYTES_PER_SECOND


class Watch(StepWatch):
    """Prompts take 0.02 s a thousand tokens; steps under way compute for a given time yet."""

    left = 0.0

    def prompt_seconds(self, tokens: int) -> float:
        return 0.02 * tokens / 1000

    def seconds_left(self) -> float:
        return self.left


def make_costs(watch: Watch, *, overlaps: bool = False) -> LoadCosts:
    return LoadCosts("measured", SLOT_BYTES, watch, LoadQueue(), overlaps=overlaps)


def test_a_load_takes_its_slots_at_the_speed_that_is_assumed_and_then_measured():
    watch = Watch()
    costs = make_costs(watch)
    assert costs.of(0, 8, 9, 5, idle=True).load == pytest.approx(5 * SLOT_SECONDS)
    watch.load_rate.learn(50e9)
    assert costs.of(0, 8, 9, 5, idle=True).load == pytest.approx(5 * SLOT_BYTES / 50e9)
    assert [costs.of(0, 8, 9, 5, idle=idle).idle for idle in (False, True)] == [False, True]


def test_the_loads_and_prompts_of_a_step_add_up_and_end_with_it():
    costs = make_costs(Watch())
    for _ in range(2):
        hit = costs.of(0, 500, 1000, 5, idle=False)
        assert (hit.beside, hit.forward) == (0, pytest.approx(0.01))
        costs.count(7, 1000)
        costs.count(0, 500)
        hit = costs.of(0, 500, 1000, 5, idle=False)
        assert (hit.beside, hit.forward) == (pytest.approx(7 * SLOT_SECONDS), pytest.approx(0.04))
        assert costs.of(0, 1000, 1000, 5, idle=False).forward == 0, "it leaves no token"
        costs.count(1, 0)
        assert costs.of(0, 500, 1000, 5, idle=False).forward == 0, "nor does one of this step"
        costs.next_step()


def test_a_decode_takes_as_long_as_was_measured():
    watch = Watch()
    costs = make_costs(watch)
    assert costs.of(0, 8, 8, 5, idle=True).decode == ASSUMED_DECODE_SECONDS
    watch.decode_seconds.add(0.002)
    assert costs.of(0, 8, 8, 5, idle=True).decode == 0.002


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_load_that_overlaps_is_hidden_by_the_steps_under_way(overlaps):
    watch = Watch()
    costs = make_costs(watch, overlaps=overlaps)
    for left, hidden in ((0.1, TRUSTED_SHARE * 0.1 - START_SECONDS), (START_SECONDS / 2, 0.0)):
        watch.left = left
        assert costs.of(0, 8, 9, 5, idle=True).hidden == pytest.approx(hidden * overlaps)
