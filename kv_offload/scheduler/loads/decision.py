"""Decides how a hit is served: loaded before its step, loaded while others run, or computed.

An asynchronous load runs while others are computed, but its request joins a step only after the
scheduler has learned of its end: at least one step late, and while others decode a step is longer
than a small load. The GPU waits for a synchronous load, not the host, in the very step that admits
its request; all requests of that step wait with it. So a load is synchronous if it delays the step
by less than that is worth: next to nothing while others run, more while none does. Only a part of
the load is a delay. It may run while the steps before compute. Its waves arrive while the layers
before them compute, which takes long where the step computes prompts.

Pure functions of values, in seconds as expected now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BUSY_SECONDS = 0.0005
"""Delay that the synchronous loads of a step may cause to running requests: a tenth of a token.

With 0.003 the tokens of 16 decodes came 8.8 ms apart at p99 beside synchronous loads of 1.3 ms,
where 5.9 ms was seen of a connector that loads asynchronously (32 layers with one KV head, on an
H200, 22 Nov 2026)."""

BUSY_SHARE = 0.25
"""Further delay, as a share of the time for which the step computes prompts: its tokens are late
already, and the request would wait for one such step at least. Without it most loads of
conversations miss their step (calculated by tests/kv_offload/test_conversations.py)."""

IDLE_SECONDS = 0.1
"""Delay that they may cause where no other request runs: a request that arrives meanwhile waits for
as long."""

WAVES_SHARE = 0.65
"""Share of a load that a forward of the same length hides: all but the largest wave, which has 0.3
of the load (see `worker/waves.py`), and a little less because copies slow each other."""

WHOLE_SECONDS = 0.017
"""A lone request loads all its tokens if load and decode step together take at most this.

Then one token is computed, as in a step of decodes: one CUDA graph, after the load. Without the
last slot its tokens are computed, and the host starts their layers one by one while the load still
arrives in waves. That hides the forward behind a load that is long enough; but up to here it is the
host that takes longest. With vLLM 0.33 it took 10 to 17 ms for 32 layers (H200s, 28 Nov 2026): the
time to first token without the last slot was 16 to 32 ms where load and decode took 15.5, and with
it 10.4 where they took 7.4."""

MARGIN = 1.2
"""Computing must be faster by this factor: its estimate is optimistic for long prompts."""

MAX_COMPUTE_RATIO = 2.0
"""Computing may take this many times as long as the load, without those queued before it.

A queue of loads can make computing faster on any link. But it takes the device from all requests,
and it would relieve a link that is this much faster by a third at most."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of loading and of computing a hit.

    - `load`: this load alone.
    - `queued`: remaining time of the loads before it.
    - `hidden`: time until the step's forward could begin, in which a load delays nothing.
    - `beside`: the synchronous loads that the step has already.
    - `forward`: the part of the step's forward that computes prompts, if loads arrive in waves.
    - `decode`, `step`: a step of decodes, and any step; 0 without evidence.
    - `compute`: the hit's tokens; None without evidence that they could be computed faster.
    - `ahead`: prompts that are computed before.
    - `idle`: True if no other request runs or is loaded.
    - `prefers_compute`: the answer of `is_computed` that was compared last.
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

    The load ends one token later where a synchronous load brings all tokens of a request, since the
    engine must compute at least one. Without `tokens` the hit is computed.
    """

    tokens: int
    end_tokens: int
    synchronous: bool


def is_synchronous(costs: Costs) -> bool:
    """Return whether one more load delays this step by little enough."""
    limit = IDLE_SECONDS if costs.idle else BUSY_SECONDS
    if costs.beside + costs.load <= limit:
        return True
    load = costs.queued + costs.load - costs.hidden
    delay = load - WAVES_SHARE * min(load, costs.forward)
    return delay <= limit + BUSY_SHARE * costs.forward


def brings_last_slot(costs: Costs) -> bool:
    """Return whether a synchronous load of all tokens is better than one without the last slot.

    Beside others it is: a step in which every request computes one token is the shortest there is.
    """
    return not costs.idle or costs.load + costs.decode <= WHOLE_SECONDS


def is_computed(costs: Costs, *, synchronous: bool) -> bool | None:
    """Return whether computing the hit is faster than to load it.

    None if the two need not be compared: the hit is loaded. An estimate near the border changes
    nothing, since there is no margin for the way back.
    """
    if costs.compute is None or costs.compute > MAX_COMPUTE_RATIO * costs.load:
        return None
    loaded = costs.queued + costs.load + (0.0 if synchronous else costs.step)
    computed = costs.compute + costs.ahead
    return computed * (1.0 if costs.prefers_compute else MARGIN) < loaded


def loaded_part(
    start: int, end: int, num_tokens: int, alignment_tokens: int, costs: Costs, *, synchronous: bool
) -> Decision:
    """Return which part of a hit from `start` to `end` is loaded, of a request of `num_tokens`."""
    if not synchronous or end < num_tokens:
        return Decision(end - start, end, synchronous)
    if brings_last_slot(costs):
        return Decision(end - start - 1, end, synchronous)
    return Decision(end - alignment_tokens - start, end - alignment_tokens, synchronous)
