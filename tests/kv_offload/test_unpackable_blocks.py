"""Blocks that do not fit packed slots: their slots hold garbage, and nobody may hear of them."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.messages import Outcome
from kv_offload.scheduler.stores import planner
from tests.support.beside_steps import held_tokens, report
from tests.support.played_cases import BLOCK, OTHER, PROMPT, both_ways, forget
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import answer

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


def serve_again(engine: PlayedEngine) -> None:
    """Serve `PROMPT` from host memory, as far as that has it, to the end; check the answer."""
    assert engine.reset()
    engine.totals.clear()
    engine.serve("again", PROMPT)
    assert engine.answers["again"] == answer(PROMPT, 4)


@both_ways
@pytest.mark.parametrize("synchronous_loads", [False, True])
@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)], ids=str)
def test_a_block_that_some_rank_refuses_is_served_by_none(
    async_scheduling: bool, synchronous_loads: bool, refusing: tuple[int, ...]
) -> None:
    """The other blocks of its job are served; after each step host memory and routers are right."""
    engine = PlayedEngine(
        ranks=2,
        async_scheduling=async_scheduling,
        synchronous_loads=synchronous_loads,
        max_num_batched_tokens=64,
        events=True,
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
def test_a_block_that_was_refused_is_tried_again_once_host_memory_is_emptied(
    async_scheduling: bool, budget: int
) -> None:
    """What follows in its prompt is stored; `budget` is how many tokens a step computes."""
    engine = PlayedEngine(async_scheduling=async_scheduling, max_num_batched_tokens=budget)
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
    engine.offload.reset()
    serve_again(engine)
    serve_again(engine)
    assert engine.totals["hit_tokens"] == 20


def test_one_block_that_many_prompts_begin_with_does_not_pause_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried once; with every prompt it would soon be more than one block in a hundred."""
    monkeypatch.setattr(planner, "TRIED_BLOCKS", 16)
    monkeypatch.setattr(planner, "MAX_UNPACKABLE_SHARE", 0.1)
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


def test_rows_that_ranks_refuse_add_up_and_are_heard_of_again_in_vain() -> None:
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


def test_where_too_many_blocks_are_refused_stores_are_paused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, what is there is served, and who resumes them has it tried anew."""
    monkeypatch.setattr(planner, "TRIED_BLOCKS", 8)
    engine = PlayedEngine(max_num_batched_tokens=64)
    # The first engine of a process hands the plugin's log to vLLM's.
    monkeypatch.setattr(logging.getLogger("kv_offload"), "propagate", True)
    engine.serve("a", PROMPT, 1)
    copies = engine.ranks[0].copies
    assert not engine.gauges["stores_paused"]
    copies.unpackable = range(40)
    engine.serve("b", OTHER, 1)
    assert caplog.text.count("5 of 10 blocks do not fit packed slots, 50.0% where 1% may be") == 1
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
def test_few_refused_blocks_pause_nothing(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    monkeypatch.setattr(planner, "MAX_UNPACKABLE_SHARE", 0.2)
    monkeypatch.setattr(planner, "TRIED_BLOCKS", 5)
    engine = PlayedEngine(max_num_batched_tokens=64)
    engine.add("a", PROMPT, 1)
    (job,) = engine.schedule().kv_connector_metadata.stores
    engine.ranks[0].copies.unpackable = job.pairs[:refused, 0].tolist()
    engine.rest()
    assert engine.offload.gauges()["stores_paused"] == (refused > 1)
