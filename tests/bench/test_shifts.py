"""The default where traffic changes: never far from recency, whatever it had learnt before."""

from __future__ import annotations

import pytest

from bench.trace.shifts import SHIFTS, hits_by_phase
from tests.support.slow import rest_is_slow

ALLOWED = 2.0
"""Points of the hits of a phase."""

MORE = {
    # Of what just fits the first prompt is declined, and so is not there in the next pass.
    ("batches of new lengths", 5_000): 5.0,
    # Hit density took the lead in the night, and loses it while the day's users come back.
    ("day and night", 6_000): 3.0,
    # Hit density takes the lead an epoch or two after recency has fallen behind.
    ("popularity that moves", 4_000): 3.0,
    # Half of the prompts fit, and hit density leads by turns.
    ("a scan between documents", 2_500): 3.0,
}
"""What a phase can lose more, and why."""

IN_MAKE_TEST = 6
"""So many shifts, each with its first capacity."""

CELLS = [
    cell
    for number, (name, shift) in enumerate(SHIFTS.items())
    for cell in rest_is_slow(
        [(name, capacity) for capacity in shift.capacities], 1 if number < IN_MAKE_TEST else 0
    )
]


@pytest.mark.parametrize("seed", rest_is_slow([0, 1]))
@pytest.mark.parametrize(("name", "capacity"), CELLS)
def test_auto_is_within_two_points_of_lru_in_each_phase(name, capacity, seed):
    phases = SHIFTS[name].make(seed)
    lru, auto = (hits_by_phase(phases, policy, capacity) for policy in ("lru", "auto"))
    behind = [recent - learnt for recent, learnt in zip(lru, auto, strict=True)]
    assert max(behind) <= MORE.get((name, capacity), ALLOWED), f"auto {auto}, lru {lru}"
