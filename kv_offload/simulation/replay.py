"""Replays a trace through the real cache manager: what a policy keeps in so much memory.

Each request loads its longest readable prefix and stores what is missing of its prompt. Both end at
once, and no GPU cache serves a part of it before. So the hits are those of host memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slots import Run
from kv_offload.simulation.trace import TraceRequest


@dataclass(slots=True)
class ReplayResult:
    """What a replay has counted, in blocks."""

    blocks: int = 0
    """Of all prompts."""
    hits: int = 0
    """Of them, those in the prefixes that were loaded."""
    stored: int = 0
    evicted: int = 0

    @property
    def hit_ratio(self) -> float:
        """Hits as a share of all blocks; 0 for a trace without blocks."""
        return self.hits / self.blocks if self.blocks else 0.0


class Replay:
    """One cache of `capacity` blocks, which requests go through one after the other.

    With `store_after_uses` a block is stored when it comes for that time and is not stored.
    """

    def __init__(self, policy: str, capacity: int, *, store_after_uses: int = 1) -> None:
        """Raises `CapacityError` for a capacity below 1."""
        self.manager = CacheManager(make_policy(policy, capacity))
        self.result = ReplayResult()
        self._store_after_uses = store_after_uses
        self._uses: dict[int, int] = {}

    def serve(self, request: TraceRequest) -> int:
        """Serve one request; return how many of its blocks were loaded."""
        manager, keys = self.manager, list(request.hash_ids)
        slots = manager.find(keys)
        missing = slots < 0
        hits = int(missing.argmax()) if missing.any() else len(keys)
        if hits:
            manager.complete_load(manager.prepare_load(keys[:hits]))
        new = self._worth_storing([keys[index] for index in np.flatnonzero(missing).tolist()])
        along = slots[hits:]
        along = along[along >= 0]
        if new or len(along):
            run = Run(len(new), request.input_length, behind=keys[hits - 1] if hits else None)
            stored, _ = manager.offer(new, [run], along)
            manager.complete_store(stored)
        result = self.result
        result.blocks += len(keys)
        result.hits += hits
        result.stored, result.evicted = manager.stored_slots, manager.evictions
        return hits

    def _worth_storing(self, keys: list[int]) -> list[int]:
        """Return those of keys without a slot that have come often enough."""
        least, uses = self._store_after_uses, self._uses
        if least == 1:
            return keys
        for key in keys:
            uses[key] = uses.get(key, 0) + 1
        return [key for key in keys if uses[key] >= least]


def replay(
    requests: Iterable[TraceRequest], policy: str, capacity: int, *, store_after_uses: int = 1
) -> ReplayResult:
    """Replay a whole trace, and return what it counted. Raises `CapacityError`."""
    cache = Replay(policy, capacity, store_after_uses=store_after_uses)
    for request in requests:
        cache.serve(request)
    return cache.result
