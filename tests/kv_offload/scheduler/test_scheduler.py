"""What is stored of a prompt, and served later, under vLLM's own scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.engine.core import EngineShutdownState

from kv_offload.cache.prefix import CacheGroup
from tests.support.played_cases import (
    BLOCK,
    CHUNKS,
    FULL,
    OTHER,
    PROMPT,
    STATE,
    WINDOW,
    blocks,
    both_runners,
    both_ways,
    ends_of,
    forget,
    store,
    stored_blocks,
    tables,
)
from tests.support.played_engine import PlayedEngine


def steps_of(engine: PlayedEngine) -> Iterator[Any]:
    """Yield each step when it is planned, as many at once as may be under way, to the end."""
    while engine.scheduler.has_unfinished_requests():
        while engine.under_way < engine.max_steps_under_way:
            yield engine.schedule()
        engine.execute()
        engine.run_copies()
        engine.check_host_memory()
        engine.process()


@both_ways
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOW), (CacheGroup(0, BLOCK, 10),), (FULL, CHUNKS)]
)
@pytest.mark.parametrize("synchronous_loads", [False, True])
def test_a_prompt_is_stored_once_and_served_later(ranks, groups, synchronous_loads):
    engine = PlayedEngine(
        groups, ranks=ranks, synchronous_loads=synchronous_loads, plugin={"max_pinned_share": 1.0}
    )
    engine.serve("first", PROMPT)
    assert engine.totals["stored_bytes"] == blocks(24 // BLOCK * len(groups) * ranks)
    assert engine.totals["hit_tokens"] == 0
    forget(engine)
    engine.serve("second", PROMPT)
    assert engine.totals["hit_tokens"] == 20
    assert engine.totals["loaded_bytes"] > 0
    engine.check_rest()


def test_a_wrong_answer_is_found():
    """The control of all tests here: the engine compares every token with the model's own."""
    engine = PlayedEngine()
    engine.add("a", PROMPT)
    engine.expected["a"][1] ^= 1
    with pytest.raises(AssertionError, match="a: wrong answer"):
        engine.run()


def test_a_chunked_prefill_stores_what_each_step_computed():
    engine = PlayedEngine(max_num_batched_tokens=10)
    request = engine.add("a", PROMPT, max_tokens=1)
    ends = [ends_of(engine, request, stored_blocks(output)) for output in steps_of(engine)]
    assert ends == [[4, 8], [12, 16, 20], []]
    engine.rest()


def test_the_last_blocks_of_a_request_are_stored_after_its_end():
    """An idle engine goes on stepping until the last store is reported."""
    engine = PlayedEngine()
    engine.add("a", PROMPT[:7], max_tokens=2)
    engine.step(2, copies=True)
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.connector.has_pending_push_work()
    assert engine.scheduler.has_requests()
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(2)
    assert not engine.connector.has_pending_push_work()
    engine.check_rest()


def test_an_engine_that_ends_is_not_kept_for_stores():
    """Its core is a process of its own, which has the state; here the scheduler has it."""
    engine = PlayedEngine()
    engine.add("a", PROMPT)
    engine.step(3)
    assert engine.offload.in_flight.pinned_blocks
    assert engine.connector.has_pending_push_work()
    engine.scheduler.shutdown_state = EngineShutdownState.REQUESTED
    assert not engine.connector.has_pending_push_work()


@pytest.mark.parametrize(("store_blocks", "stored"), [("prompt", 5), ("all", 8)])
def test_prompts_are_stored_alone_if_the_user_wants_it(store_blocks, stored):
    engine = PlayedEngine(plugin={"store_blocks": store_blocks})
    engine.serve("a", PROMPT, max_tokens=12)
    assert engine.totals["stored_bytes"] == blocks(stored)
    engine.check_rest()


