"""How a request gets a prefix that host memory has: computed, or loaded, and if so when.

Computed where that was measured to be sooner. Loaded otherwise, in one of two ways. An asynchronous
load runs while others are computed, but its request joins a step only after the scheduler has heard
of its end: at least one step late, and while others decode a step is longer than a small load.
The GPU waits for a synchronous load, not the host, in the very step that admits its request; all
requests of that step wait with it. So a load is synchronous if it delays the step by less than that
is worth: next to nothing while others run, more while none does. Not all that a load takes is a
delay. It may run while the steps before compute. Its waves arrive while the layers before them
compute, which takes long where the step computes prompts.
"""

from __future__ import annotations

import time
from typing import Literal
from weakref import WeakSet

from kv_offload.scheduler.rates import LoadQueue
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.steps import StepWatch

MARGIN = 1.2
"""Computing must be sooner by this factor: its estimate is optimistic for long prompts."""

MAX_COMPUTE_RATIO = 2.0
"""Computing may take this many times as long as the load itself, without those before it.

A queue of loads can make computing sooner on any link. But it takes the device from everybody, and
of a link that is this much faster it would relieve a third at most."""

MAX_LENGTH_RATIO = 2
"""Prefixes longer than this many times the longest prompt that was computed are loaded."""

LOAD_EVERY = 32
"""Of the hits that are to be computed every so many is loaded, to measure the link again."""

BUSY_SECONDS = 0.0005
"""What the synchronous loads of one step may take from others that run: a tenth of a token.

With 0.003 the tokens of 16 decodes came 8.8 ms apart at p99 beside synchronous loads of 1.3 ms,
where 5.9 ms was seen of a connector that loads asynchronously (32 layers with one KV head, on an
H200, 22 Nov 2026)."""

BUSY_SHARE = 0.25
"""What they may take besides, as a share of the time in which the step computes prompts: its tokens
are late already, and the request would wait for one such step at least. Without it most loads of
conversations miss their step (calculated by tests/kv_offload/test_conversations.py)."""

IDLE_SECONDS = 0.1
"""What the synchronous loads of a step may take where no other request runs: a request that comes
meanwhile waits for as long."""

WAVES_SHARE = 0.65
"""How much of a load its step's forward hides where it takes as long: all but the largest wave,
which has 0.3 of it (see `worker/waves.py`), and a little more because copies slow each other."""

START_SECONDS = 0.001
"""From the choice of a load to its first copy: the rest of the plan, and the launch of copies (half
a millisecond each with 32 layers on an H200's host, 22 Nov 2026)."""

TRUSTED_SHARE = 0.8
"""How much of the expected time of the steps under way a load counts on. They are medians, and a
load that takes longer than they do delays everybody."""

WHOLE_SECONDS = 0.009
"""Up to this, load and step of a decode together, a load brings all tokens of a lone request.

Then one token is computed, as in a step of decodes: one CUDA graph, after the load. Without the
last slot its tokens are computed, and the host starts their layers one by one while the load still
arrives in waves. That hides the forward behind a load that is long enough; but up to here (9 to 10
ms from the start of a load on, on an H200's host with 32 layers) it is the host that takes longest.
Time to first token with and without the last slot, ms: 9.2 and 10.5 where load and decode took 7.8,
16.6 and 21.8 where 7.7, but 12.3 and 10.4 where 10.5 (H200, 22 Nov 2026)."""

ASSUMED_DECODE_SECONDS = 0.005
"""A step of a decode until one was timed."""


