"""Limits stores: loads come first, and neither the link nor GPU blocks may run short.

A pin costs nothing while a request also holds the block. After the request ends, the pin keeps the
block from reuse until the store ends. So pins are limited by the time that the link needs for them,
and every request leaves as many blocks unpinned as the others would lack if it ended now.
"""

from __future__ import annotations

import math
from collections import deque

from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND
from kv_offload.scheduler.core import Core

HORIZON_STEPS = 3
"""Number of steps within which planned stores should have been copied.

A store is submitted in the step after its plan and reported at the end of that step at the
earliest, so two steps' worth keep the link busy without a gap."""

PIN_STEPS = HORIZON_STEPS + 2
"""Maximum steps of a pin: one until its store is submitted, the horizon, and one until its end is
reported."""

MIN_HORIZON_SECONDS = 0.1
"""Minimum horizon, so that steps of a few milliseconds do not split up small stores. Stores in
flight then delay an engine that drains, and hold pins, for no longer than this."""

SHARE_BESIDE_LOADS = 1 / 8
"""Minimum share of a step's link time for stores, next to loads that would take all of it.

Both directions slow each other down (together they moved 66 GB/s on an H200 where each alone moved
51), and a request waits for a load, but none for a store. Not 0: requests that load can follow each
other forever."""


class StoreBudget:
    """Limits the slots that a step may plan to store.

    Stores pin at most `max_pinned_share` of the GPU blocks, and leave some free while any request
    is admitted.
    """

    def __init__(self, core: Core) -> None:
        num_blocks = len(core.engine.pool.blocks) - 1
        self._max_pinned_blocks = max(1, int(core.config.max_pinned_share * num_blocks))
        self._requests, self._block_bytes = core.requests, core.slots.block_bytes
        self._step_time, self._rate = core.transfers.step_time, core.watch.store_rate
        self._load_seconds = 0.0
        self._planned_slots = 0
        self._grown: deque[int] = deque(maxlen=PIN_STEPS)
        self._growth = 0.0
        self.prompt_growth = 0
        """GPU blocks that partly computed prompts will take while a pin lasts."""

    def next_step(self, *, load_seconds: float, grown_blocks: int) -> None:
        """Begin a step: loads still need `load_seconds`, and decodes last got `grown_blocks`."""
        self._load_seconds = load_seconds
        self._planned_slots = 0
        self._grown.append(grown_blocks)
        # Below half a block there is nothing left to remember.
        faded = self._growth * 63 / 64
        self._growth = max(sum(self._grown), faded if faded > 0.5 else 0.0)

    @property
    def reserved_blocks(self) -> int:
        """GPU blocks that pins leave free, for the growth of running requests while a pin lasts.

        Answers are expected to grow at the highest rate of recent steps, and prompts to take all
        blocks that they lack. A running request without a block would be preempted, while a waiting
        one only waits longer.
        """
        return math.ceil(self._growth) + self.prompt_growth if self._requests.admitted else 0

    def count_planned(self, num_slots: int) -> None:
        """Count slots that this step has planned to store."""
        self._planned_slots += num_slots

    def slots_left(self, pinned_blocks: int) -> int:
        """Return how many more slots the link and the limit of pins allow."""
        return min(self._max_pinned_blocks - pinned_blocks, self.link_slots(pinned_blocks))

    def link_slots(self, slots_in_flight: int) -> int:
        """Return how many more slots the link can take in addition to those in flight.

        It is at least 1 while nothing is in flight, so that stores make progress.
        """
        speed = self._rate.measured_bytes_per_second or ASSUMED_BYTES_PER_SECOND
        slots_per_second = speed / self._block_bytes
        step = self._step_time.recent_seconds
        horizon_seconds = max(HORIZON_STEPS * step, MIN_HORIZON_SECONDS)
        left = slots_per_second * horizon_seconds - slots_in_flight
        if self._load_seconds:
            seconds = max(step - self._load_seconds, step * SHARE_BESIDE_LOADS)
            left = min(left, slots_per_second * seconds - self._planned_slots)
        return max(int(left), 0 if slots_in_flight else 1)
