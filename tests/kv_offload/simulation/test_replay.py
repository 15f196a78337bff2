"""Replays of small traces whose hits can be counted by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_offload.cache.policies import POLICIES
from kv_offload.errors import CapacityError
from kv_offload.simulation.bounds import belady, infinite
from kv_offload.simulation.replay import Replay, ReplayResult, replay
from kv_offload.simulation.trace import TraceRequest


def trace(*prompts: list[int]) -> list[TraceRequest]:
    return [TraceRequest(at, 16 * len(ids), 1, tuple(ids)) for at, ids in enumerate(prompts)]


def test_a_hit_ends_at_the_first_block_that_is_missing():
    cache = Replay("lru", 4)
    hits = [cache.serve(one) for one in trace([1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3])]
    # 4 and 5 took the tail's places; with 3 stored again, 5 is gone.
    assert hits == [0, 0, 2, 3]
    assert cache.result == ReplayResult(blocks=11, hits=5, stored=6, evicted=2)


def test_a_trace_of_nothing_has_no_hits_and_a_cache_of_nothing_is_refused():
    assert replay([], "lru", 1).hit_ratio == 0
    assert replay(trace([]), "lru", 1) == ReplayResult()
    with pytest.raises(CapacityError, match="1 or more"):
        Replay("lru", 0)


def test_belady_keeps_what_comes_back_first_and_stores_nothing_that_never_does():
    requests = trace([1], [2], [3], [2], [1])
    assert belady(requests, 1) == ReplayResult(blocks=5, hits=1, stored=2, evicted=1)
    assert belady(requests, 2).hits == 2


def random_trace(seed: int) -> list[TraceRequest]:
    """Conversations that grow by a block or two, of random ages."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(60):
        before = rng.choice(prompts[-6:]) if prompts and rng.random() < 0.7 else []
        new = [rng.randrange(10**6) for _ in range(rng.randrange(1, 3))]
        prompts.append(before + new)
    return trace(*prompts)


@given(seed=st.integers(0, 1000), capacity=st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_no_policy_exceeds_the_bounds(seed, capacity):
    requests = random_trace(seed)
    best, endless = belady(requests, capacity), infinite(requests)
    assert best.hits <= endless.hits
    for name in POLICIES:
        result = replay(requests, name, capacity)
        assert result.hits <= best.hits
        assert result.blocks == best.blocks
    assert replay(requests, "lru", 200).hits == belady(requests, 200).hits == endless.hits
