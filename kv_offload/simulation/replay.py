"""Replays a trace through the real cache manager, to see which blocks a policy keeps.

Each request loads its longest readable prefix and stores the missing blocks of its prompt. Both
complete at once and no GPU cache serves any part first, so the hits are those of host memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kv_offload.simulation.mini_sim import MiniSim, SampledRequest
from kv_offload.simulation.trace import TraceRequest


@dataclass(slots=True)
class ReplayResult:
    """The counts of a replay, in blocks."""

    blocks: int = 0
    """Blocks of all prompts."""
    hits: int = 0
    """Blocks in loaded prefixes."""
    stored: int = 0
    evicted: int = 0

    @property
    def hit_ratio(self) -> float:
        """Hits as a share of all blocks; 0 for a trace without blocks."""
        return self.hits / self.blocks if self.blocks else 0.0


def replay(requests: Iterable[TraceRequest], policy: str, capacity: int) -> ReplayResult:
    """Return the result of a cache of `capacity` blocks.

    Raises `CapacityError` for a capacity below 1.
    """
    result, cache = ReplayResult(), MiniSim(policy, capacity)
    for request in requests:
        result.blocks += len(request.hash_ids)
        sampled = SampledRequest(request.hash_ids, prompt_tokens=request.input_length)
        result.hits += sum(cache.serve([sampled]))
    result.stored, result.evicted = cache.manager.stored_slots, cache.manager.evictions
    return result


def infinite(requests: Iterable[TraceRequest]) -> ReplayResult:
    """Return the result of a cache that keeps everything."""
    result, seen = ReplayResult(), set[int]()
    for request in requests:
        result.blocks += len(request.hash_ids)
        result.hits += kept_prefix(request, seen)
        seen.update(request.hash_ids)
    result.stored = len(seen)
    return result


def kept_prefix(request: TraceRequest, kept: set[int]) -> int:
    """Return the length of the request's longest kept prefix, in blocks."""
    for count, block in enumerate(request.hash_ids):
        if block not in kept:
            return count
    return len(request.hash_ids)
