from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_offload.scheduler.timing import Step, StepClock, StepWatch


def step(tokens: int = 1) -> Step:
    return Step(tokens, 1, loads=False, waits=False)


def seconds(clock: StepClock, now: float) -> float | None:
    timed = clock.end(now)
    return None if timed is None else round(timed[1], 6)


def with_one_left(tokens: int = 1) -> StepClock:
    """Return a clock of two steps, of which the first has ended at 0.010; the second goes on."""
    clock = StepClock()
    clock.begin(step(), 0.0)
    clock.begin(step(tokens), 0.001)
    assert seconds(clock, 0.010) == 0.010
    return clock


def test_steps_that_follow_each_other_are_timed_without_the_gaps():
    """One that computes nothing takes no time; nor does an idle engine make a step long."""
    clock = StepClock()
    assert clock.end(0.5) is None
    for begun, took, tokens in ((1.0, 0.2, 1), (1.5, 0.1, 1), (2.0, 1.0, 0), (900.0, 0.3, 1)):
        clock.begin(step(tokens), begun)
        assert seconds(clock, begun + took) == (took if tokens else None)


def test_with_two_under_way_time_runs_from_end_to_end():
    clock = StepClock()
    clock.begin(step(1), 0.0)
    clock.begin(step(2), 0.001)
    ended = clock.end(0.010)
    assert ended is not None
    assert (ended[0].tokens, ended[1]) == (1, 0.010)
    clock.begin(step(3), 0.0105)
    assert seconds(clock, 0.030) == 0.020
    clock.begin(step(4), 0.0301)
    assert seconds(clock, 0.040) == 0.010
    assert seconds(clock, 0.055) == 0.015
    for begun in (500.0, 500.001):  # it was idle
        clock.begin(step(), begun)
    assert seconds(clock, 500.010) == 0.010


def test_a_step_that_ended_while_nobody_looked_is_not_timed():
    """An engine in the process of its user pauses while that one does something else."""
    clock = with_one_left()
    clock.begin(step(), 3.0)  # the second is long over
    assert seconds(clock, 3.0001) is None
    clock.begin(step(), 3.001)
    assert seconds(clock, 3.0101) == 0.0101


def test_a_short_break_does_not_matter_where_the_step_is_waited_for_after_it():
    clock = with_one_left()
    clock.begin(step(), 0.012)
    assert seconds(clock, 0.020) == 0.010


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_step_left_from_before_a_pause_shortens_no_step(tokens):
    """Its end is taken in after the next step was launched, which took 20 of its 26 ms here."""
    clock = with_one_left(tokens)
    clock.begin(step(1024), 5.0)
    assert seconds(clock, 5.020) is None
    clock.begin(step(0), 5.0201)
    assert seconds(clock, 5.026) == 0.026


def begin(watch: StepWatch, tokens: int, requests: int) -> None:
    output: Any = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(map(str, range(requests)), 1),
        total_num_scheduled_tokens=tokens,
    )
    watch.begin(output, loads=False, waits=False)


def run(watch: StepWatch, now: list[float], tokens: int, requests: int, seconds: float) -> None:
    begin(watch, tokens, requests)
    now[0] += seconds
    watch.end()


def test_without_evidence_no_time_is_left():
    watch = StepWatch()
    assert watch.seconds_left() == 0
    begin(watch, 1024, 1)
    assert watch.seconds_left() == 0


def test_steps_under_way_take_what_such_steps_took(now):
    watch = StepWatch()
    for _ in range(3):
        run(watch, now, 1024, 1, 0.1)
        run(watch, now, 4, 4, 0.01)
    assert watch.seconds_left() == 0
    begin(watch, 1024, 1)
    now[0] += 0.03
    assert watch.seconds_left() == pytest.approx(0.07)
    begin(watch, 4, 4)
    assert watch.seconds_left() == pytest.approx(0.08)
    now[0] += 0.07
    watch.end()
    assert watch.seconds_left() == pytest.approx(0.01)
    begin(watch, 0, 0)
    assert watch.seconds_left() == pytest.approx(0.01)
    now[0] += 5
    assert watch.seconds_left() == 0


def test_prompts_take_as_long_as_they_did_in_the_largest_step_at_most(now):
    watch = StepWatch()
    assert watch.prompt_seconds(1024) == 0
    for _ in range(3):
        run(watch, now, 1024, 1, 0.1)
        run(watch, now, 256, 1, 0.05)
    assert watch.prompt_seconds(1) == 0, "a decode"
    assert watch.prompt_seconds(256) == pytest.approx(0.05)
    assert watch.prompt_seconds(1024) == pytest.approx(0.1)
    assert watch.prompt_seconds(100_000) == pytest.approx(0.1), "no step computes as many"
