"""Which loads are synchronous: ordered before the step's forward instead of awaited by steps.

An asynchronous load runs beside the forward, but its request joins a step only after the scheduler
has heard of its end: at least one step late, and while others decode a step is longer than a small
load. A synchronous load is waited for by the GPU, not by the host, in the very step that admits its
request; everybody in that step waits with it. So a load is synchronous if it takes less time than
the wait is worth: next to nothing while others run, more while nobody does.
"""

from __future__ import annotations

from kv_offload.medians import RecentMedian
from kv_offload.scheduler.rates import LoadRate

BUSY_SECONDS = 0.0005
"""What the synchronous loads of one step may take from others that run: a tenth of a token.

With 0.003 the tokens of 16 decodes came 8.8 ms apart at p99 beside synchronous loads of 1.3 ms,
where 5.9 ms was seen of a connector that loads asynchronously (32 layers with one KV head, on an
H200, 22 Nov 2026)."""

IDLE_SECONDS = 0.1
"""The same where nobody runs: bounds how long a request that comes meanwhile waits."""

WHOLE_SECONDS = 0.009
"""Up to this, load and step of a decode together, a load brings all tokens of a lone request.

Then one token is computed, as in a step of decodes: one CUDA graph, after the load. Without the
last slot its tokens are computed, and the host starts their layers one by one while the load still
arrives in waves. That hides the forward behind a load that is long enough; but up to here (9 to 10
ms from the start of a load on, on an H200's host with 32 layers) it is the host that takes longest.
Time to first token with and without the last slot, ms: 9.2 and 10.5 where load and decode took 7.8,
16.6 and 21.8 where 7.7, but 12.3 and 10.4 where 10.5 (bench/results/h200/whole-*.json)."""

ASSUMED_DECODE_SECONDS = 0.005
"""A step of a decode until one was timed."""


class LoadMode:
    """Decides by the time that loads take.

    `slot_bytes` are those of a slot on one rank. Where some rank cannot have compute wait for a
    load on its device, `allowed` is set to False.
    """

    def __init__(self, slot_bytes: int, load_rate: LoadRate, decode_seconds: RecentMedian) -> None:
        self.allowed = True
        self._slot_bytes = slot_bytes
        self._load_rate = load_rate
        self._decode_seconds = decode_seconds
        self._seconds_planned = 0.0

    def begin_step(self) -> None:
        """Forget what was planned for the step before."""
        self._seconds_planned = 0.0

    def is_synchronous(self, num_slots: int, *, idle: bool) -> bool:
        """Say whether one more load, of `num_slots`, fits before this step's forward.

        `idle` says that no other request runs or is loaded.
        """
        limit = IDLE_SECONDS if idle else BUSY_SECONDS
        return self.allowed and self._seconds_planned + self._seconds(num_slots) <= limit

    def brings_last_slot(self, num_slots: int, *, idle: bool) -> bool:
        """Say whether a synchronous load of all tokens is better than one without the last slot.

        Beside others it is: a step in which everybody computes one token is the shortest there is.
        """
        if not idle:
            return True
        decode = self._decode_seconds.value if self._decode_seconds else ASSUMED_DECODE_SECONDS
        return self._seconds(num_slots) + decode <= WHOLE_SECONDS

    def plan(self, num_slots: int) -> None:
        """Count a load that is synchronous."""
        self._seconds_planned += self._seconds(num_slots)

    def _seconds(self, num_slots: int) -> float:
        return self._load_rate.seconds(num_slots * self._slot_bytes)
