"""What ranks report of jobs: in any order, more than once, and before or after a drain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kv_offload.messages import OffloadWorkerMetadata, Outcome, RankReport
from kv_offload.scheduler.effects import Effects
from tests.support.beside_steps import held_tokens, report
from tests.support.hooks import raise_once
from tests.support.played_cases import OTHER, PROMPT, pinned, slow, start_load, store
from tests.support.played_engine import PlayedEngine

OK, FAILED, LOST = Outcome


def storing(prompt: Sequence[int] = PROMPT, ranks: int = 2) -> tuple[PlayedEngine, int]:
    """Return an engine whose ranks have copied a store of five blocks, unreported; and its job."""
    engine = PlayedEngine(ranks=ranks, max_num_batched_tokens=64)
    return engine, copy_stores(engine, "a", prompt)


def copy_stores(engine: PlayedEngine, request_id: str, prompt: Sequence[int]) -> int:
    """Compute a prompt, and have the ranks copy its blocks; return the job."""
    engine.add(request_id, prompt)
    (job,) = engine.step().kv_connector_metadata.stores
    engine.step()
    engine.run_copies()
    return int(job.job_id)


@pytest.mark.parametrize("rank", [0, 1])
def test_new_weights_are_known_before_slots_become_usable(rank):
    """Whichever rank tells of them: with a host pool these slots have blocks of the old weights."""
    engine = PlayedEngine(ranks=2, locked_slots=10)
    manager = engine.offload.manager
    loads = {rank: 1}
    news = {r: RankReport({}, ready_slots=30, weight_loads=loads.get(r)) for r in (0, 1)}
    usable_then = []
    reset = manager.reset
    manager.reset = lambda: (usable_then.append(manager.usable_slots), reset())
    engine.offload.apply_report(OffloadWorkerMetadata(news))
    assert (usable_then, manager.usable_slots) == ([10], 30)


@pytest.mark.parametrize("ranks", [(1, 0), (0, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_store_ends_when_its_last_rank_has_told_of_it(ranks, failing):
    """It is readable then, if it went well on all; its blocks are pinned until then."""
    engine, job = storing()
    sources = pinned(engine)
    told = set()
    for rank in ranks:
        before = len(told) < 2
        assert (pinned(engine) == sources) == before
        assert held_tokens(engine, PROMPT) == (0 if before or failing is not None else 20)
        report(engine, {job: FAILED if rank == failing else OK}, rank)
        told.add(rank)
        engine.check_pins()
    assert pinned(engine) == set()
    assert held_tokens(engine, PROMPT) == (20 if failing is None else 0)
    assert engine.offload.manager.slots_in_use == (5 if failing is None else 0)
    engine.rest()
    assert engine.totals["skipped_copy_failed"] == (0 if failing is None else 5)


def test_ranks_are_told_of_each_job_that_they_need_not_report_any_more():
    engine, job = storing()
    report(engine, {job: OK}, rank=0)
    assert engine.offload.plan_drain().acknowledged == ()
    report(engine, {job: OK}, rank=1)
    assert engine.offload.plan_drain().acknowledged == (job,)
    assert engine.offload.plan_drain().acknowledged == ()
    report(engine, {job: OK}, rank=0)  # was on its way
    assert engine.offload.plan_drain().acknowledged == (job,)
    report(engine, {77: FAILED}, rank=0)
    assert engine.schedule().kv_connector_metadata.acknowledged == (77,)
    engine.rest()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("outcome", [OK, FAILED])
def test_the_end_of_a_load_on_all_ranks_is_told_once(first, outcome):
    engine = store(PlayedEngine(ranks=2), PROMPT)
    start_load(engine)
    engine.run_copies()
    offload = engine.offload
    job = offload.plan_drain().next_job_id - 1
    report(engine, {job: outcome}, first)
    assert offload.take_effects() == Effects()
    report(engine, {job: OK}, 1 - first)
    failed = {"a"} if outcome is FAILED else set()
    assert offload.take_effects() == Effects(failed=failed, loaded={"a"})
    report(engine, {job: outcome}, first)
    assert offload.take_effects() == Effects()
    assert offload.gauges()["running_loads"] == 0
    offload.check_integrity()


@pytest.mark.parametrize("first", [0, 1])
def test_a_synchronous_load_keeps_its_slots_until_every_rank_has_told_of_it(first):
    engine = store(PlayedEngine(synchronous_loads=True, ranks=2), PROMPT)
    engine.add("second", PROMPT, max_tokens=1)
    (load,) = engine.schedule().kv_connector_metadata.loads
    manager = engine.offload.manager
    report(engine, {load.job_id: OK}, first)
    assert engine.offload.has_pending_work
    assert engine.offload.gauges()["oldest_copy_seconds"] > 0
    manager.reset()
    assert manager.slots_in_use == len(load.pairs), "a reset frees all slots but those of loads"
    for rank in (1 - first, 0, 1):
        report(engine, {load.job_id: OK}, rank)
        assert manager.slots_in_use == 0
    assert not engine.offload.has_pending_work
    assert engine.offload.take_effects() == Effects(), "the engine did not wait for it"


def test_an_error_at_the_end_of_a_job_keeps_no_other_from_ending():
    engine = PlayedEngine(max_num_batched_tokens=64)
    jobs = []
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.add(request_id, prompt)
        jobs += [job.job_id for job in engine.step().kv_connector_metadata.stores]
    engine.step()
    engine.run_copies()
    raise_once("manager.complete_store", engine.offload)
    report(engine, dict.fromkeys(jobs, OK))
    assert (held_tokens(engine, PROMPT), held_tokens(engine, OTHER)) == (0, 20)
    assert engine.offload.take_stats().data["hook_errors"] == 1


def losing() -> tuple[PlayedEngine, int, int]:
    """Return an engine with a store that is copied and a synchronous load; and both jobs."""
    engine = store(PlayedEngine(synchronous_loads=True, max_num_batched_tokens=64), PROMPT)
    stored = copy_stores(engine, "stores", OTHER)
    engine.add("a", PROMPT)
    (load,) = engine.schedule().kv_connector_metadata.loads
    return engine, stored, load.job_id


@pytest.mark.parametrize("order", ["before", "together", "after"])
@pytest.mark.parametrize("outcome", [OK, LOST])
def test_no_store_becomes_readable_that_had_not_ended_when_a_loss_was_heard_of(order, outcome):
    """One that ends in the same report is no exception; what was readable before stays."""
    engine, stored, load = losing()
    for told in {
        "before": ({stored: OK}, {load: outcome}),
        "together": ({stored: OK, load: outcome},),
        "after": ({load: outcome}, {stored: OK}),
    }[order]:
        report(engine, told)
        engine.offload.take_effects()  # the engine asks once for each report
    lost = outcome is LOST and order != "before"
    assert held_tokens(engine, OTHER) == (0 if lost else 20)
    assert held_tokens(engine, PROMPT) == 20
    assert not pinned(engine)


def test_a_store_that_is_planned_when_a_loss_is_heard_of_does_not_become_readable():
    """No step has sent it yet. Those that are planned later become readable."""
    engine = store(slow(1, synchronous_loads=True, max_num_batched_tokens=64), PROMPT)
    stored = copy_stores(engine, "stores", OTHER)
    engine.add("a", PROMPT)
    (load,) = engine.schedule().kv_connector_metadata.loads
    report(engine, {stored: OK})
    engine.abort("stores")
    assert (len(pinned(engine)), held_tokens(engine, OTHER)) == (1, 4)
    engine.model.may_lose_kv = True
    report(engine, {load.job_id: LOST})
    engine.run()
    assert (engine.ended["a"], held_tokens(engine, OTHER)) == ("error", 4)
    engine.serve("again", OTHER)
    assert held_tokens(engine, OTHER) == 20
    engine.check_rest()


def lost_between_steps() -> tuple[PlayedEngine, list[int]]:
    """Return an engine that has planned stores of lost blocks since a drain heard of the loss."""
    engine = PlayedEngine(synchronous_loads=True, async_scheduling=True, max_num_batched_tokens=64)
    store(engine, PROMPT)
    engine.model.may_lose_kv = True
    engine.add("a", PROMPT)
    (load,) = engine.schedule().kv_connector_metadata.loads
    report(engine, {load.job_id: LOST})
    engine.offload.resets.reset_cache()
    engine.add("b", PROMPT)
    stores = engine.schedule().kv_connector_metadata.stores
    assert stores
    return engine, [job.job_id for job in stores]


def test_what_is_planned_before_the_engine_knows_of_a_loss_does_not_become_readable():
    engine, stores = lost_between_steps()
    assert engine.offload.take_effects().tainted == {"a", "b"}
    report(engine, dict.fromkeys(stores, OK))
    assert held_tokens(engine, PROMPT) == 0


def test_what_ends_before_the_engine_knows_of_a_loss_does_not_become_readable():
    engine, _ = lost_between_steps()
    engine.execute()
    engine.execute()
    assert not engine.reset()
    engine.run()
    assert (engine.ended["a"], engine.ended["b"]) == ("error", "error")
    assert held_tokens(engine, PROMPT) == 0
    engine.check_rest()


@pytest.mark.parametrize("by", ["step", "poll", "drain"])
def test_a_loss_is_told_once_whoever_tells_of_it_first(by):
    """The rank tells of it until it is known. Here a store ends in the same report."""
    engine = PlayedEngine(synchronous_loads=True, beside=by == "poll", max_num_batched_tokens=64)
    store(engine, PROMPT)
    engine.model.may_lose_kv = True
    engine.ranks[0].copies.faults.update({"before_compute": 1, "load_now": 1})
    engine.add("stores", OTHER, max_tokens=8)
    engine.step()
    engine.add("a", PROMPT)
    engine.schedule()
    engine.execute()
    if by == "drain":
        engine.reset()
        assert not pinned(engine)
    engine.process()
    assert (engine.ended["a"], held_tokens(engine, OTHER)) == ("error", 0)
    engine.rest()
    assert engine.totals["lost_requests"] == 1
    engine.serve("again", PROMPT)
    assert len(engine.answers["again"]) == 4


def test_a_loss_on_several_ranks_is_told_once():
    engine = store(PlayedEngine(synchronous_loads=True, ranks=2), PROMPT)
    engine.add("a", PROMPT)
    (load,) = engine.schedule().kv_connector_metadata.loads
    for rank, lost in ((0, {"a"}), (0, None), (1, None)):
        report(engine, {load.job_id: LOST}, rank)
        assert engine.offload.take_effects() == Effects(tainted=lost), "it ends with an error"


def test_a_loss_of_an_aborted_request_leaves_the_next_of_its_name_known():
    """The engine ends requests by their names, and says so of those that it ends."""
    engine = store(PlayedEngine(synchronous_loads=True, max_num_batched_tokens=64), PROMPT)
    engine.add("a", PROMPT)
    (load,) = engine.schedule().kv_connector_metadata.loads
    engine.abort("a")
    engine.execute()
    engine.add("a", OTHER)
    engine.offload.match(engine.scheduler.requests["a"], 0)
    report(engine, {load.job_id: LOST})
    assert engine.offload.take_effects().tainted == {"a"}
    assert len(engine.offload._requests) == 1
    engine.offload.check_integrity()


def test_a_load_that_could_not_be_planned_ends_nobody_who_shares_none_of_its_blocks():
    engine = store(PlayedEngine(synchronous_loads=True, max_num_batched_tokens=64), PROMPT)
    engine.model.may_lose_kv = True
    engine.add("beside", OTHER, max_tokens=6)
    engine.step()
    raise_once("offload_scheduler.allocated", engine.connector)
    engine.add("a", PROMPT)
    engine.rest()
    assert (engine.ended["a"], engine.ended["beside"]) == ("error", "length")


def test_a_load_that_was_planned_before_an_error_is_planned_once(monkeypatch):
    engine = store(PlayedEngine(synchronous_loads=True), PROMPT)
    rate = engine.offload.watch.load_rate
    seconds, raised = rate.seconds, []

    def raise_behind_the_plan(nbytes: int) -> float:
        if engine.offload.gauges()["running_loads"] and not raised:
            raised.append(nbytes)
            raise RuntimeError("injected")
        return float(seconds(nbytes))

    monkeypatch.setattr(rate, "seconds", raise_behind_the_plan)
    engine.add("a", PROMPT)
    (load,) = engine.schedule().kv_connector_metadata.loads
    assert raised
    assert not load.incomplete
    engine.rest()


def test_after_a_step_that_was_cut_short_the_requests_with_blocks_end():
    """Not those that were admitted after a reset, and none of them twice."""
    engine = PlayedEngine(max_num_batched_tokens=64)
    engine.add("runs", PROMPT)
    aborted_step = engine.step().kv_connector_metadata.admissions
    engine.add("waits", OTHER)
    report(engine, {}, aborted_step=aborted_step)
    assert (engine.offload.take_effects().tainted, engine.offload.take_effects().tainted) == (
        {"runs"},
        None,
    )
    assert engine.reset(reset_running_requests=True)
    report(engine, {}, aborted_step=aborted_step)
    assert engine.offload.take_effects().tainted is None
    report(engine, {}, aborted_step=engine.step().kv_connector_metadata.admissions)
    assert engine.offload.take_effects().tainted == {"runs", "waits"}
