"""How much is stored beside what else the link and the engine do."""

from __future__ import annotations

import pytest
from kv_swap.engine import Direction
from vllm.v1.core.sched.interface import PauseState

from kv_offload.scheduler.stores.budget import (
    HORIZON_STEPS,
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


def test_stores_recover_from_a_link_that_was_slow_for_long(monkeypatch):
    """As while the process was stopped. A single slow store changes nothing."""
    monkeypatch.setattr("kv_offload.worker.speeds.MEASURED_BYTES", blocks(2))
    engine = clocked(lambda: 0.0, max_num_batched_tokens=64)
    slow = 1.5 * blocks(1) / MIN_HORIZON_SECONDS
    planned = []
    for number in range(1, 30):
        engine.ranks[0].copies.bytes_per_second = slow if number < 25 else 100 * slow
        engine.add(f"{number}", [*map(int, f"{number:021b}"[::-1])], max_tokens=1)
        planned.append(len(stored_blocks(engine.step())))
        engine.run()
    assert planned[:2] == [5, 5]
    assert planned[24] == 1
    assert planned[-1] == 5
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
def test_a_paused_engine_with_one_free_block_comes_to_rest(async_scheduling, grows):
    """What waits is looked at, and gone; or dropped, if the block is reserved for growth."""
    length = 28 if grows else 24
    max_tokens = length - 17
    engine = slow(
        1, blocks=length // 4 + 2, max_num_batched_tokens=64, async_scheduling=async_scheduling
    )

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
    """Under asynchronous scheduling a step may schedule nothing and yet a request is about to end.

    What it frees lets the others' backlog be stored.
    """
    engine = PlayedEngine(max_num_batched_tokens=64, async_scheduling=True)
    reserved = property(lambda _: 100 if engine.offload.in_flight.num_requests else 0)
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


def test_a_running_request_goes_on_where_the_budget_ended():
    """In steps in which it gets no block too."""
    engine = slow(2, max_num_batched_tokens=64)
    engine.add("a", PROMPT[:17], max_tokens=3)
    assert [len(stored_blocks(engine.step())) for _ in range(2)] == [2, 0]
    engine.step(copies=True)
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(4)
    engine.check_rest()


@pytest.mark.parametrize("local_tokens", [0, 8])
@pytest.mark.parametrize("synchronous_loads", [False, True])
def test_what_was_loaded_is_not_looked_at_for_stores(monkeypatch, synchronous_loads, local_tokens):
    """Only what the GPU had before it, and what was computed behind it."""
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


def test_loads_come_before_stores():
    now = iter(range(10_000))
    engine = clocked(lambda: next(now) * 0.01, blocks=60, max_num_batched_tokens=64)
    store(engine, PROMPT)
    engine.step(100)  # of 10 ms each
    # Two slots a step beside a long load.
    report(engine, {}, store_bytes_per_second=blocks(1) * 2.5 / 0.01 / SHARE_BESIDE_LOADS)
    for _ in range(3):
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
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize(("usable_blocks", "start"), [(21, 20), (21, 23), (23, 26)])
def test_no_request_is_preempted_because_of_stores(
    monkeypatch, async_scheduling, reserve, usable_blocks, start
):
    """Two that run need nearly all blocks when a third ends, whose blocks are to be stored.

    Blocks stay free for those that run. Without that one of them is preempted: the control.
    """
    if not reserve:
        monkeypatch.setattr(StoreBudget, "reserved_blocks", 0)
    engine = PlayedEngine(
        blocks=usable_blocks + 1,
        max_model_len=64,
        max_num_seqs=3,
        async_scheduling=async_scheduling,
        plugin={"max_pinned_share": 1.0},
    )
    # Newer versions would wait for the stores rather than preempt.
    monkeypatch.setattr(engine.connector, "has_pending_block_frees", lambda: False, raising=False)
    grow = [
        engine.add("older", PROMPT[:8], max_tokens=32),
        engine.add("younger", [0, 0, *PROMPT[:6]], max_tokens=32),
    ]
    copies = engine.ranks[0].copies
    ends: dict[int, int] = {}
    for step in range(80):
        if step == start:
            engine.add("short", [1, 1, 1, *OTHER[:14]], max_tokens=1)
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.schedule()
        engine.execute()
        for job in list(copies.submitted):  # a store takes as long as the horizon allows
            if ends.setdefault(job.job_id, step + HORIZON_STEPS) == step:
                copies.run(copies.submitted.index(job))
        engine.process()
    assert len(engine.answers["short"]) == 1
    preempted = sum(request.num_preemptions for request in grow)
    assert (preempted == 0) == reserve
    engine.rest()


@both_ways
def test_blocks_are_reserved_for_the_rest_of_a_prompt_and_for_answers(
    async_scheduling: bool,
) -> None:
    engine = PlayedEngine(
        max_num_batched_tokens=8, async_scheduling=async_scheduling, max_num_seqs=1
    )
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
