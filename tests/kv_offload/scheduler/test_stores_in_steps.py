"""How much is stored beside what else the link and the engine do."""

from __future__ import annotations

import pytest
from kv_swap.engine import Direction
from vllm.v1.core.sched.interface import PauseState

from kv_offload.measurement import MIN_MEASUREMENTS
from kv_offload.scheduler.stores.budget import (
    MIN_HORIZON_SECONDS,
    SHARE_BESIDE_LOADS,
    StoreBudget,
)
from tests.support.beside_steps import report
from tests.support.played_cases import (
    BLOCK,
    OTHER,
    PROMPT,
    blocks,
    both_ways,
    clocked,
    forget,
    pinned,
    slow,
    store,
    stored_blocks,
)
from tests.support.played_engine import PlayedEngine


def test_stores_on_their_way_keep_to_what_the_link_moves_and_the_rest_follows():
    """Also of requests that have ended meanwhile; what was late is served as well."""
    engine = slow(3, blocks=60, max_num_batched_tokens=64)
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add(request_id, prompt, max_tokens=1)
    for step in range(200):
        if not engine.scheduler.has_requests():
            break
        engine.schedule()
        assert len(pinned(engine)) <= 3
        assert engine.offload.gauges()["waiting_slots"] <= 10
        engine.execute()
        if step % 3 == 2:
            engine.run_copies()
        engine.process()
    assert engine.totals["deferred_slots"] == 10 - 3
    assert engine.totals["stored_bytes"] == blocks(10)
    assert sum(n for name, n in engine.totals.items() if name.startswith("skipped")) == 0
    engine.check_rest()
    forget(engine)
    engine.serve("again", OTHER)
    assert engine.totals["hit_tokens"] == 20
    engine.check_rest()


