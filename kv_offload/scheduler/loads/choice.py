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

LOAD_EVERY = 32
"""Of the hits that are to be computed every so many is loaded, to measure the link again.

If that load was clearly faster than the others, the next hit is loaded, too, and so on. Otherwise
it would take 250 hits to notice that a link which was slow for a minute has recovered."""


class Retries:
    """Counts hits that are computed; every `LOAD_EVERY`th is loaded all the same."""

    def __init__(self) -> None:
        self._computed = 0

    @property
    def is_due(self) -> bool:
        """Whether the next one is loaded all the same."""
        return self._computed + 1 >= LOAD_EVERY

    def computed(self) -> None:
        """Take note that a hit is computed."""
        self._computed += 1

    def loaded(self) -> None:
        """Take note that a hit is loaded."""
        self._computed = 0

    def hasten(self) -> None:
        """Have the next one loaded all the same."""
        self._computed = LOAD_EVERY - 1


class LoadChoice:
    """Says whether to load a hit. Without evidence, and where it is close, the answer is to load.

    `block_bytes` are those of a block on one rank. Asked again, it answers by what is then known;
    only `loaded` and `declined` are remembered.
    """

    def __init__(
        self,
        mode: Literal["measured", "always_load"],
        block_bytes: int,
        watch: StepWatch,
        queue: LoadQueue,
    ) -> None:
        self._measured = mode == "measured"
        self._block_bytes = block_bytes
        self._load_rate = watch.load_rate
        self._prefill_rate = watch.prefill_rate
        self._step_seconds = watch.step_seconds
        self._queue = queue
        # Weak, since a request that has ended must not be kept, whether or not a hit ever asks. Not
        # cleared of these at every admission: a step may admit hundreds.
        self._prefilling: WeakSet[TrackedRequest] = WeakSet()
        self._longest_tokens = 0
        self._computes = False
        self._retries = Retries()

    def admitted(self, tracked: TrackedRequest, computed_tokens: int) -> None:
        """Take a request that the engine computes from `computed_tokens` on."""
        self._prefilling.add(tracked)
        tokens = tracked.request.num_tokens - computed_tokens
        self._longest_tokens = max(self._longest_tokens, tokens)

    def learn(self, bytes_per_second: float) -> None:
        """Take the speed of a load that ran alone on its rank."""
        self._load_rate.learn(bytes_per_second)
        if self._load_rate.has_risen:
            self._retries.hasten()

    def loaded(self) -> None:
        """Take note that a hit is loaded."""
        self._retries.loaded()

    def declined(self) -> None:
        """Take note that a hit is computed."""
        self._retries.computed()

    def loads(self, start_tokens: int, tokens: int, slots: int, *, synchronous: bool) -> bool:
        """Say whether to load `tokens` in `slots` that follow `start_tokens` on the device."""
        if not self._measured or self._load_rate.measured_bytes_per_second is None:
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
        return not self._computes or self._retries.is_due

    def queued_seconds(self) -> float:
        """Return for how long the loads under way will yet take the link; 0 without any."""
        per_slot = self._load_rate.seconds(self._block_bytes)
        return self._queue.seconds_ahead(per_slot, time.monotonic())

    def load_seconds(self, slots: int) -> float:
        """Return how long a load of so many slots takes, without those before it."""
        return self._load_rate.seconds(slots * self._block_bytes)

    def compute_seconds(self, tokens: int) -> float | None:
        """Return after how long `tokens` of a new prompt are computed; None without evidence."""
        own_compute = self._prefill_rate.seconds(tokens)
        return None if own_compute is None else own_compute + self._seconds_ahead()

    def _seconds_ahead(self) -> float:
        """Return how long the prompts take that are admitted and not computed; they come first."""
        left = {tracked: tracked.prompt_tokens_left for tracked in self._prefilling}
        self._prefilling.difference_update([r for r, tokens in left.items() if tokens <= 1])
        tokens = sum(tokens for tokens in left.values() if tokens > 1)
        return (self._prefill_rate.seconds(tokens) or 0.0) if tokens else 0.0
