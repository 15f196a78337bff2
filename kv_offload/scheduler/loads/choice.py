"""Whether a prefix that host memory has is loaded, or computed where that is sooner."""

from __future__ import annotations

import time
from typing import Literal
from weakref import WeakSet

from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.timing import LoadQueue, StepWatch

MARGIN = 1.2
"""Computing must be sooner by this factor: its estimate is optimistic for long prompts."""

MAX_COMPUTE_RATIO = 2.0
"""Computing may take this many times as long as the load itself, without those before it.

A queue of loads can make computing sooner on any link. But it takes the device from everybody, and
of a link that is this much faster it would relieve a third at most."""

MAX_LENGTH_RATIO = 2
"""Prefixes longer than this many times the longest prompt that was computed are loaded."""


class LoadChoice:
    """Says whether to load a hit. Without evidence, and where it is close, the answer is to load.

    `block_bytes` are those of a block on one rank. Asked again, it answers by what is then known;
    only what `rate` counts is remembered.
    """

    def __init__(
        self,
        mode: Literal["measured", "always_load"],
        block_bytes: int,
        watch: StepWatch,
        queue: LoadQueue,
    ) -> None:
        self.measured = mode == "measured"
        self._block_bytes = block_bytes
        self.rate = watch.load_rate
        self._prefill_rate = watch.prefill_rate
        self._step_seconds = watch.step_seconds
        self._queue = queue
        # Weak, since a request that has ended must not be kept, whether or not a hit ever asks. Not
        # cleared of these at every admission: a step may admit hundreds.
        self._prefilling: WeakSet[TrackedRequest] = WeakSet()
        self._tokens_ahead: int | None = None
        """Tokens of theirs that are not computed, once this step has counted them."""
        self._longest_tokens = 0
        self._computes = False

    def next_step(self) -> None:
        """Count again what is not computed."""
        self._tokens_ahead = None

    def admitted(self, tracked: TrackedRequest, computed_tokens: int) -> None:
        """Take a request that the engine computes from `computed_tokens` on."""
        self._prefilling.add(tracked)
        tokens = tracked.request.num_tokens - computed_tokens
        self._longest_tokens = max(self._longest_tokens, tokens)
        if self._tokens_ahead is not None and tokens > 1:
            self._tokens_ahead += tokens

    def loads(self, start_tokens: int, tokens: int, slots: int, *, synchronous: bool) -> bool:
        """Say whether to load `tokens` in `slots` that follow `start_tokens` on the device."""
        if not self.measured or self.rate.measured_bytes_per_second is None:
            return True
        own_compute = self._prefill_rate.seconds(tokens)
        own_load = self.load_seconds(slots)
        if (
            own_compute is None
            or own_compute > MAX_COMPUTE_RATIO * own_load
            or start_tokens + tokens > MAX_LENGTH_RATIO * self._longest_tokens
        ):
            return True
        loaded = self.queued_seconds() + own_load
        if not synchronous and self._step_seconds:
            loaded += self._step_seconds.value
        computed = own_compute + self._seconds_ahead()
        # Without the margin for the way back: an estimate near the border moves nothing.
        self._computes = computed * (1.0 if self._computes else MARGIN) < loaded
        return not self._computes or self.rate.is_to_be_tried

    def queued_seconds(self) -> float:
        """Return for how long the loads under way will yet take the link; 0 without any."""
        per_slot = self.rate.seconds(self._block_bytes)
        return self._queue.seconds_ahead(per_slot, time.monotonic())

    def load_seconds(self, slots: int) -> float:
        """Return how long a load of so many slots takes, without those before it."""
        return self.rate.seconds(slots * self._block_bytes)

    def compute_seconds(self, tokens: int) -> float | None:
        """Return after how long `tokens` of a new prompt are computed; None without evidence."""
        own_compute = self._prefill_rate.seconds(tokens)
        return None if own_compute is None else own_compute + self._seconds_ahead()

    def _seconds_ahead(self) -> float:
        """Return how long the prompts take that are admitted and not computed; they come first."""
        if self._tokens_ahead is None:
            left = {tracked: tracked.prompt_tokens_left for tracked in self._prefilling}
            self._prefilling.difference_update([r for r, tokens in left.items() if tokens <= 1])
            self._tokens_ahead = sum(tokens for tokens in left.values() if tokens > 1)
        tokens = self._tokens_ahead
        return (self._prefill_rate.seconds(tokens) or 0.0) if tokens else 0.0