class LoadChoice:
    """Says whether to load a hit. Without evidence, and where it is close, the answer is to load.

    `slot_bytes` are those of a slot on one rank. Asked again, it answers by what is then known;
    only `loaded` and `declined` are remembered.
    """

    def __init__(
        self,
        mode: Literal["measured", "always_load"],
        slot_bytes: int,
        watch: StepWatch,
        queue: LoadQueue,
    ) -> None:
        self._measured = mode == "measured"
        self._slot_bytes = slot_bytes
        self._load_rate = watch.load_rate
        self._prefill_rate = watch.prefill_rate
        self._step_seconds = watch.step_seconds
        self._queue = queue
        # Weak, since a request that has ended must not be kept, whether or not a hit ever asks. Not
        # cleared of these at every admission: a step may admit hundreds.
        self._prefilling: WeakSet[TrackedRequest] = WeakSet()
        self._longest_tokens = 0
        self._computes = False
        self._declined = 0

    def admitted(self, tracked: TrackedRequest, computed_tokens: int) -> None:
        """Take a request that the engine computes from `computed_tokens` on."""
        self._prefilling.add(tracked)
        tokens = tracked.request.num_tokens - computed_tokens
        self._longest_tokens = max(self._longest_tokens, tokens)

    def loaded(self) -> None:
        """Take note that a hit is loaded."""
        self._declined = 0

    def declined(self) -> None:
        """Take note that a hit is computed."""
        self._declined += 1

    def loads(self, start_tokens: int, tokens: int, slots: int, *, synchronous: bool) -> bool:
        """Say whether to load `tokens` in `slots` that follow `start_tokens` on the device."""
        if not self._measured or self._load_rate.measured_bytes_per_second is None:
            return True
        own_compute = self._prefill_rate.seconds(tokens)
        own_load = self._load_rate.seconds(slots * self._slot_bytes)
        if (
            own_compute is None
            or own_compute > MAX_COMPUTE_RATIO * own_load
            or start_tokens + tokens > MAX_LENGTH_RATIO * self._longest_tokens
        ):
            return True
        loaded = self.queued_seconds() + own_load
        if not synchronous and self._step_seconds:
            loaded += self._step_seconds.value
        ahead_tokens = self._tokens_ahead()
        computed = own_compute
        if ahead_tokens:
            computed += self._prefill_rate.seconds(ahead_tokens) or 0.0
        # Without the margin for the way back: an estimate near the border moves nothing.
        self._computes = computed * (1.0 if self._computes else MARGIN) < loaded
        return not self._computes or self._declined + 1 >= LOAD_EVERY

    def queued_seconds(self) -> float:
        """Return for how long the loads under way will yet take the link; 0 without any."""
        per_slot = self._load_rate.seconds(self._slot_bytes)
        return self._queue.seconds_ahead(per_slot, time.monotonic())

    def _tokens_ahead(self) -> int:
        """Return how many tokens of admitted prompts are not computed; they come first."""
        left = {tracked: tracked.prompt_tokens_left for tracked in self._prefilling}
        self._prefilling.difference_update([r for r, tokens in left.items() if tokens <= 1])
        return sum(tokens for tokens in left.values() if tokens > 1)


class LoadMode:
    """Decides by the time that loads take.

    `slot_bytes` are those of a slot on one rank. Where some rank cannot have compute wait for a
    load on its device, `allowed` is set to False. `overlaps` says that a load runs while the steps
    under way compute.
    """

    def __init__(self, slot_bytes: int, watch: StepWatch) -> None:
        self.allowed = True
        self.overlaps = False
        self._slot_bytes = slot_bytes
        self._watch = watch
        self.next_step()

    def next_step(self) -> None:
        """Forget what the step before computes and loads."""
        self._seconds = 0.0
        self._tokens = 0
        self._in_waves = True

    def is_synchronous(
        self, num_slots: int, tokens_left: int, *, idle: bool, queued_seconds: float
    ) -> bool:
        """Say whether one more load, of `num_slots`, delays this step by little enough.

        It leaves `tokens_left` of its request to be computed. `idle` says that no other request
        runs or is loaded. Loads planned before take the link for `queued_seconds` more.
        """
        if not self.allowed:
            return False
        limit, own = IDLE_SECONDS if idle else BUSY_SECONDS, self._load_seconds(num_slots)
        if self._seconds + own <= limit:
            return True
        forward = 0.0
        if self._in_waves and tokens_left:
            forward = self._watch.prompt_seconds(self._tokens + tokens_left)
        load = queued_seconds + own - self._hidden_seconds()
        delay = load - WAVES_SHARE * min(load, forward)
        return delay <= limit + BUSY_SHARE * forward

    def _hidden_seconds(self) -> float:
        """Return how much time loads have that start now until this step's forward could begin."""
        if not self.overlaps:
            return 0.0
        return max(0.0, TRUSTED_SHARE * self._watch.seconds_left() - START_SECONDS)

    def brings_last_slot(self, num_slots: int, *, idle: bool) -> bool:
        """Say whether a synchronous load of all tokens is better than one without the last slot.

        Beside others it is: a step in which everybody computes one token is the shortest there is.
        """
        if not idle:
            return True
        known = self._watch.decode_seconds
        decode = known.value if known else ASSUMED_DECODE_SECONDS
        return self._load_seconds(num_slots) + decode <= WHOLE_SECONDS

    def count(self, num_slots: int, tokens_left: int) -> None:
        """Count a request that this step computes: the slots of its synchronous load, if any.

        With a load that leaves no tokens, none of the step's loads arrives in waves.
        """
        self._seconds += self._load_seconds(num_slots)
        self._tokens += tokens_left
        self._in_waves = self._in_waves and tokens_left > 0

    def _load_seconds(self, num_slots: int) -> float:
        return self._watch.load_rate.seconds(num_slots * self._slot_bytes)
