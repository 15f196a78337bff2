"""Blocks that another request wants while a copy uses them, with vLLM's own scheduler.

`Harsh` plays the worst timing that a device may choose: a step's results reach the KV cache only
after all of the step's hooks have run, every fresh block is filled with garbage before its first
use, and in its *eager* form a copy runs as soon as it is submitted.
"""

from __future__ import annotations

import pytest
from kv_swap.engine import Direction
from vllm.v1.request import RequestStatus

from tests.support.played_cases import (
    FULL,
    OTHER,
    PROMPT,
    WINDOW,
    both_runners,
    both_ways,
    harsh_engine,
    start_load,
    store,
)
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.usefixtures("beside")


@both_ways
@both_runners
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_a_store_reads_what_its_step_wrote_last(drafts, groups):
    """Also if a draft head writes last, long after the sampled tokens were copied."""
    engine = harsh_engine(groups, eager=True, drafts=drafts, ranks=2)
    engine.add("a", PROMPT, max_tokens=20)
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.totals["stored_bytes"] > 0
    assert engine.timing.poisoned_blocks > 0
    engine.check_rest()


@both_ways
@both_runners
def test_a_stored_block_is_not_overwritten_before_its_store_has_ended():
    """A request ends, and another takes every free block before the store is submitted."""
    engine = harsh_engine(blocks=12, max_model_len=44, plugin={"max_pinned_share": 1.0})
    engine.add("gone", PROMPT, max_tokens=1)
    while not engine.answers:
        engine.step()
    engine.add("other", OTHER, max_tokens=20)
    for _ in range(12):
        engine.step()
    engine.run_copies()
    engine.check_host_memory()
    engine.run()
    engine.check_host_memory()
    engine.check_rest()


def test_an_aborted_load_writes_into_nobodys_blocks():
    """Another request computes in all the blocks that it can get before the load copies."""
    engine = store(harsh_engine(blocks=14, max_model_len=48), PROMPT)
    start_load(engine, "gone")
    engine.abort("gone")
    engine.add("other", [*OTHER, *OTHER[:12]], max_tokens=8)
    engine.step(2)
    engine.run_copies(Direction.LOAD)
    engine.run()
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_overlapping_prefixes_may_be_loaded_side_by_side(monkeypatch, order):
    """A request that has waited too long loads for itself: same slots, other blocks, any order."""
    monkeypatch.setattr("kv_offload.scheduler.loads.lookups.MAX_WAIT_SECONDS", -1.0)
    longer = [*PROMPT[:16], 0, 0, 1, 0, 1]
    engine = store(harsh_engine(), PROMPT)
    store(engine, longer, "longer")
    engine.add("first", PROMPT)
    engine.add("second", longer)
    engine.step(4)
    copies = engine.ranks[0].copies
    assert [job.direction for job in copies.submitted] == [Direction.LOAD] * 2
    first, second = (job.pairs for job in copies.submitted)
    assert len(set(first[:, 1].tolist()) & set(second[:, 1].tolist())) == 4
    assert not set(first[:, 0].tolist()) & set(second[:, 0].tolist())
    manager = engine.offload.manager
    manager.check_integrity()
    for index in (order[0], 0):
        copies.run(index)
        engine.step(2)
        manager.check_integrity()
    engine.rest()


def test_slots_of_a_running_load_are_not_evicted_for_stores():
    """The pool has room for one prompt; another wants its slots while they are being read."""
    engine = store(harsh_engine(slots=5), PROMPT)
    engine.add("loads", PROMPT)
    engine.add("stores", OTHER, max_tokens=1)
    engine.step(4)
    engine.run_copies(Direction.STORE)
    engine.step(2)
    assert engine.offload.in_flight.loading == {"loads"}
    engine.run()
    assert engine.totals["skipped_pool_busy"] > 0
    engine.check_rest()


