"""How much may be stored: loads come first, and neither the link nor GPU blocks may run short.

A store that has to wait costs little: a running request keeps its blocks anyway, and what a
finished one leaves behind stays in the engine's pool until somebody needs the block. A store that
is submitted too early costs others: it takes bandwidth from loads, and it pins GPU blocks for as
long as it stands in line.
"""

from __future__ import annotations

import math
from collections import deque

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND
from kv_offload.scheduler.request import RequestTable
from kv_offload.scheduler.timing import StepTime

HORIZON_STEPS = 3
"""Steps in which what is planned should have been copied.

A store is submitted in the step after its plan and reported at the end of that step at the
earliest, so two steps' worth keep the link busy without a gap."""

PIN_STEPS = HORIZON_STEPS + 2
"""Steps for which a pin lasts at most: one until its store is submitted, the horizon, and one until
its end is reported."""

MIN_HORIZON_SECONDS = 0.1
"""The horizon is never shorter, so that steps of a few milliseconds do not split up small stores.
What is in flight then delays an engine that drains, and keeps pins, by no more than this."""

SHARE_BESIDE_LOADS = 1 / 8
"""Share of a step's time that stores get of the link at least, beside loads that take all of it.

Together they slow each other down (both directions at once moved 66 GB/s on an H200 where each
alone moved 51), and a request waits for a load, but nobody for a store. Not 0: requests that load
may follow each other for ever."""


class StoreBudget:
    """Says how many more slots may be planned to be stored in this step.

    `block_bytes` are those of a block on one rank. Stores pin at most `max_pinned_share` of the GPU
    blocks that would be free without them, and keep some free if any of `requests` is admitted.
    """

    def __init__(
        self,
        block_bytes: int,
        max_pinned_share: float,
        requests: RequestTable,
        step_time: StepTime,
    ) -> None:
        self._block_bytes = block_bytes
        self._max_pinned_share = max_pinned_share
        self._requests = requests
        self._step_time = step_time
        self._bytes_per_second: dict[int, float] = {}  # by rank
        self._load_seconds = 0.0
        self._planned_slots = 0
        self._grown: deque[int] = deque(maxlen=PIN_STEPS)
        self._reserved_blocks = 0.0

    def learn(self, bytes_per_second: float, rank: int = 0) -> None:
        """Take how fast the stores of a rank are; a store ends when the slowest rank has it."""
        self._bytes_per_second[rank] = bytes_per_second

    def next_step(self, *, load_seconds: float, grown_blocks: int) -> None:
        """Begin a step, in which requests that ran before got `grown_blocks` more blocks.

        The loads under way take `load_seconds` more, as far as one can tell.
        """
        self._load_seconds = load_seconds
        self._planned_slots = 0
        self._grown.append(grown_blocks)
        # Below half a block there is nothing left to remember.
        faded = self._reserved_blocks * 63 / 64
        self._reserved_blocks = max(sum(self._grown), faded if faded > 0.5 else 0.0)

    @property
    def reserved_blocks(self) -> int:
        """GPU blocks that pins must leave free: what running requests took at most while one lasts.

        The past is forgotten by and by. Where they find none they are preempted; a request that is
        only waiting goes on waiting.
        """
        return math.ceil(self._reserved_blocks) if self._requests.admitted else 0

    def count_planned(self, num_slots: int) -> None:
        """Count slots whose stores were planned in this step."""
        self._planned_slots += num_slots

    def slots_left(self, pinned_blocks: int, free_blocks: int) -> int:
        """Return how many more slots may be planned, by the link and by GPU blocks.

        `max_pinned_share` is of what would be free if no store held anything and the requests whose
        blocks are pinned had ended. While nothing is pinned it is at least one slot, or a GPU cache
        with few free blocks would never store anything.
        """
        share = int(self._max_pinned_share * (free_blocks + pinned_blocks)) - pinned_blocks
        if not pinned_blocks:
            share = max(share, 1)
        return min(share, free_blocks - self.reserved_blocks, self.link_slots(pinned_blocks))

    def link_slots(self, slots_in_flight: int) -> int:
        """Return how many more slots the link takes beside those planned before and not ended.

        While nothing is in flight it is at least 1: the engine goes on.
        """
        speed = min(self._bytes_per_second.values(), default=ASSUMED_BYTES_PER_SECOND)
        slots_per_second = speed / self._block_bytes
        step = self._step_time.recent_seconds
        horizon_seconds = max(HORIZON_STEPS * step, MIN_HORIZON_SECONDS)
        left = slots_per_second * horizon_seconds - slots_in_flight
        if self._load_seconds:
            seconds = max(step - self._load_seconds, step * SHARE_BESIDE_LOADS)
            left = min(left, slots_per_second * seconds - self._planned_slots)
        return max(int(left), 0 if slots_in_flight else 1)
