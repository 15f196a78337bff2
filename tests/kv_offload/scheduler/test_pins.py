"""Blocks that stores pin: preemption, resets and drains, under vLLM's own scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.engines.vllm.drain import drain_engine_core
from kv_offload.engines.vllm.versions import reports_failed_requests, vllm_version
from kv_offload.scheduler.stores.budget import StoreBudget
from tests.support.played_cases import OTHER, PROMPT, both_ways, pinned
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.filterwarnings("default")

NEWER = reports_failed_requests(vllm_version())


@pytest.mark.skipif(not NEWER, reason="this vLLM does not ask whether blocks are about to be free")
def test_the_engine_waits_for_a_store_rather_than_preempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreBudget, "reserved_blocks", 0)
    engine = PlayedEngine(blocks=14, max_model_len=48, plugin={"max_pinned_share": 1.0})
    engine.add("gone", PROMPT, max_tokens=1)
    engine.step(3)
    assert len(pinned(engine)) == 5
    engine.add("older", OTHER[:14], max_tokens=20)
    engine.add("younger", [1, *OTHER[:11]], max_tokens=4)
    waited = 0
    for _ in range(12):
        waited += not engine.step().num_scheduled_tokens
    assert waited > 0
    assert engine.connector.has_pending_block_frees()
    assert all(r.num_preemptions == 0 for r in engine.scheduler.requests.values())
    engine.run_copies()
    engine.step(2)
    assert not engine.connector.has_pending_block_frees()
    engine.rest()


def test_pins_keep_to_their_share_when_a_request_ends() -> None:
    engine = PlayedEngine(
        blocks=17, max_model_len=64, max_num_batched_tokens=32, plugin={"max_pinned_share": 0.5}
    )
    engine.add("a", (PROMPT * 3)[:60], max_tokens=1)
    for _ in range(4):
        engine.step()
        assert len(pinned(engine)) <= 0.5 * (engine.pool.num_gpu_blocks - 1)


@pytest.mark.parametrize("end", ["reported", "drained"])
def test_a_reset_fails_while_a_block_is_pinned(end: str) -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.scheduler.reset_prefix_cache() is False
    if end == "reported":
        engine.run()
    else:
        drain_engine_core(engine.core)
    assert engine.scheduler.reset_prefix_cache() is True
    assert engine.offload.manager.slots_in_use == 5
    engine.rest()


def test_a_reset_of_the_connector_forgets_host_memory_and_what_is_on_its_way() -> None:
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


def test_running_requests_survive_a_reset() -> None:
    engine = PlayedEngine()
    engine.add("a", PROMPT, max_tokens=8)
    engine.step(3)
    assert engine.reset(reset_running_requests=True)
    engine.rest()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_drain_that_takes_too_long_gives_the_stores_up(ranks: int) -> None:
    engine = PlayedEngine(ranks=ranks)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(3)
    engine.ranks[-1].copies.stuck = True
    assert engine.reset()
    assert engine.offload.manager.slots_in_use == 5
    engine.ranks[-1].copies.stuck = False
    engine.serve("again", PROMPT)
    assert engine.totals["hit_tokens"] == 0
    engine.check_rest()


@both_ways
def test_a_drain_reaches_stores_that_no_rank_has_seen(async_scheduling: bool) -> None:
    """Those of a request that has just ended, and those of a step that is under way."""
    engine = PlayedEngine(
        async_scheduling=async_scheduling, blocks=14, plugin={"max_pinned_share": 0.4}
    )
    engine.add("a", PROMPT, max_tokens=6)
    for _ in range(engine.max_steps_under_way):
        engine.schedule()
    sent = pinned(engine)
    engine.abort("a")
    assert pinned(engine) > sent > set()
    drain_engine_core(engine.core)
    engine.check_pins()
    assert pinned(engine) == set()
    engine.check_host_memory()
    engine.rest()


def test_a_report_that_a_drain_has_delivered_may_arrive_again() -> None:
    engine = PlayedEngine(ranks=2)
    engine.add("a", PROMPT, max_tokens=1)
    engine.step(2)
    engine.run_copies()
    engine.schedule()
    engine.execute()  # both ranks' reports are on their way
    drain_engine_core(engine.core)
    assert pinned(engine) == set()
    engine.process()
    engine.check_pins()
    engine.run()
    assert engine.offload.manager.slots_in_use == 5
    engine.check_rest()
