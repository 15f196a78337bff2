"""Figures, and the slots that the ranks have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kv_swap.engine import Direction

from kv_offload.messages import WorkerCapacity
from kv_offload.metrics import KINDS, OTHER_SIZES
from kv_offload.scheduler.statistics import GAUGE_SECONDS
from tests.support.beside_steps import report
from tests.support.manual_copies import ManualSwapEngine
from tests.support.played_cases import OTHER, PROMPT, blocks, forget, store
from tests.support.played_engine import PlayedEngine
from tests.support.remote_connector import multi_config


@pytest.fixture
def engine() -> PlayedEngine:
    """An engine at rest, which has computed and stored a prompt."""
    engine = PlayedEngine()
    engine.serve("a", PROMPT, max_tokens=1)
    return engine


OF_DISKS = {
    "peers",
    "leased_slots",
    "peer_slots",
    "has_remote",
    "tier_slots",
    "tier_slots_in_use",
    "tier_slots_set_aside",
    "disk_usable",
    "remote_usable",
    "promoting_slots",
    "demoting_slots",
    "oldest_move_seconds",
    "disk_read_bytes_per_second",
    "remote_read_bytes_per_second",
}
"""Gauges that an engine without a tier does not tell: they read 0."""


def test_figures_of_a_round_trip(engine):
    store_figures = {name: value for name, value in engine.totals.items() if value}
    assert store_figures.pop("stored_seconds") > 0
    assert store_figures == {"lookup_tokens": 21, "stored_bytes": blocks(5), "stored_slots": 5}
    forget(engine)
    engine.serve("b", PROMPT, max_tokens=1)
    load_figures = {name: value for name, value in engine.totals.items() if value}
    assert load_figures.pop("loaded_seconds") > 0
    assert {load_figures.pop(f"hit_tokens_at_{size}") for size in OTHER_SIZES} == {20}
    assert load_figures == {"lookup_tokens": 21, "hit_tokens": 20, "loaded_bytes": blocks(5)}
    assert engine.observed.pop("load_seconds") == [pytest.approx(engine.totals["loaded_seconds"])]
    assert engine.observed == {"load_bytes": [blocks(5)], "request_hit_tokens": [20]}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("synchronous", [False, True], ids=["asynchronous", "synchronous"])
def test_histograms_have_each_load_once(ranks, synchronous):
    """However many ranks copy it, and though the loads of one step arrive as one transfer."""
    engine = PlayedEngine(ranks=ranks, synchronous_loads=synchronous)
    for request_id, prompt in (("a", PROMPT), ("b", OTHER)):
        engine.serve(request_id, prompt, max_tokens=1)
    forget(engine)
    for request_id, prompt in (("c", PROMPT), ("d", OTHER)):
        engine.add(request_id, prompt, max_tokens=1)
    engine.run()
    assert engine.totals["synchronous_loads"] == 2 * synchronous
    assert sorted(engine.observed["request_hit_tokens"]) == [20, 20]
    assert engine.observed["load_bytes"] == [blocks(5), blocks(5)]
    assert engine.totals["loaded_bytes"] == ranks * blocks(10)
    assert len(engine.observed["load_seconds"]) == 2
    assert min(engine.observed["load_seconds"]) > 0


def test_a_load_that_failed_is_in_no_histogram_of_loads(engine):
    forget(engine)
    engine.add("b", PROMPT, max_tokens=1)
    engine.step(1)
    engine.run_copies(Direction.LOAD, fail=True)
    engine.run()
    assert engine.totals["failed_loads"] == 1
    assert engine.observed == {"request_hit_tokens": [20]}


@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.STORE])
def test_the_age_of_a_copy_that_hangs_grows_while_others_come_and_go(direction, now):
    """It hangs on one rank of two. The bytes that move do not show it."""
    engine = PlayedEngine(ranks=2)
    engine.serve("other", OTHER, max_tokens=1)
    if direction is Direction.LOAD:
        engine.serve("stored", PROMPT, max_tokens=1)
    forget(engine)
    now[0] += 1.0
    engine.add("hung", PROMPT, max_tokens=1)
    engine.step(2)
    first, second = (rank.copies for rank in engine.ranks)
    first.run_all()
    (hung,) = second.submitted
    assert hung.direction is direction
    for seconds in (1.0, 2.0, 3.0):
        now[0] += 1.0
        loaded = engine.totals["loaded_bytes"]
        engine.pool.evict_blocks({b.block_id for b in engine.pool.blocks if b.ref_cnt == 0})
        request_id = f"other after {seconds} s"
        engine.add(request_id, OTHER, max_tokens=1)
        while request_id not in engine.ended:
            engine.step()
            first.run_all()
            for job in second.submitted[1:]:
                second.run(second.submitted.index(job))
        assert second.submitted[0] is hung
        assert engine.totals["loaded_bytes"] >= loaded + 2 * blocks(5)
        assert engine.gauges["oldest_copy_seconds"] == seconds
    second.run_all()
    engine.run()
    assert engine.gauges["oldest_copy_seconds"] == 0
    engine.check_rest()


def test_an_engine_that_has_just_started_steps_until_it_has_told_its_pool():
    engine = PlayedEngine(slots=7)
    assert engine.scheduler.has_requests()
    engine.step()
    assert not engine.scheduler.has_requests()
    assert (engine.gauges["slots"], engine.gauges["pool_slots"]) == (7, 7)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "arguments", [{}, {"transfer_config": multi_config}], ids=["alone", "in a MultiConnector"]
)
def test_an_idle_engine_tells_that_a_reset_or_new_weights_emptied_host_memory(arguments, weights):
    engine = PlayedEngine(**arguments)
    engine.serve("a", PROMPT, max_tokens=1)
    assert engine.gauges["slots_in_use"] == 5
    if weights:
        engine.core.collective_rpc("update_weights")
        engine.hear()
    else:
        assert engine.reset(reset_connector=True)
    assert not engine.scheduler.has_requests(), "no step follows"
    assert engine.gauges["slots_in_use"] == 0
    engine.check_rest()


def test_an_engine_in_its_users_process_tells_with_its_next_step(engine):
    """A reset that changes no figure sends nothing."""
    core = engine.core
    assert core.reset_prefix_cache()
    assert core.output_queue.empty()
    del core.output_queue
    assert core.reset_prefix_cache(reset_connector=True)
    assert engine.gauges["slots_in_use"] == 5
    engine.step()
    assert engine.gauges["slots_in_use"] == 0


def test_a_front_end_that_cannot_be_told_fails_no_reset(engine, caplog, monkeypatch):
    def fail(**_: Any) -> None:
        raise TypeError("another version of vLLM")

    monkeypatch.setattr(engine.scheduler, "make_stats", fail)
    assert engine.reset(reset_connector=True)
    assert "metrics are not updated until the engine's next step" in caplog.text


def test_gauges_are_reported_now_and_then_while_requests_run_and_at_their_end(now):
    engine = PlayedEngine(slots=7)
    told = engine.offload.take_stats().data
    pool = {"slots": 7, "pool_slots": 7, "slot_bytes": blocks(1), "block_bytes": blocks(1)}
    assert {name: value for name, value in told.items() if value} == pool
    assert told.keys() == {name for name, kind in KINDS.items() if kind == "gauge"} - OF_DISKS
    assert engine.offload.take_stats() is None
    engine.add("a", PROMPT, max_tokens=2)
    engine.schedule()
    assert engine.offload.take_stats().data == {"lookup_tokens": 21}, "counters are at once"
    now[0] += GAUGE_SECONDS
    assert engine.offload.take_stats().data == {
        "slots_in_use": 4,
        "running_stores": 1,
        "oldest_copy_seconds": pytest.approx(GAUGE_SECONDS),
        "pinned_blocks": 4,
    }
    engine.run()
    assert engine.gauges == {
        "slots_in_use": 5,
        "running_stores": 0,
        "oldest_copy_seconds": 0.0,
        "pinned_blocks": 0,
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stored_slot_is_counted_once_however_many_ranks_store_it(ranks):
    """So that it can be compared with the evictions, which a full pool has as many of."""
    engine = PlayedEngine(ranks=ranks, slots=5)
    engine.serve("a", PROMPT, max_tokens=1)
    assert engine.totals["stored_bytes"] == ranks * blocks(5)
    assert (engine.totals["stored_slots"], engine.totals["evictions"]) == (5, 0)
    engine.serve("b", OTHER, max_tokens=1)
    assert (engine.totals["stored_slots"], engine.totals["evictions"]) == (10, 5)
    engine.check_rest()


def test_the_smallest_rank_decides_on_the_slots():
    engine = PlayedEngine(slots=64, ranks=2)
    assert engine.offload.manager.num_slots == 64
    engine.connector.set_xfer_handshake_metadata_pp_aware(
        {
            (0, 0): WorkerCapacity(0, 40, 40, slot_bytes=blocks(1)),
            (0, 1): WorkerCapacity(1, 30, 30, slot_bytes=blocks(1)),
            (0, 2): SimpleNamespace(),
        }
    )
    assert engine.offload.manager.num_slots == engine.offload.manager.usable_slots == 30
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})
    assert engine.offload.manager.num_slots == 30


@pytest.mark.parametrize(("told", "expected"), [((48, 40), 48), ((48, 100), 64), ((64, 64), 64)])
def test_slots_are_as_large_as_the_largest_that_ranks_tell(told, expected):
    """Less than a block where they are packed; a stage with larger blocks changes nothing."""
    engine = PlayedEngine(slots=64, ranks=2)
    engine.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, i): WorkerCapacity(i, 64, 64, slot_bytes=nbytes) for i, nbytes in enumerate(told)}
    )
    gauges = engine.offload.gauges()
    assert (gauges["slot_bytes"], gauges["block_bytes"]) == (expected, blocks(1))
    store(engine, PROMPT).serve("a", PROMPT)
    assert engine.totals["hit_tokens"] == 20


def test_only_slots_that_are_ready_on_every_rank_are_used(monkeypatch):
    """Memory becomes ready while the engine serves; each rank says so at the end of a step."""
    ready: dict[Any, int] = {}
    monkeypatch.setattr(
        ManualSwapEngine, "ready_slots", property(lambda made: ready.get(made, 2)), raising=True
    )
    engine = PlayedEngine(ranks=2, plugin={"max_pinned_share": 1.0})
    manager = engine.offload.manager
    assert (manager.usable_slots, manager.num_slots) == (2, 64)
    engine.serve("a", PROMPT, max_tokens=1)
    assert engine.totals["stored_bytes"] == blocks(2 * 2)
    assert engine.totals["skipped_copy_failed"] == 0
    first, second = (rank.copies for rank in engine.ranks)
    ready[first] = 40
    engine.serve("b", OTHER, max_tokens=1)
    assert manager.usable_slots == 2, "the other rank is not as far"
    ready[second] = 30
    engine.serve("c", [*OTHER[4:], *PROMPT], max_tokens=8)
    assert manager.usable_slots == 30
    assert manager.slots_in_use > 2
    manager.check_integrity()
    for rank, slots, usable in ((1, 50, 40), (1, 2, 40), (0, 60, 50)):  # 2 is older news
        report(engine, {}, rank, ready_slots=slots)
        assert manager.usable_slots == usable
        manager.check_integrity()


def test_before_every_rank_has_spoken_no_slot_is_used():
    """A connector inside another one may never see the ranks' capacities, only their reports."""
    engine = PlayedEngine(ranks=2, handshake=False)
    report(engine, {}, 1, ready_slots=50)
    assert engine.offload.manager.usable_slots == 0
    engine.serve("a", PROMPT)
    assert engine.offload.manager.usable_slots == 64
    assert engine.totals["stored_bytes"] > 0