def test_a_request_that_skips_the_cache_loads_nothing_and_is_stored():
    engine = PlayedEngine()
    store(engine, PROMPT)
    engine.serve("a", [*PROMPT, *OTHER], skip_reading_prefix_cache=True)
    assert (engine.totals["hit_tokens"], engine.totals["lookup_tokens"]) == (0, 0)
    assert engine.totals["stored_bytes"] == blocks(6)
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("full", [(), (FULL,)], ids=["windows alone", "mixed"])
def test_what_vllm_does_not_name_of_a_window_is_not_counted_as_lost(full):
    """By default it names the window where a prompt ends: no hit can end anywhere else."""
    window = CacheGroup(len(full), BLOCK, 6, retention_tokens=0)
    engine = PlayedEngine((*full, window))
    prompt = PROMPT[:17]
    for request_id in ("first", "hit on the GPU"):
        engine.serve(request_id, prompt, max_tokens=1)
        assert engine.totals["stored_bytes"] == blocks(2 + 4 * len(full))
        assert engine.totals["skipped_moved_on"] == 0
    forget(engine)
    engine.serve("hit in host memory", prompt, max_tokens=1)
    assert engine.totals["hit_tokens"] == 16
    assert engine.totals["skipped_moved_on"] == 0
    engine.check_rest()


SHARED = [1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1]
"""Four blocks."""


@both_ways
@both_runners
@pytest.mark.parametrize("kind", [WINDOW, STATE], ids=["window", "state"])
def test_a_beginning_that_prompts_share_is_served_though_only_host_memory_has_it(kind):
    """vLLM keeps the window or state at its end where its own cache has the rest of it."""
    engine = PlayedEngine((FULL, dataclasses.replace(kind, retention_tokens=0)))
    hits = []
    for number, tail in enumerate([[1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 1]]):
        engine.serve(str(number), [*SHARED, *tail], max_tokens=1)
        hits.append(engine.totals["hit_tokens"])
        forget(engine)
    assert hits == [0, 0, 16]
    engine.check_rest()


def test_an_answer_that_is_shared_with_nobody_takes_no_window():
    """Of a conversation host memory has the end of the last prompt, and what was answered."""
    engine = PlayedEngine((FULL, dataclasses.replace(WINDOW, retention_tokens=0)))
    engine.serve("turn", PROMPT, max_tokens=10)
    text = [*PROMPT, *engine.answers["turn"]]
    forget(engine)
    session = engine.add("next", [*text, 1, 0, 1, 1, 0], max_tokens=1)
    engine.run()
    assert engine.totals["hit_tokens"] == 20
    assert session.shared_prefix_boundary == 0


def test_no_state_is_stored_before_its_block_is_full():
    """The block of the running state is written in place until a decode has filled it."""
    engine = PlayedEngine((FULL, STATE))
    request = engine.add("a", PROMPT[:9], max_tokens=12)
    planned = []
    states: list[int] = []
    while engine.scheduler.has_requests():
        output = engine.schedule()
        states += [] if request.is_finished() else tables(engine, request)[1][len(states) :]
        planned += [(states.index(b) + 1) * BLOCK for b in stored_blocks(output) if b in states]
        engine.execute()
        engine.run_copies()
        engine.check_host_memory()
        engine.process()
    assert planned == [8, 12, 16, 20]
    engine.rest()


def test_attention_without_its_state_is_no_local_hit():
    """Counted as one, it would have the engine compute from no state."""
    engine = PlayedEngine((FULL, STATE))
    engine.serve("first", PROMPT, max_tokens=1)
    states = [
        block.block_id
        for block in engine.pool.blocks
        if block.block_hash is not None and get_group_id(block.block_hash) == 1
    ]
    assert len(states) == 2
    engine.pool.evict_blocks(set(states))
    engine.offload.manager.reset()
    engine.add("second", PROMPT)
    engine.rest()


@both_ways
@pytest.mark.parametrize("accepted", [True, False])
def test_drafts_have_no_block_looked_at_before_it_has_a_name(accepted):
    """vLLM names blocks of several groups up to a common boundary of known tokens."""
    groups = (CacheGroup(0, 4), CacheGroup(1, 8, 12))
    engine = PlayedEngine(groups, drafts=3, blocks=60)
    engine.propose = engine.good_drafts if accepted else engine.bad_drafts
    engine.serve("a", PROMPT[:9], max_tokens=30)
    assert "skipped_moved_on" not in engine.totals
    assert engine.totals["stored_bytes"] == blocks(12)
    engine.check_rest()