def test_ended_copies_are_heard_of_once_and_beside_before_their_report(beside):
    """Both end while the next step is launched, whose report then also names them."""
    engine = store(harsh_engine(async_scheduling=True), PROMPT)
    engine.add("decodes", OTHER, max_tokens=12)
    engine.schedule()
    engine.execute()
    start_load(engine, "loads")
    engine.run_copies()
    before = engine.offload.manager.stored_slots
    engine.step()
    assert (engine.offload.gauges()["running_loads"] == 0) == beside
    assert (engine.offload.manager.stored_slots > before) == beside
    assert ("loads" in engine.schedule().num_scheduled_tokens) == beside
    engine.run()
    assert not len(engine.offload._requests)
    engine.check_rest()


@both_ways
def test_a_load_that_is_heard_of_in_an_idle_step_does_not_wait_for_ever():
    """The scheduler asks its process's rank, which reports nothing in a step without a forward."""
    engine = store(harsh_engine(beside=True), PROMPT)
    start_load(engine)
    engine.finish_steps()
    engine.step()
    engine.schedule()
    engine.execute()
    engine.run_copies(Direction.LOAD)
    (_, result), *_ = engine.executed
    assert result.kv_connector_output is None
    engine.process()
    engine.rest()
    assert engine.totals["hit_tokens"] > 0


@both_ways
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reported", [0, 1, 2])
def test_a_reset_succeeds_after_requests_were_aborted_in_the_middle_of_a_load(ranks, reported):
    """As `LLM.sleep` does in one process: abort all, then reset everything that runs."""
    engine = store(harsh_engine(ranks=ranks), PROMPT)
    start_load(engine)
    for rank in engine.ranks[:reported]:
        rank.copies.run_all()
    if reported:
        engine.schedule()
        engine.execute()
    engine.abort("a")
    assert engine.reset(reset_running_requests=True)
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert engine.offload.gauges()["running_loads"] == 0
    engine.finish_steps()
    engine.serve("b", PROMPT)
    assert engine.totals["hit_tokens"] >= 20
    assert not len(engine.offload._requests)
    engine.check_rest()


@both_ways
@pytest.mark.parametrize("fails", [False, True])
def test_a_reset_frees_an_aborted_load_whose_end_an_earlier_one_heard(fails):
    """The first fails, because a request runs; meanwhile no step reports the end to the engine."""
    engine = store(harsh_engine(blocks=60), PROMPT)
    start_load(engine)
    engine.add("runs", OTHER, max_tokens=20)
    engine.step(2)
    engine.abort("a")
    engine.run_copies(Direction.LOAD, fail=fails)
    assert not engine.reset(reset_running_requests=False)
    assert engine.reset(reset_running_requests=True)
    engine.rest()


def reset_in_vain(engine: PlayedEngine) -> None:
    engine.ranks[0].copies.stuck = True
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        engine.reset(reset_running_requests=True)
    engine.ranks[0].copies.stuck = False


def test_a_load_that_outlives_a_reset_is_not_used():
    """The engine was to drop what the load brings, so its request is computed."""
    engine = store(harsh_engine(), PROMPT)
    request = start_load(engine)
    reset_in_vain(engine)
    engine.run_copies()
    engine.step()
    engine.offload.resets.reset_cache()  # otherwise it would be loaded again
    scheduled = engine.step().num_scheduled_tokens[request.request_id]
    assert scheduled > 1, "not the last token alone"
    engine.rest()


@both_ways
def test_loads_that_outlive_a_reset_keep_nobody_from_running():
    """Nor their own requests: the first needs most of the blocks, and is admitted once more."""
    texts = PROMPT, OTHER[:5], [1, 1, *OTHER[:7]]
    engine = harsh_engine((FULL, WINDOW), blocks=18, max_model_len=40, max_num_batched_tokens=64)
    for index, text in enumerate((PROMPT, OTHER, [1, 1, *OTHER[:19]])):
        store(engine, text, f"stored{index}")
    asked = [engine.add(f"r{index}", text) for index, text in enumerate(texts)]
    engine.step()
    assert {r.status for r in asked} == {RequestStatus.WAITING_FOR_REMOTE_KVS}
    reset_in_vain(engine)
    engine.rest()
    assert {engine.ended[r.request_id] for r in asked} == {"length"}
