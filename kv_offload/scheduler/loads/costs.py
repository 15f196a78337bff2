"""The current costs of loads and prompts, from measurements and from the plan of this step."""

from __future__ import annotations

import time
from typing import Literal
from weakref import WeakSet

from kv_offload.scheduler.loads.decision import Costs, is_computed
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.timing import LoadQueue, StepWatch

MAX_LENGTH_RATIO = 2
"""Prefixes longer than this many times the longest computed prompt are always loaded."""

START_SECONDS = 0.001
"""Time from choosing a load to its first copy: the rest of the plan, and the launch of copies (half
a millisecond each with 32 layers on an H200's host, 22 Nov 2026)."""

TRUSTED_SHARE = 0.8
"""A load counts on this share of the expected time of the steps under way. That time is a median,
and a load that takes longer than the steps delays all requests."""

ASSUMED_DECODE_SECONDS = 0.005
"""Assumed time of a step of decodes until one has been measured."""


class LoadCosts:
    """Estimates the costs of hits. `block_bytes` is the size of a block on one rank.

    `overlaps` is True if a load runs while the steps under way compute. Of past decisions it keeps
    only the counts of `rate`, and whether loading or computing was faster last.
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
        # Weak: an ended request must not be kept alive until the next hit. Removing it at each
        # admission would take too long, since a step may admit hundreds.
        self._prefilling: WeakSet[TrackedRequest] = WeakSet()
        self._longest_tokens = 0
        self.next_step()

    # -- the step ------------------------------------------------------------------------------

    def next_step(self) -> None:
        """Begin a step, so far without prompts and loads."""
        self._beside = 0.0
        self._step_tokens = 0
        self._in_waves = True
        self._tokens_ahead: int | None = None
        """Tokens of admitted prompts left to compute; None until this step has counted them."""

    def admitted(self, tracked: TrackedRequest, computed_tokens: int) -> None:
        """Count a request whose tokens from `computed_tokens` on will be computed."""
        self._prefilling.add(tracked)
        tokens = tracked.request.num_tokens - computed_tokens
        self._longest_tokens = max(self._longest_tokens, tokens)
        if self._tokens_ahead is not None and tokens > 1:
            self._tokens_ahead += tokens

    def count(self, num_slots: int, tokens_left: int) -> None:
        """Count a request that this step computes, and the slots of its synchronous load, if any.

        If a load leaves no tokens to compute, no load of the step arrives in waves.
        """
        self._beside += self.load_seconds(num_slots)
        self._step_tokens += tokens_left
        self._in_waves = self._in_waves and tokens_left > 0

    # -- costs ---------------------------------------------------------------------------------

    def of(self, start: int, end: int, num_tokens: int, slots: int, *, idle: bool) -> Costs:
        """Return the costs of a hit from token `start` to `end`, which takes `slots`.

        `idle` is True if no other request runs or is loaded.
        """
        watch, tokens_left = self._watch, num_tokens - end
        in_waves = self._in_waves and tokens_left > 0
        hidden = 0.0
        if self._overlaps:
            hidden = max(0.0, TRUSTED_SHARE * watch.seconds_left() - START_SECONDS)
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
            hidden=hidden,
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
        """Return whether to compute a hit; some are loaded anyway, to measure the link again."""
        computed = is_computed(costs, synchronous=synchronous)
        if computed is not None:
            self._prefers_compute = computed
        return bool(computed) and not self.rate.is_to_be_tried

    def queued_seconds(self) -> float:
        """Return how long the loads under way will still occupy the link; 0 without any."""
        per_slot = self.rate.seconds(self._block_bytes)
        return self._queue.seconds_ahead(per_slot, time.monotonic())

    def load_seconds(self, slots: int) -> float:
        """Return how long a load of this many slots takes, not counting loads queued before it."""
        return self.rate.seconds(slots * self._block_bytes)

    def compute_seconds(self, tokens: int) -> float | None:
        """Return in how many seconds a new prompt's `tokens` would be computed, None if unknown."""
        own_compute = self._watch.prefill_rate.seconds(tokens)
        return None if own_compute is None else own_compute + self._seconds_ahead()

    def _seconds_ahead(self) -> float:
        """Return how long it will take to compute the admitted prompts, which come first."""
        if self._tokens_ahead is None:
            left = {tracked: tracked.prompt_tokens_left for tracked in self._prefilling}
            self._prefilling.difference_update([r for r, tokens in left.items() if tokens <= 1])
            self._tokens_ahead = sum(tokens for tokens in left.values() if tokens > 1)
        tokens = self._tokens_ahead
        return (self._watch.prefill_rate.seconds(tokens) or 0.0) if tokens else 0.0
