"""Messages as vLLM carries them, and our connectors inside vLLM's objects."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

import kv_offload.engines.vllm.connector  # noqa: F401 - vLLM takes our messages from then on
from kv_offload.engines.vllm.locate import connectors_in, connectors_with_reports
from kv_offload.messages import (
    OffloadMetadata,
    OffloadWorkerMetadata,
    Outcome,
    RankReport,
    WorkerCapacity,
)

OURS = SimpleNamespace(offload_scheduler="s", offload_worker=None)
OTHER = SimpleNamespace()
MULTI = SimpleNamespace(_connectors=[OTHER, OURS, SimpleNamespace(_connectors=[OURS])])


def test_our_connectors_are_found_alone_and_inside_others():
    assert list(connectors_in(OURS)) == [OURS]
    assert list(connectors_in(OURS, "offload_worker")) == []
    assert list(connectors_in(OTHER)) == list(connectors_in(None)) == []
    assert list(connectors_in(MULTI)) == [OURS, OURS]


def test_each_of_our_connectors_gets_what_its_own_ranks_report():
    one, two = (OffloadWorkerMetadata({rank: RankReport()}) for rank in range(2))
    assert list(connectors_with_reports(OURS, one)) == [(OURS, one)]
    nested = SimpleNamespace(metadata=("x", one, SimpleNamespace(metadata=(two,))))
    assert list(connectors_with_reports(MULTI, nested)) == [(OURS, one), (OURS, two)]
    assert list(connectors_with_reports(MULTI, None)) == [(OURS, None)] * 2


def test_vllm_sends_and_merges_reports():
    reports = (RankReport({1: Outcome.LOST}, 2, 3.0, 4.0, 5, 6), RankReport(), RankReport())
    one, two, three = (OffloadWorkerMetadata({n: told}) for n, told in enumerate(reports))
    merged = one.aggregate(two).aggregate(three)
    assert pickle.loads(pickle.dumps(merged)).ranks == dict(enumerate(reports))


def test_messages_are_what_vllm_expects_of_a_connector():
    assert issubclass(OffloadMetadata, KVConnectorMetadata)
    assert issubclass(OffloadWorkerMetadata, KVConnectorWorkerMetadata)
    assert issubclass(WorkerCapacity, KVConnectorHandshakeMetadata)
