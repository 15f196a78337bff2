from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kv_offload.messages import JobResult, LoadJob, OffloadWorkerMetadata
from kv_offload.worker.reports import Reports

OK = JobResult(frozenset({1}), True)


@pytest.fixture
def reports() -> Reports:
    """The reports of rank 1."""
    return Reports(1)


def load(job_id: int, request_id: str) -> LoadJob:
    return LoadJob(job_id, request_id, np.zeros((0, 2), np.int32))


def report(reports: Reports, **more: Any) -> OffloadWorkerMetadata | None:
    facts = {"load_speed": None, "store_speed": None, "ready_slots": 0, "weight_loads": 0, **more}
    return reports.take_report(**facts)


# -- the report of a step ----------------------------------------------------------------------


def test_everything_is_reported_once(reports: Reports) -> None:
    assert report(reports) is None
    reports.store_ended(3, ok=True)
    reports.store_ended(4, ok=False)
    reports.load_ended(load(5, "a"), failed=True)
    reports.load_lost(load(6, "b"))
    reports.synchronous_load_ended(load(6, "b"))
    assert report(reports, load_speed=2e9, store_speed=3e9) == OffloadWorkerMetadata(
        stores={3: OK, 4: JobResult(frozenset({1}), False)},
        failed_loads=frozenset({"a"}),
        loads={6: frozenset({1})},
        lost_loads=frozenset({6}),
        load_bytes_per_second=2e9,
        store_bytes_per_second={1: 3e9},
    )
    assert report(reports) is None
    assert reports.lost_lately == {6}, "for a drain"


def test_ready_slots_and_weight_loads_are_reported_when_they_have_grown(reports: Reports) -> None:
    ready = OffloadWorkerMetadata(ready_slots={1: 2})
    assert report(reports, ready_slots=2) == ready
    assert report(reports, ready_slots=2) is None
    assert report(reports, ready_slots=0) is None, "after the end"
    grown = OffloadWorkerMetadata(ready_slots={1: 8}, weight_loads={1: 3})
    assert report(reports, ready_slots=8, weight_loads=3) == grown
    assert report(reports, ready_slots=8, weight_loads=3) is None


def test_losses_are_told_without_a_report(reports: Reports) -> None:
    assert reports.take_losses() is None
    reports.store_ended(3, ok=True)
    reports.load_ended(load(5, "a"), failed=True)
    reports.load_lost(load(6, "b"))
    assert reports.take_losses() == OffloadWorkerMetadata(
        failed_loads=frozenset({"a"}), lost_loads=frozenset({6})
    )
    assert report(reports) == OffloadWorkerMetadata(stores={3: OK}), "the next step tells the rest"


# -- asynchronous loads ------------------------------------------------------------------------


def test_a_load_that_failed_stays_failed_until_it_is_told(reports: Reports) -> None:
    """Also if a second load of its request ends well meanwhile."""
    first = load(5, "a")
    reports.load_ended(first, failed=True)
    reports.load_ended(load(6, "a"), failed=False)
    assert reports.take_received() == ({"a"}, {"a": first})
    assert reports.take_received() == (set(), {})


def test_who_drains_hears_of_failed_loads_as_ended(reports: Reports) -> None:
    """Of requests whose blocks it takes back."""
    kept = load(6, "b")
    reports.load_ended(load(5, "a"), failed=True)
    reports.load_ended(kept, failed=True)
    reports.forgive_failed_loads({"a", "c"})
    assert reports.take_received() == ({"a", "b"}, {"b": kept})


def test_ended_loads_are_told_once_and_failed_ones_with_the_report(reports: Reports) -> None:
    reports.load_ended(load(5, "a"), failed=False)
    reports.load_ended(load(6, "b"), failed=True)
    assert reports.take_ended_loads() == ({"a"}, set())
    assert reports.take_ended_loads() == (set(), set())
    received, failed = reports.take_received()
    assert received == failed.keys() == {"b"}
    assert reports.take_ended_loads() == (set(), set())


def test_ended_loads_are_told_before_their_report_arrives(reports: Reports) -> None:
    reports.load_ended(load(5, "a"), failed=False)
    reports.load_ended(load(6, "b"), failed=True)
    reports.load_ended(load(7, "c"), failed=False)
    assert reports.take_received()[0] == {"a", "b", "c"}
    reports.load_starts(load(8, "c"))
    assert reports.take_ended_loads() == (set(), {"a"}), "c waits for another load"
    assert reports.take_ended_loads() == (set(), set())


def test_loads_that_an_error_kept_from_being_told_are_in_no_report(reports: Reports) -> None:
    reports.load_ended(load(5, "a"), failed=False)
    reports.take_received()
    reports.received_were_not_told()
    assert reports.take_ended_loads() == (set(), set())


# -- stores ------------------------------------------------------------------------------------


def test_ended_stores_are_told_once_also_before_their_report_arrives(reports: Reports) -> None:
    reports.store_ended(3, ok=True)
    assert reports.take_ended_stores() == {3: OK}
    assert report(reports) is None
    reports.store_ended(4, ok=True)
    report(reports)
    reports.store_ended(5, ok=True)
    assert reports.take_ended_stores() == {4: OK, 5: OK}
    assert reports.take_ended_stores() == {}


@pytest.mark.parametrize("by", ["report", "losses"])
def test_a_lost_load_is_told_before_any_store(reports: Reports, by: str) -> None:
    """What was computed with it must be distrusted first, and a store may hold it."""
    reports.store_ended(3, ok=True)
    reports.load_lost(load(6, "b"))
    assert reports.take_ended_stores() == {}, "not reported yet"
    if by == "report":
        assert report(reports) == OffloadWorkerMetadata({3: OK}, lost_loads=frozenset({6}))
    else:
        reports.take_losses()
    reports.store_ended(4, ok=True)
    assert reports.take_ended_stores() == {}, "the report may be under way"
    stores = {4: OK} if by == "report" else {3: OK, 4: OK}
    assert report(reports) == OffloadWorkerMetadata(stores)
    assert reports.take_ended_stores() == stores


def test_a_step_that_was_cut_short_is_told_before_any_store(reports: Reports) -> None:
    """What it did not compute may be in a store."""
    reports.store_ended(3, ok=True)
    reports.step_cut_short(7)
    assert reports.take_ended_stores() == {}
    assert report(reports) == OffloadWorkerMetadata({3: OK}, cut_short=7)
    assert reports.take_ended_stores() == {}, "the report may be under way"
    assert report(reports) is None
    reports.step_cut_short(8)
    assert reports.take_losses() == OffloadWorkerMetadata(cut_short=8)


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_add_up_until_they_are_taken(reports: Reports) -> None:
    assert reports.take_stats() is None
    reports.count("hook_errors", 1)
    reports.count("hook_errors", 2)
    stats = reports.take_stats()
    assert stats is not None
    assert stats.data == {"hook_errors": 3}
    assert reports.take_stats() is None
