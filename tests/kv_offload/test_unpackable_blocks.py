"""Blocks that do not fit packed slots: their slots hold garbage and must never be announced."""

from __future__ import annotations

import logging

import pytest

from kv_offload.engines.vllm.actions import PAUSE_STORES, RESUME_STORES
from kv_offload.messages import Outcome
from kv_offload.scheduler.stores import refusals
from tests.support.beside_steps import held_tokens, report
from tests.support.played_cases import BLOCK, OTHER, PROMPT, both_ways, forget
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import answer

pytestmark = pytest.mark.engine


def serve_again(engine: PlayedEngine) -> None:
    """Serve `PROMPT`, as far as possible from host memory, to the end; check the answer."""
    assert engine.reset()
    engine.totals.clear()
    engine.serve("again", PROMPT)
    assert engine.answers["again"] == answer(PROMPT, 4)


@both_ways
@pytest.mark.parametrize("synchronous_loads", [False, True])
@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)], ids=str)
def test_a_block_that_some_rank_refuses_is_served_by_none(synchronous_loads, refusing):
    """The other blocks of its job are served; after each step host memory and routers are right."""
    engine = PlayedEngine(
        ranks=2, synchronous_loads=synchronous_loads, max_num_batched_tokens=64, events=True
    )
    engine.add("stored", PROMPT, max_tokens=1)
    (job,) = engine.schedule().kv_connector_metadata.stores
    (third,) = job.pairs[2:3, 0].tolist()
    for rank in refusing:
        engine.ranks[rank].copies.unpackable = {third}
    engine.run()
    assert engine.totals["skipped_unpackable"] == 1
    assert engine.totals["stored_slots"] == 4
    serve_again(engine)
    assert engine.totals["hit_tokens"] == 2 * BLOCK
    assert engine.totals["failed_loads"] == engine.totals["skipped_copy_failed"] == 0
    engine.rest()


@both_ways
@pytest.mark.parametrize("budget", [64, 4], ids=["at once", "block by block"])
def test_a_block_that_was_refused_is_tried_again_once_host_memory_is_emptied(budget):
    """The rest of its prompt is stored; `budget` is the number of tokens that a step computes."""
    engine = PlayedEngine(max_num_batched_tokens=budget)
    copies = engine.ranks[0].copies
    copies.unpackable = range(40)
    engine.serve("a", PROMPT[:9], 1)
    assert engine.totals["skipped_unpackable"] == 2
    assert engine.offload.manager.slots_in_use == 0
    copies.unpackable = ()
    serve_again(engine)
    stored = engine.offload.manager.slots_in_use
    assert stored >= 3
    serve_again(engine)
    assert engine.totals["hit_tokens"] == engine.totals["skipped_unpackable"] == 0
    assert engine.offload.manager.slots_in_use == stored
    engine.offload.resets.reset_cache()
    serve_again(engine)
    serve_again(engine)
    assert engine.totals["hit_tokens"] == 20


def test_one_block_that_many_prompts_begin_with_does_not_pause_stores(monkeypatch):
    """It is tried once; with every prompt it would soon be more than one block in a hundred."""
    monkeypatch.setattr(refusals, "TRIED_BLOCKS", 16)
    monkeypatch.setattr(refusals, "MAX_SHARE", 0.1)
    engine = PlayedEngine(max_num_batched_tokens=64)
    engine.add("first", PROMPT, 1)
    (job,) = engine.schedule().kv_connector_metadata.stores
    engine.ranks[0].copies.unpackable = job.pairs[:1, 0].tolist()
    engine.run()
    for number in range(8):
        bits = [int(bit) for bit in f"{number:03b}"]
        engine.serve(f"{number}", [*PROMPT[:8], *bits, *PROMPT[:10]], 1)
    assert engine.totals["skipped_unpackable"] == 1
    assert not engine.offload.gauges()["stores_paused"]
    assert engine.totals["stored_slots"] > 16
    engine.rest()


