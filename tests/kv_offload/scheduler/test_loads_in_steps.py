"""Loads on one and on two ranks, their ends, failures and sharing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kv_offload.messages import LoadJob
from tests.support.played_cases import (
    BLOCK,
    FULL,
    OTHER,
    PROMPT,
    STATE,
    WINDOW,
    blocks,
    both_ways,
    forget,
    store,
)
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import answer

WHOLE = PROMPT[:20]
"""Full blocks alone."""


def storing(prompt: Sequence[int], **arguments: Any) -> PlayedEngine:
    engine = PlayedEngine(**arguments)
    store(engine, prompt)
    return engine


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE)])
def test_models_with_several_groups_load_asynchronously(groups):
    """vLLM may take less than it was offered, or move states before the forward."""
    engine = storing(PROMPT, groups=groups, synchronous_loads=True)
    engine.add("second", PROMPT)
    (load,) = engine.schedule().kv_connector_metadata.loads
    assert not load.synchronous
    engine.rest()


def admit(engine: PlayedEngine, request_id: str) -> tuple[LoadJob, int]:
    """Step until a request is admitted; return its load and how many tokens are computed then."""
    jobs: list[LoadJob] = []
    for _ in range(10):
        output = engine.step(copies=True)
        jobs += output.kv_connector_metadata.loads
        if request_id in output.num_scheduled_tokens:
            (job,) = jobs
            return job, output.num_scheduled_tokens[request_id]
    raise AssertionError(f"{request_id} is not admitted")


@both_ways
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_tokens_are_loaded_and_the_last_one_is_computed_again(ranks, synchronous):
    engine = storing(WHOLE, ranks=ranks, synchronous_loads=synchronous)
    stored = engine.offload.manager.slots_in_use
    engine.add("a", WHOLE, max_tokens=2)
    job, tokens = admit(engine, "a")
    assert (job.whole, job.synchronous, len(job.pairs), tokens) == (True, synchronous, 5, 1)
    engine.run()
    assert engine.offload.manager.slots_in_use == stored, "nothing is stored a second time"
    engine.add("b", [*WHOLE, 0, 1], max_tokens=2)
    engine.rest()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_failed_load_is_recomputed_and_not_tried_again(groups, failing):
    engine = storing(PROMPT, groups=groups, ranks=2)
    engine.add("a", PROMPT)
    engine.step()
    for rank in failing:
        engine.ranks[rank].copies.run(fail=True)
    engine.step(2)
    engine.run_copies()
    engine.run()
    assert engine.totals["failed_loads"] == 1
    assert engine.observed["request_hit_tokens"] == [20], "tried once"
    engine.serve("b", PROMPT)
    assert engine.totals["failed_loads"] == 1
    forget(engine)
    engine.serve("c", PROMPT)
    assert engine.totals["hit_tokens"] == 20
    engine.check_rest()


def test_a_request_that_waited_and_does_not_fit_starves_nobody():
    """`long` waits for the load of `first`; meanwhile others load behind it and fill the pool."""
    engine = PlayedEngine(blocks=18, max_model_len=64, max_num_batched_tokens=64)
    third = [1, 1, *OTHER[:19]]
    for index, prompt in enumerate((PROMPT[:9], OTHER, third)):
        store(engine, prompt, f"stored{index}")
    engine.add("first", PROMPT[:9])
    engine.add("long", [*PROMPT[:8], *OTHER, *third], max_tokens=4)
    engine.add("other", OTHER)
    engine.add("third", third)
    engine.step()
    assert engine.offload.in_flight.loading >= {"first"}
    assert "long" not in engine.offload.in_flight.loading
    engine.run()
    assert len(engine.answers["long"]) == 4
    engine.check_rest()


@pytest.mark.parametrize("replaces_resumed", [False, True], ids=["runner V1", "runner V2"])
@both_ways
def test_a_resumed_request_is_followed_to_its_new_blocks(replaces_resumed):
    """Runner V1 hears of it among the cached requests, runner V2 among the new ones."""
    engine = PlayedEngine(blocks=16, max_model_len=48, replaces_resumed=replaces_resumed)
    requests = [
        engine.add("older", OTHER[:20], max_tokens=24),
        engine.add("younger", PROMPT[:16], max_tokens=20),
    ]
    for _ in range(200):
        if not engine.scheduler.has_unfinished_requests():
            break
        engine.step(copies=True)
        engine.check_pins()
    assert sum(request.num_preemptions for request in requests) > 0
    assert engine.answers == {"older": answer(OTHER[:20], 24), "younger": answer(PROMPT[:16], 20)}
    engine.run()
    assert engine.totals["stored_bytes"] == blocks(43 // BLOCK + 35 // BLOCK)
    engine.check_rest()


def load_many(count: int) -> PlayedEngine:
    """Return an engine that is asked for so many prompts that are in host memory alone."""
    engine = PlayedEngine()
    prompts = [[*map(int, f"{number:03b}"), *PROMPT[:14]] for number in range(count)]
    for number, prompt in enumerate(prompts):
        engine.serve(f"stored-{number}", prompt, max_tokens=1)
    forget(engine)
    for number, prompt in enumerate(prompts):
        engine.add(f"{number}", prompt, max_tokens=1)
    return engine


@both_ways
def test_requests_wait_without_blocks_where_many_loads_stand_in_line(monkeypatch):
    """One whose prompt is to be computed does not wait for them."""
    monkeypatch.setattr("kv_offload.scheduler.loads.admissions.MAX_LOADS", 2)
    engine = load_many(4)
    engine.add("new", [1] * 21, max_tokens=1)
    engine.step(3)
    loading = engine.offload.gauges()["running_loads"]
    assert (loading, engine.offload.in_flight.loading) == (2, {"0", "1"})
    assert engine.answers["new"]
    engine.run()
    assert engine.totals["hit_tokens"] == 4 * 16
    engine.check_rest()


@both_ways
def test_where_as_many_loads_hang_as_may_be_under_way_prompts_are_computed(monkeypatch):
    monkeypatch.setattr("kv_offload.scheduler.loads.admissions.MAX_LOADS", 1)
    engine = load_many(3)
    engine.step(3)
    assert not engine.answers.keys() & {"0", "1", "2"}, "one loads, the others wait for it"
    monkeypatch.setattr("kv_offload.scheduler.loads.admissions.MAX_WAIT_SECONDS", -1.0)
    engine.step(4)
    assert engine.answers.keys() & {"0", "1", "2"} == {"1", "2"}
    assert engine.totals["recomputed_tokens"] > 0, "their hits count as computed"
    engine.run()
    engine.check_rest()
