"""Failures of loads that a forward waits for, resets during loads, and hooks that raise.

With vLLM's plain and asynchronous schedulers, and as many steps in flight as they have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from kv_swap.engine import Direction
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kv_offload.cache.prefix import CacheGroup
from kv_offload.messages import OffloadWorkerMetadata, RankReport
from tests.support.hooks import HOOKS, raise_once
from tests.support.played_cases import (
    BLOCK,
    FULL,
    OTHER,
    PROMPT,
    WINDOW,
    both_ways,
    forget,
    pinned,
    start_load,
    store,
    tables,
)
from tests.support.played_engine import PlayedEngine
from tests.support.played_model import answer

pytestmark = pytest.mark.engine

MORE = [*PROMPT, *OTHER[:10]]
Holding = Callable[..., PlayedEngine]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def holding(request: pytest.FixtureRequest) -> Holding:
    """Makes engines whose host memory holds `PROMPT`, with either of vLLM's schedulers."""

    def make(**arguments: Any) -> PlayedEngine:
        return store(PlayedEngine(async_scheduling=request.param, **arguments), PROMPT)

    return make


def play(engine: PlayedEngine) -> None:
    """Run to the end; plan each step before the previous one's output is processed."""
    for _ in range(400):
        engine.schedule_all()
        while engine.scheduled:
            engine.execute()
        engine.run_copies()
        engine.process()
        assert engine.offload.watch.under_way == engine.under_way
        if not engine.scheduler.has_requests():
            engine.finish_steps()
            return
    raise AssertionError("the engine does not come to rest")


def play_to_rest(engine: PlayedEngine) -> None:
    play(engine)
    engine.check_rest()


def lose_next_load(engine: PlayedEngine, fault: str = "submit") -> None:
    """Make a load that a forward reads fail on the last rank, and its repair too."""
    engine.model.may_lose_kv = True
    engine.ranks[-1].copies.faults.update({fault: 1, "load_now": 1})


def check_lost(engine: PlayedEngine, *request_ids: str) -> None:
    for request_id in request_ids:
        ended = engine.ended[request_id], engine.answers.get(request_id, [])
        assert ended == ("error", []), request_id


def check_served(engine: PlayedEngine, prompt: list[int], max_tokens: int = 4) -> None:
    """Request a prompt after everything else; check the answer, and that nothing is left."""
    engine.add("again", prompt, max_tokens=max_tokens)
    play_to_rest(engine)
    assert engine.answers["again"] == answer(prompt, max_tokens)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", ["submit", "before_compute"])
