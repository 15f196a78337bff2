"""How many waves come together, against what every other number would give."""

from __future__ import annotations

import pytest
from kv_swap.waves import LAUNCH_BYTES, waves_together

MIB = 1 << 20
SLOT = [3 * MIB // 10, 6 * MIB // 10, 6 * MIB // 10, 3 * MIB // 10, 2 * MIB // 10]
"""A slot of 2 MiB."""


@pytest.mark.parametrize(
    ("num_slots", "compute", "together"),
    [
        (64, 1.0, 1),  # what is computed hides all but the first wave
        (1024, 1.0, 1),
        (64, 0.0, 5),  # nothing does, and every launch costs
        (1024, 0.1, 4),  # the last wave's layers are computed soon enough
        (1024, 0.3, 3),
    ],
)
def test_compute_ends_soonest(num_slots: int, compute: float, together: int) -> None:
    """`compute` is its time as a share of the load's."""
    compute_bytes = compute * num_slots * sum(SLOT)
    assert waves_together(SLOT, num_slots, compute_bytes) == together
    ends = [end(SLOT, first, compute * sum(SLOT)) for first in range(1, 6)]
    assert ends[together - 1] == min(ends)


def end(wave_bytes: list[int], together: int, compute: float) -> float:
    """When compute ends, in bytes of the link for one slot: layer by layer, as a device does it."""
    launches = [wave_bytes[:together], *([wave] for wave in wave_bytes[together:])]
    arrived = now = 0.0
    for launch in launches:
        arrived += LAUNCH_BYTES + sum(launch)
        now = max(now, arrived) + compute * sum(launch) / sum(wave_bytes)
    return now


@pytest.mark.parametrize("slot_bytes", [64 << 10, 256 << 10, 2 * MIB, 16 * MIB])
def test_no_other_number_is_better(slot_bytes: int) -> None:
    wave_bytes = [slot_bytes * weight // 20 for weight in (3, 6, 6, 3, 2)]
    for tenths in range(41):
        compute = slot_bytes * tenths / 10
        chosen = waves_together(wave_bytes, 7, 7 * compute)
        ends = [end(wave_bytes, together, compute) for together in range(1, 6)]
        assert ends[chosen - 1] == pytest.approx(min(ends))
