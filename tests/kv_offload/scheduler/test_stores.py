"""Which blocks are worth storing, and which are not stored any more."""

from __future__ import annotations

from itertools import product

import pytest

from kv_offload.cache.prefix import CacheGroup
from kv_offload.scheduler.stores import planner
from tests.support.beside_steps import held_tokens
from tests.support.played_cases import (
    BLOCK,
    FULL,
    OTHER,
    PROMPT,
    blocks,
    ends_of,
    narrow,
    pinned,
    slow,
    stored_blocks,
)
from tests.support.played_engine import PlayedEngine

SHORT = [[*block, 0] for block in product([0, 1], repeat=BLOCK)]
"""Prompts of one block and one token, each with another block."""


def skipped(engine: PlayedEngine) -> dict[str, float]:
    return {
        name.removeprefix("skipped_"): count
        for name, count in engine.totals.items()
        if name.startswith("skipped_") and count
    }


@pytest.fixture
def most_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_offload.scheduler.stores.candidates.MAX_SLOTS_PER_STEP", 3)


@pytest.mark.parametrize(("tokens", "stored"), [(BLOCK - 1, 2), (len(PROMPT), 10)])
def test_requests_that_fill_the_same_block_in_a_step_store_it_once(tokens, stored):
    engine = PlayedEngine(max_num_batched_tokens=64)
    for request_id, prompt in (("a", PROMPT), ("same", PROMPT), ("other", OTHER)):
        engine.add(request_id, prompt[:tokens])
    steps = [stored_blocks(engine.step(copies=True)) for _ in range(3)]
    assert sum(map(len, steps)) == stored
    assert len(set().union(*steps)) == stored
    engine.rest()


def test_what_host_memory_has_in_the_middle_of_a_prompt_is_not_stored_again():
    engine = PlayedEngine(max_num_batched_tokens=64)
    manager = engine.offload.manager
    request = engine.add("a", PROMPT, max_tokens=1)
    middle = manager.prepare_store(request.block_hashes[2:3])
    assert ends_of(engine, request, stored_blocks(engine.schedule())) == [4, 8, 16, 20]
    manager.complete_store(middle, ok=False)
    engine.rest()


@pytest.mark.usefixtures("most_slots")
def test_a_step_looks_at_a_bounded_number_of_slots():
    engine = PlayedEngine(max_num_batched_tokens=64)
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add(request_id, prompt[:17], max_tokens=5)
    assert [len(stored_blocks(engine.step(copies=True))) for _ in range(4)] == [3, 3, 2, 0]
    engine.run()
    engine.add("again", [*PROMPT[:16], *OTHER[:5]])  # host memory has four of its blocks
    planned = [len(stored_blocks(engine.step(copies=True))) for _ in range(2)]
    assert planned == [0, 1]
    engine.rest()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_many_decodes_that_fill_a_block_are_looked_at_together(monkeypatch, async_scheduling):
    """Each has other tokens and another length; what ends before its turn is stored then."""
    found = []
    for many in (4, 100):
        monkeypatch.setattr(planner, "MANY_RUNNING", many)
        engine = PlayedEngine(
            blocks=200,
            slots=200,
            max_num_batched_tokens=128,
            max_num_seqs=16,
            async_scheduling=async_scheduling,
        )
        for number, block in enumerate(SHORT):
            prompt = [*block, *([number % 2] * (number % BLOCK))]
            engine.add(f"{number}", prompt, max_tokens=9 + number % 3)
        engine.step(4, copies=True)  # the prompts
        stores = []
        while engine.scheduler.requests:
            stores.append(len(stored_blocks(engine.step(copies=True))))
        engine.run()
        stored = engine.offload.manager.readable_slots().keys()
        found.append(([*filter(None, stores)], set(stored)))
        engine.rest()
    (together, keys), (apart, same_keys) = found
    assert keys == same_keys
    assert len(together) < len(apart)
    assert max(together) > max(apart)