def test_rows_that_ranks_refuse_add_up_and_are_heard_of_again_in_vain():
    engine = PlayedEngine(ranks=2, max_num_batched_tokens=64)
    engine.add("a", PROMPT)
    (job,) = engine.step().kv_connector_metadata.stores
    engine.step()
    engine.run_copies()
    ok, name = {job.job_id: Outcome.OK}, job.job_id
    report(engine, ok, 0, failed_rows={name: (4,)})
    assert held_tokens(engine, PROMPT) == 0
    report(engine, ok, 0, failed_rows={name: (4,)})
    report(engine, ok, 1, failed_rows={name: (3,)})
    report(engine, ok, 1, failed_rows={name: (0,)})
    assert held_tokens(engine, PROMPT) == 3 * BLOCK
    assert engine.offload.manager.slots_in_use == 3
    assert engine.offload.take_stats().data["skipped_unpackable"] == 2
    engine.rest()


def test_where_too_many_blocks_are_refused_stores_are_paused(monkeypatch, caplog):
    """This is logged once, stored blocks are served, and resuming stores tries it again."""
    monkeypatch.setattr(refusals, "TRIED_BLOCKS", 8)
    engine = PlayedEngine(max_num_batched_tokens=64)
    # The first engine of a process connects the plugin's log to vLLM's.
    monkeypatch.setattr(logging.getLogger("kv_offload"), "propagate", True)
    engine.serve("a", PROMPT, 1)
    copies = engine.ranks[0].copies
    assert not engine.gauges["stores_paused"]
    copies.unpackable = range(40)
    engine.serve("b", OTHER, 1)
    assert caplog.text.count("50.0% of the recent blocks do not fit") == 1
    assert engine.gauges["stores_paused"]
    engine.serve("c", OTHER[1:], 1)
    assert engine.totals["skipped_unpackable"] == copies.happened["unpackable"] == 5
    assert engine.totals["skipped_paused"] > 0
    serve_again(engine)
    assert engine.totals["hit_tokens"] == 20
    engine.offload.pause_stores(paused=False)
    for request_id, prompt in (("d", OTHER), ("e", OTHER[::-1])):
        forget(engine)
        assert not engine.offload.gauges()["stores_paused"]
        engine.serve(request_id, prompt, 1)
        assert engine.totals["skipped_unpackable"] == 5
    assert caplog.text.count("stores are paused") == 2
    engine.rest()


@pytest.mark.parametrize("refused", [1, 2])
def test_few_refused_blocks_pause_nothing(monkeypatch, refused):
    monkeypatch.setattr(refusals, "MAX_SHARE", 0.2)
    monkeypatch.setattr(refusals, "TRIED_BLOCKS", 5)
    engine = PlayedEngine(max_num_batched_tokens=64)
    engine.add("a", PROMPT, 1)
    (job,) = engine.schedule().kv_connector_metadata.stores
    engine.ranks[0].copies.unpackable = job.pairs[:refused, 0].tolist()
    engine.rest()
    assert engine.offload.gauges()["stores_paused"] == (refused > 1)


def make_refusing(monkeypatch: pytest.MonkeyPatch) -> PlayedEngine:
    """Return an engine that paused stores because none of its blocks fitted; from now on all do."""
    monkeypatch.setattr(refusals, "TRIED_BLOCKS", 5)
    engine = PlayedEngine(max_num_batched_tokens=64)
    copies = engine.ranks[0].copies
    copies.unpackable = range(40)
    engine.serve("refused", PROMPT, 1)
    assert engine.gauges["stores_paused"]
    copies.unpackable = ()
    return engine


def give_weights(engine: PlayedEngine) -> None:
    """Give the model weights as a trainer does, and reset the prefix cache."""
    engine.core.collective_rpc("update_weights")
    assert engine.reset()


@both_ways
def test_new_weights_end_a_pause_because_of_refused_blocks(monkeypatch, caplog):
    engine = make_refusing(monkeypatch)
    monkeypatch.setattr(logging.getLogger("kv_offload"), "propagate", True)
    with caplog.at_level(logging.INFO, "kv_offload"):
        give_weights(engine)
    assert caplog.text.count("stores run again") == 1
    assert not engine.gauges["stores_paused"]
    engine.serve("new", PROMPT, 1)
    assert engine.reset()
    engine.totals.clear()
    engine.serve("again", PROMPT)
    assert engine.totals["hit_tokens"] == 20
    engine.rest()


