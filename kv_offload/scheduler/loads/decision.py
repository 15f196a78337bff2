"""Decides how a hit is served: loaded before its step, loaded while others run, or computed.

An asynchronous load runs while other requests are computed, but its own request joins a step only
after the scheduler has learned that the load ended: at least one step late, and a step is longer
than a small load while others decode. For a synchronous load the GPU, not the host, waits in the
step that admits the request, and all requests of that step wait too. So a load is synchronous if
the delay is worth it: almost none while others run, more while none does. Only part of the load is
a delay: it can run while earlier steps compute, and its waves arrive while earlier layers compute,
which takes long in a step that computes prompts.

The functions are pure. Their values are expected times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BUSY_SECONDS = 0.0005
"""Delay that a step's synchronous loads may cause to running requests: a tenth of a token's time.

With 0.003, tokens of 16 decodes were 8.8 ms apart at p99 next to synchronous loads of 1.3 ms, and
5.9 ms with a connector that loads asynchronously (32 layers with one KV head, on an H200,
22 Nov 2026)."""

BUSY_SHARE = 0.25
"""Further delay, as a share of the time that the step spends on prompts: its tokens are late
already, and the request would otherwise wait for at least one step of that length. Without it most
loads of conversations miss their step (calculated by tests/kv_offload/test_conversations.py)."""

IDLE_SECONDS = 0.1
"""Delay that synchronous loads may cause while no other request runs: a request that arrives
meanwhile waits as long."""

WAVES_SHARE = 0.65
"""Share of a load that a forward of the same length hides: all but the largest wave, which has 0.3
of the load (see `worker/waves.py`), and a little less because copies slow each other."""

WHOLE_SECONDS = 0.017
"""A lone request loads all its tokens if the load and a decode step together take at most this.

Then one token is computed, as in a step of decodes: one CUDA graph, after the load. If the last
slot is left out, its tokens are computed, and the host launches their layers one by one while the
load arrives in waves. A long load hides that forward; up to this limit the host takes longest: 10
to 17 ms for 32 layers with vLLM 0.33 (H200s, 28 Nov 2026). The time to first token was 16 to 32 ms
without the last slot where load and decode took 15.5 ms, and 10.4 ms with it where they took
7.4 ms."""

MARGIN = 1.2
"""Computing must be faster by this factor: its estimate is optimistic for long prompts."""

MAX_COMPUTE_RATIO = 2.0
"""Computing may take at most this many times as long as the load, not counting its queue.

A queue of loads can make computing faster on any link. But computing takes the GPU from all
requests, and would relieve a link that is this much faster by a third at most."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of loading and of computing a hit.

    - `load`: this load alone.
    - `queued`: remaining time of the loads before it.
    - `hidden`: time until the step's forward could begin, in which a load delays nothing.
    - `beside`: the synchronous loads already in the step.
    - `forward`: the part of the step's forward that computes prompts, if loads arrive in waves.
    - `decode`, `step`: a step of decodes, and any step; 0 without evidence.
    - `compute`: the hit's tokens; None without evidence that they could be computed faster.
    - `ahead`: prompts that are computed first.
    - `idle`: True if no other request runs or is loaded.
    - `prefers_compute`: the last answer of `is_computed` that was not None.
    """

    load: float
    queued: float = 0.0
    hidden: float = 0.0
    beside: float = 0.0
    forward: float = 0.0
    decode: float = 0.0
    step: float = 0.0
    compute: float | None = None
    ahead: float = 0.0
    idle: bool = False
    prefers_compute: bool = False


class Decision(NamedTuple):
    """The part of a hit that is loaded: `tokens` after its start, up to `end_tokens`.

    If a synchronous load brings all tokens of a request, `tokens` is one less, since the engine
    must compute at least one. If `tokens` is 0, the hit is computed.
    """

    tokens: int
    end_tokens: int
    synchronous: bool


def is_synchronous(costs: Costs) -> bool:
    """Return whether one more load delays this step by an acceptable time."""
    limit = IDLE_SECONDS if costs.idle else BUSY_SECONDS
    if costs.beside + costs.load <= limit:
        return True
    load = costs.queued + costs.load - costs.hidden
    delay = load - WAVES_SHARE * min(load, costs.forward)
    return delay <= limit + BUSY_SHARE * costs.forward


def brings_last_slot(costs: Costs) -> bool:
    """Return whether a synchronous load of all tokens is better than one without the last slot.

    It is if other requests run: a step in which each request computes one token is the shortest.
    """
    return not costs.idle or costs.load + costs.decode <= WHOLE_SECONDS


def is_computed(costs: Costs, *, synchronous: bool) -> bool | None:
    """Return whether computing the hit is faster than loading it.

    None if the hit is loaded without a comparison. Only the change from loading to computing needs
    a margin, so estimates near the threshold do not flip the choice.
    """
    if costs.compute is None or costs.compute > MAX_COMPUTE_RATIO * costs.load:
        return None
    loaded = costs.queued + costs.load + (0.0 if synchronous else costs.step)
    computed = costs.compute + costs.ahead
    return computed * (1.0 if costs.prefers_compute else MARGIN) < loaded


def loaded_part(
    start: int, end: int, num_tokens: int, alignment_tokens: int, costs: Costs, *, synchronous: bool
) -> Decision:
    """Return the part to load of a hit from `start` to `end`, for a request of `num_tokens`."""
    if not synchronous or end < num_tokens:
        return Decision(end - start, end, synchronous)
    if brings_last_slot(costs):
        return Decision(end - start - 1, end, synchronous)
    return Decision(end - alignment_tokens - start, end - alignment_tokens, synchronous)