def test_decodes_that_go_on_do_not_wait_for_each_other_for_ever(monkeypatch):
    monkeypatch.setattr(planner, "MANY_RUNNING", 4)
    engine = PlayedEngine(blocks=200, slots=200, max_num_batched_tokens=128, max_num_seqs=16)
    for number, block in enumerate(SHORT):
        engine.add(f"{number}", [*block, *([0] * (number % BLOCK))], max_tokens=40)
    engine.step(2)
    requests = [*engine.scheduler.running]
    planned, left = 0, []
    for _ in range(8 * BLOCK):
        planned += len(stored_blocks(engine.step(copies=True)))
        left.append(sum(request.num_computed_tokens // BLOCK for request in requests) - planned)
    assert planned > 7 * len(SHORT)
    assert max(left) - min(left) <= len(SHORT) // 4
    engine.rest()


def test_leftovers_are_stored_before_what_a_running_request_keeps():
    engine = slow(2, max_num_batched_tokens=64)
    engine.add("gone", PROMPT, max_tokens=1)
    engine.step()
    left = set(range(1, 6)) - pinned(engine)
    engine.add("runs", OTHER, max_tokens=9)
    engine.step()
    engine.run_copies()
    engine.step(copies=True)
    assert pinned(engine) < left
    engine.rest()


def test_leftovers_of_several_groups_are_counted_by_slot():
    engine = slow(2, groups=(FULL, CacheGroup(1, 8)), max_num_batched_tokens=64)
    engine.add("a", PROMPT[:17], max_tokens=1)
    engine.step()
    assert engine.offload.gauges()["waiting_slots"] == 4 + 2 - 2
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(6)
    engine.check_rest()


def test_a_block_that_has_become_another_groups_is_not_stored():
    """Its KV is of the same tokens, and of other layers."""
    engine = slow(1, groups=(FULL, CacheGroup(1, BLOCK, 64)), max_num_batched_tokens=64)
    request = engine.add("a", PROMPT[:9], max_tokens=1)
    engine.step()
    waiting = [b for b in engine.pool.blocks if b.block_hash and b.block_id not in pinned(engine)]
    assert len(waiting) == 3
    for block in waiting:
        engine.pool.evict_blocks({block.block_id})
    first = [block for block in waiting if block.block_id <= 3][:1]
    engine.pool.cache_full_blocks(request, first, 0, 1, BLOCK, 1)
    engine.run()
    assert skipped(engine) == {"moved_on": 3}


def test_no_more_is_chosen_than_may_be_on_its_way_where_two_requests_share_a_block():
    engine = narrow(PlayedEngine(max_num_batched_tokens=64), 3)
    engine.add("a", PROMPT[:9], max_tokens=4)
    engine.add("b", [*PROMPT[:4], *OTHER[:13]], max_tokens=4)
    engine.step(2)
    assert len(pinned(engine)) == 3
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(3 + 4)
    engine.check_rest()


def test_the_oldest_leftovers_are_dropped_when_too_many_wait(monkeypatch):
    monkeypatch.setattr("kv_offload.scheduler.stores.candidates.MAX_BACKLOG_SLOTS", 5)
    engine = slow(1, max_num_batched_tokens=64)
    for first in (0, 1):
        engine.add(f"{first}", [first, *PROMPT[:16]], max_tokens=1)
    engine.step(2)
    assert engine.offload.gauges()["waiting_slots"] == 4
    engine.run()
    assert skipped(engine) == {"no_budget": 3}
    assert held_tokens(engine, [1, *PROMPT[:15]]) == 16
    engine.check_rest()


def test_where_every_slot_is_being_written_the_rest_is_not_stored():
    engine = PlayedEngine(slots=2, max_num_batched_tokens=64)
    engine.serve("a", PROMPT, max_tokens=1)
    assert held_tokens(engine, PROMPT) == 8
    assert skipped(engine) == {"pool_busy": 3}
    engine.check_rest()