@both_ways
def test_new_weights_do_not_inherit_what_was_counted(monkeypatch):
    monkeypatch.setattr(refusals, "TRIED_BLOCKS", 8)
    engine = PlayedEngine(max_num_batched_tokens=64)
    engine.ranks[0].copies.unpackable = range(40)
    engine.serve("old", PROMPT, 1)
    assert engine.totals["skipped_unpackable"] == 5
    engine.ranks[0].copies.unpackable = ()
    give_weights(engine)
    engine.serve("new", PROMPT, 1)
    engine.serve("newer", OTHER, 1)
    assert engine.totals["stored_slots"] == 10
    assert not engine.gauges["stores_paused"]
    engine.rest()


@both_ways
def test_a_pause_between_new_weights_and_the_reset_ends_with_the_reset(monkeypatch):
    """Until the reset, the engine's own cache serves blocks of the old weights."""
    engine = make_refusing(monkeypatch)
    engine.change_weights = lambda: None  # type: ignore[method-assign]
    engine.core.collective_rpc("update_weights")
    assert not engine.offload.gauges()["stores_paused"]
    engine.ranks[0].copies.unpackable = range(40)
    engine.serve("old cache", PROMPT, 1)
    assert engine.offload.gauges()["stores_paused"]
    engine.ranks[0].copies.unpackable = ()
    assert engine.reset()
    engine.serve("new", PROMPT, 1)
    engine.serve("newer", OTHER, 1)
    assert not engine.gauges["stores_paused"]
    assert engine.offload.manager.slots_in_use == 10
    engine.rest()


@both_ways
def test_a_reset_that_changes_no_weights_leaves_a_pause_because_of_refused_blocks(monkeypatch):
    engine = make_refusing(monkeypatch)
    assert engine.reset(reset_connector=True)
    engine.serve("again", PROMPT, 1)
    assert engine.gauges["stores_paused"]
    assert engine.offload.manager.slots_in_use == 0
    engine.rest()


@both_ways
@pytest.mark.parametrize("when", ["of itself", "over one because of refused blocks"])
def test_new_weights_do_not_end_a_pause_of_an_operator(monkeypatch, when):
    if when == "of itself":
        engine = PlayedEngine(max_num_batched_tokens=64)
    else:
        engine = make_refusing(monkeypatch)
    engine.core.collective_rpc(PAUSE_STORES)
    give_weights(engine)
    engine.serve("new", PROMPT, 1)
    assert engine.offload.gauges()["stores_paused"]
    assert engine.offload.manager.slots_in_use == 0
    engine.core.collective_rpc(RESUME_STORES)
    engine.serve("resumed", OTHER, 1)
    assert not engine.offload.gauges()["stores_paused"]
    assert engine.offload.manager.slots_in_use == 5
    engine.rest()


@both_ways
def test_many_good_blocks_do_not_put_a_pause_off(monkeypatch):
    """The share is of recent blocks: here about twenty, although two hundred were stored."""
    monkeypatch.setattr(refusals, "TRIED_BLOCKS", 10)
    monkeypatch.setattr(refusals, "RECENT_BLOCKS", 20)
    monkeypatch.setattr(refusals, "MAX_SHARE", 0.2)
    engine = PlayedEngine(max_num_batched_tokens=64)
    prompts = [[*(int(bit) for bit in f"{number:08b}"), *PROMPT[:12]] for number in range(42)]
    for number, prompt in enumerate(prompts[:40]):
        engine.serve(f"{number}", prompt, 1)
    assert engine.totals["stored_slots"] > 100
    engine.ranks[0].copies.unpackable = range(40)
    engine.serve("41", prompts[40], 1)
    engine.serve("42", prompts[41], 1)
    assert engine.gauges["stores_paused"]
    assert engine.totals["skipped_unpackable"] < 10
    engine.rest()
