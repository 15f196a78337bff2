"""What samples mean, alone and beside an earlier reading."""

from __future__ import annotations

import dataclasses
from math import inf

import pytest

from kv_offload.metrics import PREFIX
from kv_offload.tools.status.figures import Figures
from kv_offload.tools.status.read import Reading, parse
from tests.kv_offload.tools.status.server import HITS, START, hits_with


def reading(taken: float = 0.0, **values: float) -> Reading:
    named = {PREFIX + name: value for name, value in values.items()}
    return Reading(taken, ("0",), "m", {"0": named}, {})


def test_rates_are_those_between_two_readings_of_a_server_that_was_not_started_again():
    before = parse(START, "here")
    assert Figures(before).copy_rate("loaded") == 0
    assert Figures(before).load_seconds(0.5) is None
    found = Figures(dataclasses.replace(parse(HITS, "here"), taken=before.taken + 4), before)
    assert found.seconds == pytest.approx(4)
    assert found.some("host_tokens", "stored_bytes") == {"host_tokens": 864, "stored_bytes": 884736}
    assert found.per_second("host_tokens") == 216
    assert found.per_second("stored_bytes") == 27 * 8192
    again = Figures(reading(5, hit_tokens_total=10), reading(1, hit_tokens_total=90))
    assert again.per_second("host_tokens") is None
    # vLLM leaves requests that were preempted out of its counters; ours have them.
    assert again.values["computed_tokens"] == 0


def test_engines_are_added_or_taken_alone():
    """Slots do not grow and ages do not add up: the largest counts."""
    first, second = (hits_with("oldest_copy_seconds", seconds) for seconds in (2.5, 7.5))
    both = parse(first + second.replace('engine="0"', 'engine="1"'), "here")
    together, alone = Figures(both).as_json(), Figures(both, None, ["1"]).as_json()
    assert together["engines"] == ("0", "1")
    assert (together["host_tokens"], alone["host_tokens"]) == (2 * 864, 864)
    assert together["load_times"] == alone["load_times"]
    assert Figures(both).values["slot_bytes"] == 32768
    assert together["oldest_copy_seconds"] == alone["oldest_copy_seconds"] == 7.5
    assert Figures(both, None, ["0"]).values["oldest_copy_seconds"] == 2.5


@pytest.mark.parametrize(
    ("buckets", "median", "slowest"),
    [
        ({0.1: 0, 0.2: 4, 0.4: 4, inf: 4}, 0.15, 0.199),
        ({0.1: 2, 0.2: 2, 0.4: 4, inf: 4}, 0.1, 0.396),
        ({0.1: 0, 0.2: 0, 0.4: 0, inf: 3}, 0.4, 0.4),
    ],
)
def test_times_of_loads_are_estimated_as_prometheus_does(buckets, median, slowest):
    found = Figures(Reading(0, ("0",), "m", {}, {(f"{PREFIX}load_seconds", "0"): buckets}))
    assert found.load_seconds(0.5) == pytest.approx(median)
    assert found.load_seconds(0.99) == pytest.approx(slowest)