def test_a_load_that_fails_before_the_forward_is_made_good(holding, ranks, fault):
    engine = holding(ranks=ranks, synchronous_loads=True)
    engine.ranks[-1].copies.faults[fault] = 1
    engine.add("a", PROMPT)
    play_to_rest(engine)
    assert engine.ranks[-1].copies.happened[fault] == 1
    assert engine.totals["hit_tokens"] == 20
    assert engine.totals["repaired_loads"] == 1
    assert engine.totals["lost_requests"] == engine.totals["failed_loads"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_cannot_be_made_good_ends_its_request_alone(holding, ranks):
    """Requests that share its blocks end too; nothing computed with them is served."""
    engine = holding(ranks=ranks, synchronous_loads=True, max_num_batched_tokens=64)
    lose_next_load(engine, "before_compute")
    engine.add("beside", OTHER, max_tokens=6)
    engine.add("a", MORE, max_tokens=6)
    engine.add("shares", [*PROMPT, 1, 1], max_tokens=6)
    play(engine)
    assert engine.ranks[-1].copies.happened["load_now"] == 1
    check_lost(engine, "a", "shares")
    assert engine.answers["beside"] == answer(OTHER, 6)
    assert engine.totals["lost_requests"] == 2
    engine.check_host_memory()
    check_served(engine, MORE, 6)


@pytest.mark.parametrize("then", ["abort", "reset", "join"])
def test_what_happens_before_the_loss_is_heard_of(holding, then):
    """The step with the loss has been executed, but its output is not processed yet."""
    engine = holding(synchronous_loads=True, max_num_batched_tokens=64)
    lose_next_load(engine)
    request = engine.add("a", MORE, max_tokens=6)
    engine.schedule()
    engine.execute()
    joins = then == "join" and engine.max_steps_under_way > 1
    if joins:
        # Hits in the engine's own cache what `a` has computed wrongly.
        engine.add("joins", MORE, max_tokens=3)
        output = engine.schedule()
        assert output.num_scheduled_tokens["joins"] < len(PROMPT)
        engine.execute()
        engine.run_copies()
    if then == "abort":
        engine.abort("a")  # plans stores of what it has computed
    if then == "reset":
        assert engine.reset(reset_running_requests=True)
        assert request.status == RequestStatus.PREEMPTED
    play(engine)
    engine.check_host_memory()
    if joins:
        check_lost(engine, "joins")
    assert engine.answers.get("a", []) in ([], answer(MORE, 6))
    check_served(forget(engine), MORE, 6)


@pytest.mark.parametrize("aborted", [False, True])
def test_who_shares_only_what_was_computed_with_lost_kv_ends_too(aborted):
    """It reads a window, and has none of the blocks that the load was to fill."""
    engine = PlayedEngine(
        (CacheGroup(0, BLOCK, 6),),
        async_scheduling=True,
        synchronous_loads=True,
        max_num_batched_tokens=64,
    )
    store(engine, PROMPT)
    lose_next_load(engine)
    request = engine.add("a", [*PROMPT, *OTHER[:19]], max_tokens=6)
    (load,) = engine.schedule().kv_connector_metadata.loads
    filled = {*load.pairs[:, 0].tolist()}
    engine.execute()
    joining = engine.add("joins", request.prompt_token_ids, max_tokens=3)
    assert engine.schedule().num_scheduled_tokens["joins"] <= BLOCK
    assert filled.isdisjoint(tables(engine, joining)[0])
    if aborted:
        engine.abort("a")
    play_to_rest(engine)
    check_lost(engine, "joins")
    assert engine.totals["lost_requests"] == 2 - aborted


def test_who_was_preempted_before_a_load_that_is_lost_goes_on():
    """The load gets blocks that the request had."""
    engine = PlayedEngine(
        async_scheduling=True, synchronous_loads=True, max_num_batched_tokens=64, blocks=14
    )
    store(engine, PROMPT)
    engine.add("beside", [0, 0, 1], max_tokens=40)
    preempted = engine.add("preempted", [1, 1, 0], max_tokens=40)
    had: set[int] = set()
    while preempted.status != RequestStatus.PREEMPTED:
        had.update(*tables(engine, preempted))
        engine.step(copies=True)
    engine.abort("beside")
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step(3, copies=True)  # ends the stores that the previous request leaves
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    lose_next_load(engine, "before_compute")
    request = engine.add("a", [*PROMPT, *OTHER], max_tokens=2)  # leaves no room for another
    engine.scheduler.waiting.remove_requests([request])
    engine.scheduler.waiting.prepend_request(request)
    (load,) = engine.schedule().kv_connector_metadata.loads
    assert had & {*load.pairs[:, 0].tolist()}
    assert preempted.status == RequestStatus.PREEMPTED
    play_to_rest(engine)
    assert engine.ended["a"] == "error"
    assert engine.totals["lost_requests"] == 1
    assert engine.answers["preempted"] == answer([1, 1, 0], 40)


@pytest.mark.parametrize("hook", ["offload_worker.report", "offload_scheduler.take_effects"])
def test_a_loss_is_told_though_a_hook_that_tells_of_it_fails(holding, hook):
    """If the requests that computed with lost KV are unknown, all requests of the step end."""
    engine = holding(synchronous_loads=True)
    lose_next_load(engine)
    raised = raise_once(hook, engine.connector, engine.ranks[0].connector)
    engine.add("a", PROMPT)
    play(engine)
    assert len(raised) == 1
    check_lost(engine, "a")
    check_served(engine, PROMPT)


def test_a_failed_load_is_not_taken_for_loaded_where_an_error_hides_its_failure(holding):
    engine = holding()
    request = start_load(engine)
    engine.run_copies(fail=True)
    raised = raise_once("offload_scheduler.take_effects", engine.connector)
    play_to_rest(engine)
    assert len(raised) == 1
    assert engine.answers["a"] == answer(PROMPT)
    assert engine.totals["failed_loads"] == 1
    assert request.num_output_tokens > 0


def test_a_failed_load_is_not_taken_for_loaded_where_the_engine_cannot_be_told(
    holding, monkeypatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the engine cannot be told")

    monkeypatch.setattr("kv_offload.engines.vllm.requests.report_failed", fail)
    engine = holding()
    engine.may_fail = True  # the other requests of that step end
    request = start_load(engine)
    engine.run_copies(fail=True)
    for number in range(3):
        engine.add(f"{number}", OTHER)
        engine.step(2)
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.answers.get("a", []) == []


@pytest.mark.parametrize("ended", ["not", "copied", "reported", "failed"])
@pytest.mark.parametrize("paused", [False, True])
def test_a_reset_in_the_middle_of_a_load_succeeds_and_its_request_goes_on(holding, ended, paused):
    engine = holding()
    request = start_load(engine)
    if paused:
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    if ended != "not":
        engine.run_copies(fail=ended == "failed")
    if ended == "reported":
        engine.step()
    before = engine.pool.num_gpu_blocks - 1
    if paused or request.status != RequestStatus.RUNNING:
        assert engine.reset(reset_running_requests=False)
        assert engine.pool.get_num_free_blocks() == before
    assert engine.reset(reset_running_requests=True, reset_connector=True)
    assert engine.pool.get_num_free_blocks() == before
    assert engine.offload.manager.slots_in_use == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    play_to_rest(engine)


@pytest.mark.parametrize("on_load_failure", ["recompute", "fail"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_that_failed_is_told_by_a_reset_that_leaves_its_request_waiting(
    holding, on_load_failure, ranks
):
    """Another request is running, so the reset fails and takes no blocks back."""
    engine = holding(plugin={"on_load_failure": on_load_failure}, ranks=ranks)
    engine.add("runs", OTHER, max_tokens=12)
    engine.step(2)
    start_load(engine)
    assert engine.offload.in_flight.pinned_blocks, "which the reset ends"
    engine.run_copies(Direction.LOAD, fail=True)
    assert not engine.reset()
    play_to_rest(engine)
    if on_load_failure == "recompute":
        assert engine.answers["a"] == answer(PROMPT)
    else:
        check_lost(engine, "a")


def test_a_load_that_failed_on_one_rank_and_hangs_on_another_counts_as_failed_after_a_reset(
    holding,
):
    """The reset cannot take its blocks back."""
    engine = holding(ranks=2)
    start_load(engine)
    engine.ranks[0].copies.run(fail=True)
    engine.ranks[1].copies.stuck = True
    assert not engine.reset()
    play(engine)
    assert engine.answers["a"] == answer(PROMPT)
    engine.ranks[1].copies.stuck = False
    engine.check_rest()


def test_a_second_load_that_ends_in_its_step_is_told_from_the_first(holding, monkeypatch):
    """The report of that step may still name the first, and names each request once."""
    engine = holding(ranks=2)
    start_load(engine)
    assert engine.reset(reset_running_requests=True)
    forward = engine.forward

    def copy_first(output: Any) -> Any:
        engine.run_copies(Direction.LOAD)
        return forward(output)

    monkeypatch.setattr(engine, "forward", copy_first)
    play_to_rest(engine)
    assert engine.answers["a"] == answer(PROMPT)


@pytest.mark.parametrize("preempted", [False, True])
def test_a_reset_succeeds_while_what_was_loaded_finds_no_room_to_run(holding, preempted):
    """The request has left the queue for loads, and holds the blocks that were loaded."""
    engine = holding(blocks=14, replaces_resumed=True)
    engine.add("grows", [1, 1, 1, 1], max_tokens=40)
    engine.step(2)
    request = engine.add("a", [*PROMPT, 1, 1, 1, 1, 1, 1, 1], max_tokens=2)
    request.num_preemptions += preempted  # such requests have another status when their turn comes
    while engine.pool.get_num_free_blocks() > 1:
        engine.step()
    engine.run_copies(Direction.LOAD)
    engine.step(2)
    assert request.status == (RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING)
    assert tables(engine, request) != [[]]
    assert engine.reset(reset_running_requests=True)
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    engine.offload.check_integrity()
    engine.rest()
    assert engine.answers["a"] == engine.expected["a"]
    assert engine.totals["hit_tokens"] >= 2 * 20


@both_ways
def test_loaded_requests_that_leave_each_other_no_room_run_one_after_the_other():
    """vLLM keeps too few blocks free for windows: the first needs six, and five are left."""
    groups = FULL, WINDOW, CacheGroup(2, BLOCK, 12)
    engine = PlayedEngine(groups, blocks=28, max_num_batched_tokens=6)
    first, second = [*PROMPT, 1, 0, 1, 0], [*OTHER, 1, 0, 1, 0]
    engine.serve("first", first, 1)
    engine.serve("second", second, 1)
    forget(engine)
    engine.add("a", [*first[:24], 1, 1, 1, 0, 1, 0, 0, 0])
    engine.add("b", [*second[:24], 1, 1, 1])
    play_to_rest(engine)
    assert [engine.ended[name] for name in "ab"] == ["length"] * 2
    assert engine.totals["hit_tokens"] == 3 * 24, "that which gave its blocks back loads again"


def test_a_loaded_request_gives_way_to_one_before_it(holding):
    """It holds blocks that a request of higher priority, ahead of it in the queue, needs."""
    engine = holding(blocks=14, scheduling_policy="priority")
    engine.add("low", [*PROMPT, 1, 0, 1], priority=1)
    engine.step()
    engine.add("high", [*OTHER, *OTHER[:9]], priority=0)
    play_to_rest(engine)
    assert [engine.ended[name] for name in ("low", "high")] == ["length"] * 2


def test_what_was_loaded_stays_where_another_is_preempted_for_it(holding):
    """vLLM admits no request in a step that preempts, so such a step runs nothing at all."""
    engine = holding(plugin={"store_blocks": "prompt"}, blocks=14)
    grows = engine.add("grows", [1, 1, 1, 1], max_tokens=40)
    engine.step(2, copies=True)
    request = engine.add("a", [*PROMPT, 1, 1, 1, 1, 1, 1, 1], max_tokens=2)
    while engine.pool.get_num_free_blocks() > 1:
        engine.step()
    while not grows.num_preemptions:
        output = engine.step(copies=True)
    assert not output.num_scheduled_tokens
    assert tables(engine, request) != [[]]
    play_to_rest(engine)


def test_while_an_engine_is_paused_what_was_loaded_stays(holding):
    engine = holding()
    request = start_load(engine)
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.step(4, copies=True)
    assert tables(engine, request) != [[]]
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    play_to_rest(engine)
    assert engine.totals["hit_tokens"] == 20, "once"


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_does_not_end_the_engine(holding, hook, synchronous):
    """Each hook raises once, at one of its calls while a stored prompt is requested."""
    counted = 0.0
    times = 0
    for when in (0, 1, 2, 3, 5, 8):
        engine = holding(synchronous_loads=synchronous)
        raised = raise_once(hook, engine.connector, engine.ranks[0].connector, when=when)
        engine.model.may_lose_kv = hook.endswith("allocated")
        engine.add("a", PROMPT)
        engine.add("b", OTHER)
        play_to_rest(engine)
        if not raised:
            break
        times += 1
        if engine.ended["a"] == "error":
            assert hook.endswith("allocated")
            assert synchronous
        else:
            assert engine.answers["a"] == answer(PROMPT)
        assert engine.answers["b"] == answer(OTHER)
        counted += engine.totals["hook_errors"]  # not if nothing reports any more
        assert pinned(engine) == set()
    assert times > 0, "it was never called"
    assert counted <= times
    assert counted or hook.endswith(("take_stats", "report")), "not counted"


def test_a_question_of_the_engine_that_raises_is_answered_with_no(holding):
    """Also for a reset, which must not count as done."""
    connector = holding().connector
    offload = connector.offload_scheduler
    error = mock.PropertyMock(side_effect=RuntimeError("injected"))
    with mock.patch.object(type(offload), "has_pending_work", error):
        assert connector.has_pending_push_work() is False
    with mock.patch.object(type(offload.in_flight), "holds_idle_blocks", error):
        assert connector.has_pending_block_frees() is False
    with mock.patch.object(offload.resets, "reset_cache", side_effect=RuntimeError("injected")):
        assert connector.reset_cache() is False
    assert connector.hook_errors.take() == 3


def test_a_load_that_could_not_be_planned_fails_its_request_where_failures_do(holding):
    """The engine expects the load. It ends the request, and nothing reads the empty blocks."""
    engine = holding(plugin={"on_load_failure": "fail"})
    raised = raise_once("offload_scheduler.allocated", engine.connector)
    engine.add("a", PROMPT)
    play_to_rest(engine)
    assert len(raised) == 1
    check_lost(engine, "a")


def test_who_shares_blocks_with_a_load_that_could_not_be_planned_ends_too(holding):
    engine = holding(synchronous_loads=True, max_num_batched_tokens=64)
    engine.model.may_lose_kv = True
    raise_once("offload_scheduler.allocated", engine.connector)
    engine.add("a", MORE)
    engine.add("shares", [*PROMPT, 1, 1])
    play(engine)
    check_lost(engine, "a", "shares")
    check_served(engine, MORE)


def test_an_error_in_reading_a_report_does_not_tell_of_a_load_twice():
    """A drain has reported a load to the engine, which dropped it; its report is in flight."""
    engine = store(PlayedEngine(async_scheduling=True, beside=False), PROMPT)
    request = engine.add("a", PROMPT)
    engine.schedule()
    engine.execute()  # submits the load
    engine.run_copies(Direction.LOAD)
    engine.schedule()
    engine.execute()  # its report names the load
    engine.abort("a")
    assert request.request_id in engine.scheduler.requests, "the load keeps its blocks"
    engine.reset()
    assert request.request_id not in engine.scheduler.requests
    engine.process()
    raise_once("offload_scheduler.apply_report", engine.connector)
    engine.process()
    engine.rest()
    assert engine.totals["hook_errors"] > 0


def test_an_error_in_what_was_measured_keeps_no_job_from_ending(monkeypatch):
    engine = PlayedEngine(beside=False)
    monkeypatch.setattr(engine.offload.watch.load_rate, "learn", lambda _speed: 1 / 0)
    report = RankReport(bytes_per_second={"load": 1.0})
    engine.offload.apply_report(OffloadWorkerMetadata({0: report}))
    check_served(engine, PROMPT)
    assert engine.totals["hook_errors"] == 1
