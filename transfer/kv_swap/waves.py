"""How many of a load's first waves come together, so that compute ends soonest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

LAUNCH_BYTES = 36 << 10
"""What a launch costs for each slot, in bytes of the link: it comes back to every slot."""


def waves_together(wave_bytes: Sequence[int], num_slots: int, compute_bytes: float) -> int:
    """Return how many of the first waves are to come in one launch, the others in one each; >= 1.

    `wave_bytes` are those of a slot in each wave. `compute_bytes` is what the link carries while
    the compute runs that waits for the waves. Of that, each wave's share waits for the wave.
    """
    slot_bytes, compute = sum(wave_bytes), compute_bytes / num_slots
    arrived = list(accumulate(wave_bytes))
    best, soonest = 1, math.inf
    for together in range(len(wave_bytes), 0, -1):
        end = arrived[together - 1] + LAUNCH_BYTES + compute
        for wave in range(together, len(wave_bytes)):
            launches = wave - together + 2
            computed = arrived[wave - 1] / slot_bytes
            end = max(end, arrived[wave] + launches * LAUNCH_BYTES + compute * (1 - computed))
        if end < soonest:
            best, soonest = together, end
    return best
