"""An upper bound for every policy: eviction with knowledge of the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kv_offload.simulation.replay import ReplayResult, kept_prefix
from kv_offload.simulation.trace import TraceRequest

NEVER = 1 << 62
"""Next use of a block that is not used again."""


def belady(requests: Sequence[TraceRequest], capacity: int) -> ReplayResult:
    """Return the result of a cache of `capacity` blocks that evicts the block needed last.

    A block that is needed later than all others is not stored. Within a request, the tail is needed
    last. L. A. Belady, "A Study of Replacement Algorithms", IBM Systems Journal 1966.
    """
    coming = _next_uses(requests)
    result, kept = ReplayResult(), set[int]()
    next_use: dict[int, int] = {}
    latest: list[tuple[int, int]] = []  # (-next use, block), including stale entries
    for request, uses in zip(requests, coming, strict=True):
        result.blocks += len(request.hash_ids)
        result.hits += kept_prefix(request, kept)
        for block, use in zip(request.hash_ids, uses, strict=True):
            next_use[block] = use
            if block not in kept:
                if use == NEVER:
                    continue
                kept.add(block)
                result.stored += 1
            heapq.heappush(latest, (-use, block))
        while len(kept) > capacity:
            use, block = heapq.heappop(latest)
            if block in kept and next_use[block] == -use:
                kept.remove(block)
                result.evicted += 1
    return result


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """Return, per request, the next access to each of its blocks; accesses are numbered from 0."""
    at = sum(len(request.hash_ids) for request in requests)
    last_seen: dict[int, int] = {}
    found = []
    for request in reversed(requests):
        uses = [last_seen.get(block, NEVER) for block in request.hash_ids]
        at -= len(uses)
        last_seen.update(zip(request.hash_ids, range(at, at + len(uses)), strict=True))
        found.append(uses)
    return found[::-1]
