"""What loads and prompts cost now, from what was measured and what this step has already."""

from __future__ import annotations

import time
from typing import Literal
from weakref import WeakSet

from kv_offload.scheduler.loads.decision import Costs, is_computed
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.timing import LoadQueue, StepWatch

MAX_LENGTH_RATIO = 2
"""Prefixes longer than this many times the longest prompt that was computed are loaded."""

START_SECONDS = 0.001
"""From the choice of a load to its first copy: the rest of the plan, and the launch of copies (half
a millisecond each with 32 layers on an H200's host, 22 Nov 2026)."""

TRUSTED_SHARE = 0.8
"""Share of the expected time of the steps under way that a load counts on. They are medians, and a
load that takes longer than they do delays all requests."""

ASSUMED_DECODE_SECONDS = 0.005
"""A step of a decode until one was timed."""


class LoadCosts:
    """Gives the costs of hits. `block_bytes` are those of a block on one rank.

    `overlaps` is True if a load runs while the steps under way compute. Another call answers by
    what is known then; only what `rate` counts is remembered, and which of the two was faster last.
    """

    def __init__(
        self,
        mode: Literal["measured", "always_load"],
        block_bytes: int,
        watch: StepWatch,
        queue: LoadQueue,
        *,
        overlaps: bool = False,
    ) -> None:
        self.measured = mode == "measured"
        self.rate = watch.load_rate
        self._prefers_compute = False
        self._block_bytes = block_bytes
        self._watch, self._queue, self._overlaps = watch, queue, overlaps
        # Weak, since a request that has ended must not be kept, whether or not a hit ever asks. Not
        # cleared of these at every admission: a step may admit hundreds.
        self._prefilling: WeakSet[TrackedRequest] = WeakSet()
        self._longest_tokens = 0
        self.next_step()

    # -- the step ------------------------------------------------------------------------------

    def next_step(self) -> None:
        """Drop what the step before computes and loads."""
        self._beside = 0.0
        self._step_tokens = 0
        self._in_waves = True
        self._tokens_ahead: int | None = None
        """Tokens of admitted prompts that are not computed, once this step has counted them."""

    def admitted(self, tracked: TrackedRequest, computed_tokens: int) -> None:
        """Take a request that the engine computes from `computed_tokens` on."""
        self._prefilling.add(tracked)
        tokens = tracked.request.num_tokens - computed_tokens
        self._longest_tokens = max(self._longest_tokens, tokens)
        if self._tokens_ahead is not None and tokens > 1:
            self._tokens_ahead += tokens

    def count(self, num_slots: int, tokens_left: int) -> None:
        """Count a request that this step computes: the slots of its synchronous load, if any.

        With a load that leaves no tokens, none of the step's loads arrives in waves.
        """
        self._beside += self.load_seconds(num_slots)
        self._step_tokens += tokens_left
        self._in_waves = self._in_waves and tokens_left > 0

    # -- costs ---------------------------------------------------------------------------------

    def of(self, start: int, end: int, num_tokens: int, slots: int, *, idle: bool) -> Costs:
        """Return the costs of a hit from `start` to `end` of a request, which is in `slots`.

        `idle` is True if no other request runs or is loaded.
        """
        watch, tokens_left = self._watch, num_tokens - end
        in_waves = self._in_waves and tokens_left > 0
        compute = None
        if (
            self.measured
            and self.rate.measured_bytes_per_second is not None
            and end <= MAX_LENGTH_RATIO * self._longest_tokens
        ):
            compute = watch.prefill_rate.seconds(end - start)
        return Costs(
            load=self.load_seconds(slots),
            queued=self.queued_seconds(),
            hidden=self._hidden_seconds(),
            beside=self._beside,
            forward=watch.prompt_seconds(self._step_tokens + tokens_left) if in_waves else 0.0,
            decode=watch.decode_seconds.value if watch.decode_seconds else ASSUMED_DECODE_SECONDS,
            step=watch.step_seconds.value if watch.step_seconds else 0.0,
            compute=compute,
            ahead=0.0 if compute is None else self._seconds_ahead(),
            idle=idle,
            prefers_compute=self._prefers_compute,
        )

    def computes(self, costs: Costs, *, synchronous: bool) -> bool:
        """Return whether to compute a hit; now and then one is loaded to measure the link again."""
        computed = is_computed(costs, synchronous=synchronous)
        if computed is not None:
            self._prefers_compute = computed
        return bool(computed) and not self.rate.is_to_be_tried

    def queued_seconds(self) -> float:
        """Return for how long the loads under way still take the link; 0 without any."""
        per_slot = self.rate.seconds(self._block_bytes)
        return self._queue.seconds_ahead(per_slot, time.monotonic())

    def load_seconds(self, slots: int) -> float:
        """Return how long a load of so many slots takes, without those before it."""
        return self.rate.seconds(slots * self._block_bytes)

    def compute_seconds(self, tokens: int) -> float | None:
        """Return after how long `tokens` of a new prompt are computed; None without evidence."""
        own_compute = self._watch.prefill_rate.seconds(tokens)
        return None if own_compute is None else own_compute + self._seconds_ahead()

    def _hidden_seconds(self) -> float:
        if not self._overlaps:
            return 0.0
        return max(0.0, TRUSTED_SHARE * self._watch.seconds_left() - START_SECONDS)

    def _seconds_ahead(self) -> float:
        """Return how long the prompts take that are admitted and not computed; they come first."""
        if self._tokens_ahead is None:
            left = {tracked: tracked.prompt_tokens_left for tracked in self._prefilling}
            self._prefilling.difference_update([r for r, tokens in left.items() if tokens <= 1])
            self._tokens_ahead = sum(tokens for tokens in left.values() if tokens > 1)
        tokens = self._tokens_ahead
        return (self._watch.prefill_rate.seconds(tokens) or 0.0) if tokens else 0.0
