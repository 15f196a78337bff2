"""When a load runs: beside other steps, or in the step that admits its request.

An asynchronous load runs while others are computed, but its request joins a step only after the
scheduler has heard of its end: at least one step late, and while others decode a step is longer
than a small load. The GPU waits for a synchronous load, not the host, in the very step that admits
its request; all requests of that step wait with it. So a load is synchronous if it delays the step
by less than that is worth: next to nothing while others run, more while none does. Not all that a
load takes is a delay. It may run while the steps before compute. Its waves arrive while the layers
before them compute, which takes long where the step computes prompts.
"""

from __future__ import annotations

from kv_offload.scheduler.timing import StepWatch

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


class LoadMode:
    """Decides by the time that loads take.

    `block_bytes` are those of a block on one rank. `overlaps` says that a load runs while the steps
    under way compute.
    """

    def __init__(self, block_bytes: int, watch: StepWatch, *, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._block_bytes = block_bytes
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
        if not self._overlaps:
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
        return self._watch.load_rate.seconds(num_slots * self._block_bytes)
