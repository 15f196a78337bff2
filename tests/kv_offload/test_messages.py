"""How ranks' reports are merged; and that messages cross a process boundary."""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest

from kv_offload.messages import JobResult, LoadJob, OffloadMetadata, OffloadWorkerMetadata, StoreJob


def result(*ranks: int, ok: bool = True) -> JobResult:
    return JobResult(frozenset(ranks), ok)


def test_reports_of_ranks_are_merged_by_job() -> None:
    one = OffloadWorkerMetadata({1: result(0), 2: result(0)}, frozenset({"a"}))
    other = OffloadWorkerMetadata({2: result(1), 3: result(1)}, frozenset({"b", "a"}))
    merged = one.merge(other)
    assert merged.stores == {1: result(0), 2: result(0, 1), 3: result(1)}
    assert merged.failed_loads == {"a", "b"}
    assert one.stores == {1: result(0), 2: result(0)}, "merging changes neither report"
    assert other.stores == {2: result(1), 3: result(1)}


def test_reports_of_loads_that_a_forward_waits_for_are_merged_by_job() -> None:
    zero, one = frozenset({0}), frozenset({1})
    merged = OffloadWorkerMetadata(loads={1: zero, 2: zero}, lost_loads=frozenset({2})).merge(
        OffloadWorkerMetadata(loads={2: one, 3: one}, lost_loads=frozenset({3}))
    )
    assert merged.loads == {1: zero, 2: zero | one, 3: one}
    assert merged.lost_loads == {2, 3}


def test_the_slowest_rank_that_measured_says_how_fast_loads_are() -> None:
    reports = [OffloadWorkerMetadata(load_bytes_per_second=s) for s in (3e9, None, 2e9)]
    merged = functools.reduce(OffloadWorkerMetadata.merge, reports)
    assert merged == OffloadWorkerMetadata(load_bytes_per_second=2e9)


@pytest.mark.parametrize("name", ["ready_slots", "store_bytes_per_second", "weight_loads"])
def test_what_each_rank_says_of_itself_is_kept_by_rank(name: str) -> None:
    merged = OffloadWorkerMetadata(**{name: {0: 4}}).merge(
        OffloadWorkerMetadata(**{name: {1: 9}}).merge(OffloadWorkerMetadata())
    )
    assert merged == OffloadWorkerMetadata(**{name: {0: 4, 1: 9}})


@pytest.mark.parametrize("failed", [{2}, {0, 1}])
def test_one_failure_makes_a_store_of_any_number_of_ranks_fail(failed: set[int]) -> None:
    """In whichever order their reports are merged."""
    reports = [OffloadWorkerMetadata({7: result(rank, ok=rank not in failed)}) for rank in range(4)]
    for order in (reports, reports[::-1]):
        assert functools.reduce(OffloadWorkerMetadata.merge, order).stores == {
            7: result(0, 1, 2, 3, ok=False)
        }


def test_messages_cross_a_process_boundary() -> None:
    pairs = np.array([[1, 2], [3, 4]], np.int32)
    sent = OffloadMetadata((StoreJob(1, pairs),), (LoadJob(2, "a", pairs, incomplete=True),))
    received = pickle.loads(pickle.dumps(sent))
    assert received.stores[0].job_id == 1
    assert (received.loads[0].request_id, received.loads[0].incomplete) == ("a", True)
    for job in (*received.stores, *received.loads):
        assert job.pairs.dtype == np.int32
        assert (job.pairs == pairs).all()
    report = OffloadWorkerMetadata({1: result(0, ok=False)}, frozenset({"a"}))
    assert pickle.loads(pickle.dumps(report)) == report
