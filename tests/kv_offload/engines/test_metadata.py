"""The messages in the classes that vLLM passes around."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_offload.engines.vllm.metadata import (
    ConnectorMetadata,
    ConnectorWorkerMetadata,
    HandshakeMetadata,
    convert,
)
from kv_offload.messages import (
    LoadJob,
    OffloadMetadata,
    OffloadWorkerMetadata,
    Outcome,
    RankReport,
    StoreJob,
    WorkerCapacity,
)

PAIRS = np.array([[1, 2]], np.int32)
REPORT = OffloadWorkerMetadata({0: RankReport({1: Outcome.LOST}, 2, 3.0, 4.0, 5, 6)})
"""Every field is set."""


def test_nothing_of_a_message_is_lost() -> None:
    plan = OffloadMetadata((StoreJob(1, PAIRS),), (LoadJob(2, "a", PAIRS),), 3, (0,), 4)
    capacity = WorkerCapacity(1, 2, 3, synchronous_loads=False)
    for message, kind, carried in (
        (plan, KVConnectorMetadata, convert(plan, ConnectorMetadata)),
        (REPORT, KVConnectorWorkerMetadata, ConnectorWorkerMetadata.of(REPORT)),
        (capacity, KVConnectorHandshakeMetadata, convert(capacity, HandshakeMetadata)),
    ):
        assert isinstance(carried, kind)
        assert isinstance(carried, type(message)), "the halves take it as it is"
        assert vars(carried) == vars(message)
    received = pickle.loads(pickle.dumps(ConnectorWorkerMetadata.of(REPORT)))
    assert vars(received) == vars(REPORT)
    assert ConnectorWorkerMetadata.of(None) is None


def test_vllm_merges_reports_as_the_plugin_does() -> None:
    other = OffloadWorkerMetadata({1: RankReport({1: Outcome.OK}, ready_slots=9)})
    one, two = ConnectorWorkerMetadata.of(REPORT), ConnectorWorkerMetadata.of(other)
    assert one is not None
    assert two is not None
    merged = one.aggregate(two)
    assert isinstance(merged, ConnectorWorkerMetadata), "vLLM merges it with a third"
    assert vars(merged) == vars(REPORT.merge(other))