def test_what_was_deferred_and_is_gone_meanwhile_is_not_stored():
    """Its blocks are free: others take them. Nothing wrong is kept, and the loss is counted."""
    engine = slow(1, blocks=8, max_model_len=28, max_num_batched_tokens=64)
    engine.add("gone", PROMPT, max_tokens=1)
    while not engine.answers:
        engine.step()
    assert engine.offload.gauges()["waiting_slots"] == 4
    engine.add("other", OTHER, max_tokens=4)
    while len(engine.answers.get("other", ())) < 4:
        engine.step()  # the one store does not end, and keeps its pin
    engine.run()
    assert engine.totals["skipped_moved_on"] > 0
    stored = engine.totals["stored_bytes"] // blocks(1)
    assert stored + engine.totals["skipped_moved_on"] == 5 + 6
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("grows", [False, True])
def test_a_paused_engine_with_one_free_block_comes_to_rest(grows):
    """What waits is looked at, and gone; or dropped, if the block is reserved for growth."""
    length = 28 if grows else 24
    max_tokens = length - 17
    engine = slow(1, blocks=length // 4 + 2, max_num_batched_tokens=64)

    def step() -> None:
        """Keep as many steps under way as the engine does; no copy ends."""
        engine.schedule()
        if len(engine.scheduled) == engine.max_steps_under_way:
            engine.execute()
            engine.process()

    engine.add("gone", PROMPT, max_tokens=1)
    while not engine.answers:
        step()
    engine.add("other", OTHER, max_tokens)
    while len(engine.answers.get("other", ())) < length - 23:
        step()
    assert engine.offload.gauges()["waiting_slots"] == 4
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(20):
        if not engine.scheduler.has_requests():
            break
        step()
        engine.run_copies()
    assert not engine.scheduler.has_requests(), "the engine does not come to rest"
    engine.finish_steps()
    assert engine.pool.get_num_free_blocks() == 1
    assert engine.offload.gauges()["waiting_slots"] == 0
    skipped = {"skipped_moved_on": 4} if not grows else {"skipped_no_budget": 4}
    assert {n: c for n, c in engine.totals.items() if n.startswith("skipped")} == skipped
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.rest()


def test_what_waits_is_kept_while_a_step_is_under_way(monkeypatch):
    """A step may schedule nothing although a request is about to end, which frees blocks."""
    engine = PlayedEngine(max_num_batched_tokens=64, async_scheduling=True)
    reserved = property(lambda _: 100 if len(engine.offload._requests) else 0)
    monkeypatch.setattr(StoreBudget, "reserved_blocks", reserved)  # nothing is left for stores
    engine.add("other", OTHER, max_tokens=3)
    engine.add("gone", PROMPT, max_tokens=1)
    empty_steps = 0
    while "other" not in engine.ended:
        output = engine.schedule()
        if engine.executed and not output.num_scheduled_tokens:
            empty_steps += 1
            assert not engine.offload.in_flight.pinned_blocks
            assert engine.offload.gauges()["waiting_slots"] > 0
        engine.execute()
        if len(engine.executed) == 2:
            engine.process()
    assert empty_steps > 0
    engine.run()
    assert "skipped_no_budget" not in engine.totals
    assert engine.offload.manager.slots_in_use > 0
    engine.check_rest()


@pytest.mark.parametrize("local_tokens", [0, 8])
@pytest.mark.parametrize("synchronous_loads", [False, True])
def test_what_was_loaded_is_not_looked_at_for_stores(monkeypatch, synchronous_loads, local_tokens):
    engine = PlayedEngine(synchronous_loads=synchronous_loads, max_num_batched_tokens=64)
    store(engine, PROMPT)
    if local_tokens:
        engine.serve("local", PROMPT[: local_tokens + 1], max_tokens=1)
    monkeypatch.setattr(
        "kv_offload.scheduler.stores.candidates.MAX_SLOTS_PER_STEP", local_tokens // BLOCK + 1
    )
    engine.add("a", [*PROMPT, *OTHER[:4]], max_tokens=2)
    planned = 0
    while "a" not in engine.answers:
        planned += len(stored_blocks(engine.step(copies=True)))
    assert planned == 1
    assert engine.totals["deferred_slots"] == 0
    engine.rest()


def test_stores_are_as_fast_as_on_the_slowest_rank():
    engine = clocked(lambda: 0.0, ranks=2, max_num_batched_tokens=64)
    slow = blocks(1) * 2.5 / MIN_HORIZON_SECONDS
    for _ in range(MIN_MEASUREMENTS):
        for rank, speed in enumerate((slow, 1e12)):  # which tell of one store in different steps
            report(engine, {}, rank, bytes_per_second={"store": speed})
    engine.add("a", PROMPT)
    assert len(stored_blocks(engine.step())) == 2
    engine.rest()


def test_loads_come_before_stores():
    now = iter(range(10_000))
    engine = clocked(lambda: next(now) * 0.01, blocks=60, max_num_batched_tokens=64)
    store(engine, PROMPT)
    engine.step(100)  # of 10 ms each
    # Two slots a step beside a long load.
    for _ in range(3):
        engine.offload.watch.store_rate.learn(blocks(1) * 2.5 / 0.01 / SHARE_BESIDE_LOADS)
        engine.offload.watch.load_rate.learn(blocks(1))
    engine.add("loads", PROMPT)
    engine.add("computes", OTHER * 3, max_tokens=12)
    planned = []
    for _ in range(4):
        output = engine.schedule()
        planned.append(len(stored_blocks(output)))
        engine.execute()
        engine.run_copies(Direction.STORE)
        engine.process()
    assert engine.offload.gauges()["running_loads"] == 1
    assert planned == [2, 2, 2, 2]
    engine.run_copies()
    engine.step(copies=True)
    assert engine.offload.gauges()["running_loads"] == 0
    assert len(stored_blocks(engine.step(copies=True))) > 2
    engine.rest()


@both_ways
def test_blocks_are_reserved_for_the_rest_of_a_prompt_and_for_answers():
    engine = PlayedEngine(max_num_batched_tokens=8, max_num_seqs=1)
    engine.add("a", PROMPT, max_tokens=8)
    budget = engine.offload._stores.budget
    reserved = []
    for _ in range(4):
        engine.step()
        reserved.append(budget.reserved_blocks)
    assert reserved == [4, 2, 0, 0], "13 and 5 tokens of the prompt were left"
    engine.step(5, copies=True)
    assert budget.reserved_blocks == 1, "the answer has filled a block"
    engine.rest()
