"""Replays of small traces whose hits can be counted by hand."""

from __future__ import annotations

import pytest

from kv_offload.errors import CapacityError
from kv_offload.simulation.replay import ReplayResult, infinite, replay
from kv_offload.simulation.trace import TraceRequest


def trace(*prompts: list[int]) -> list[TraceRequest]:
    return [TraceRequest(at, 16 * len(ids), 1, tuple(ids)) for at, ids in enumerate(prompts)]


def test_a_hit_ends_at_the_first_block_that_is_missing():
    # 4 and 5 take the tail's places, so the next request hits 2 blocks. With 3 stored again, 5 is
    # gone, and the last request hits 3 blocks.
    requests = trace([1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3])
    assert [replay(requests[:count], "lru", 4).hits for count in (1, 2, 3, 4)] == [0, 0, 2, 5]
    assert replay(requests, "lru", 4) == ReplayResult(blocks=11, hits=5, stored=6, evicted=2)


def test_a_trace_of_nothing_has_no_hits_and_a_cache_of_nothing_is_refused():
    assert replay([], "lru", 1).hit_ratio == 0
    assert replay(trace([]), "lru", 1) == ReplayResult()
    with pytest.raises(CapacityError, match="1 or more"):
        replay([], "lru", 0)


def test_unlimited_memory_keeps_every_block_once():
    requests = trace([1, 2], [1, 3], [1, 2, 3])
    assert infinite(requests) == ReplayResult(blocks=7, hits=4, stored=3)
