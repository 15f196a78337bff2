"""How ranks' reports are merged; and that messages cross a process boundary."""

from __future__ import annotations

import pickle

import numpy as np

from kv_offload.messages import (
    LoadJob,
    OffloadMetadata,
    OffloadWorkerMetadata,
    Outcome,
    RankReport,
    StoreJob,
)


def test_what_each_rank_says_is_kept_by_rank():
    mine = RankReport({1: Outcome.OK, 2: Outcome.LOST}, ready_slots=4)
    others = RankReport({2: Outcome.OK}, aborted_step=7)
    one, other = OffloadWorkerMetadata({0: mine}), OffloadWorkerMetadata({1: others})
    assert one.aggregate(OffloadWorkerMetadata()).aggregate(other).ranks == {0: mine, 1: others}
    assert (one.ranks, other.ranks) == ({0: mine}, {1: others}), "merging changes neither report"


def test_messages_cross_a_process_boundary():
    pairs = np.array([[1, 2], [3, 4]], np.int32)
    load = LoadJob(2, "a", pairs, incomplete=True)
    sent = OffloadMetadata((StoreJob(1, pairs),), (load,), 3, (0,), 5)
    received = pickle.loads(pickle.dumps(sent))
    assert received.stores[0].job_id == 1
    assert (received.loads[0].request_id, received.loads[0].incomplete) == ("a", True)
    assert (received.next_job_id, received.acknowledged, received.admissions) == (3, (0,), 5)
    for job in (*received.stores, *received.loads):
        assert job.pairs.dtype == np.int32
        assert (job.pairs == pairs).all()
    report = OffloadWorkerMetadata({0: RankReport({1: Outcome.FAILED}, 5)})
    assert pickle.loads(pickle.dumps(report)) == report
