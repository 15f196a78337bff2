"""Blocks that stores pin: how many, until when, and what gives them up."""

from __future__ import annotations

import pytest

from kv_offload.cache.prefix import CacheGroup
from tests.support.beside_steps import held_tokens
from tests.support.played_cases import OTHER, PROMPT, both_ways, pinned
from tests.support.played_engine import PlayedEngine


def storing(**arguments: object) -> PlayedEngine:
    engine = PlayedEngine(**arguments)
    engine.add("a", PROMPT, max_tokens=1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert len(pinned(engine)) == 5
    return engine


def test_a_block_is_idle_that_a_pin_alone_keeps():
    engine = PlayedEngine()
    engine.add("a", PROMPT)
    engine.step(2)
    assert pinned(engine)
    assert not engine.offload.in_flight.holds_idle_blocks, "the request would keep them anyway"
    engine.abort("a")
    assert engine.offload.in_flight.holds_idle_blocks
    engine.add("again", PROMPT)
    engine.step()
    assert not engine.offload.in_flight.holds_idle_blocks, "another request uses them now"
    engine.rest()


def test_unpinned_blocks_are_reused_after_all_others_and_the_tail_first():
    """A prefix without its tail is worth something, a tail without its prefix is not."""
    engine = storing(max_num_batched_tokens=64)
    engine.run()
    free = engine.pool.free_block_queue.get_all_free_blocks()
    assert [block.block_id for block in free[-5:]] == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("groups", [1, 2])
def test_pins_keep_to_their_share_of_the_gpu_blocks_and_the_rest_follows(share, groups):
    engine = PlayedEngine(
        [CacheGroup(0, 4), CacheGroup(1, 4, window_tokens=64)][:groups],
        blocks=2 + 15 * groups,
        slots=99,
        max_model_len=64,
        max_num_batched_tokens=32,
        plugin={"max_pinned_share": share},
    )
    usable = engine.pool.num_gpu_blocks - 1
    engine.add("a", (PROMPT * 3)[:60], max_tokens=1)
    most = 0
    for _ in range(4):
        engine.step()
        most = max(most, len(pinned(engine)))
    assert most == max(1, int(share * usable)) or share == 1.0
    assert most <= max(1, share * usable)
    engine.run()
    assert engine.totals["stored_slots"] == 15 * groups
    engine.check_rest()


def test_a_reset_of_the_connector_forgets_host_memory_and_what_is_on_its_way():
    engine = PlayedEngine()
    engine.serve("a", PROMPT, max_tokens=1)
    engine.add("b", OTHER, max_tokens=1)
    engine.step(3)
    assert len(pinned(engine)) > 0
    assert engine.reset(reset_connector=True)
    assert engine.offload.manager.slots_in_use == 0
    engine.serve("again", PROMPT)
    assert engine.totals["hit_tokens"] == 0
    engine.check_rest()


def test_running_requests_survive_a_reset():
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=8)
    engine.step(3)
    assert engine.reset(reset_running_requests=True)
    engine.rest()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drained", [False, True])
def test_a_store_that_takes_too_long_is_given_up(monkeypatch, ranks, drained):
    """Ranks may still write its slots: these stay taken, and nothing is stored meanwhile."""
    engine = storing(ranks=ranks)
    copies = engine.ranks[-1].copies
    copies.stuck = True
    if drained:
        assert engine.reset()
    else:
        engine.step()
        assert len(pinned(engine)) == 5
        monkeypatch.setattr("kv_offload.scheduler.stores.planner.MAX_STORE_SECONDS", 0.0)
    engine.add("b", OTHER)
    engine.step(2)
    assert pinned(engine) == set()
    assert engine.offload.manager.slots_in_use == 5
    gauges = engine.offload.gauges()
    assert (gauges["running_stores"], gauges["oldest_copy_seconds"] > 0) == (2, True)
    monkeypatch.undo()
    copies.stuck = False
    engine.run()
    assert (held_tokens(engine, PROMPT), held_tokens(engine, OTHER)) == (0, 20)
    assert engine.totals["skipped_copy_failed"] == 5
    engine.check_rest()


@both_ways
def test_no_store_is_given_up_because_the_engine_made_no_step(now):
    """The last ones of an engine in its user's process are submitted when he asks again."""
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(2)
    assert len(pinned(engine)) == 5
    assert not engine.scheduler.has_unfinished_requests()
    now[0] += 3600
    engine.add("b", OTHER, max_tokens=1)
    engine.run()
    assert (held_tokens(engine, PROMPT), held_tokens(engine, OTHER)) == (20, 20)
    assert engine.totals["skipped_copy_failed"] == 0


@both_ways
def test_a_drain_reaches_stores_that_no_rank_has_seen(monkeypatch):
    """Those of a request that has just ended, and those of a step that is under way."""
    monkeypatch.setattr("kv_offload.scheduler.stores.candidates.MAX_SLOTS_PER_STEP", 2)
    engine = PlayedEngine(blocks=14)
    engine.add("a", PROMPT, max_tokens=6)
    for _ in range(engine.max_steps_under_way):
        engine.schedule()
    sent = pinned(engine)
    engine.abort("a")
    assert pinned(engine) > sent > set()
    engine.reset()
    engine.check_pins()
    assert pinned(engine) == set()
    engine.check_host_memory()
    engine.rest()
