"""The default where traffic changes: never far from recency, whatever it had learnt before."""

from __future__ import annotations

import pytest

from bench.trace.shifts import SHIFTS, hits_by_phase

ALLOWED = 2.0
"""Points of the hits of a phase."""

CELLS = [(name, capacity) for name, shift in SHIFTS.items() for capacity in shift.capacities]


@pytest.mark.parametrize(("name", "capacity"), CELLS)
def test_auto_is_within_two_points_of_lru_in_each_phase(name: str, capacity: int) -> None:
    phases = SHIFTS[name].make()
    lru, auto = (hits_by_phase(phases, policy, capacity) for policy in ("lru", "auto"))
    behind = [recent - learnt for recent, learnt in zip(lru, auto, strict=True)]
    assert max(behind) <= ALLOWED, f"auto {auto}, lru {lru}"
