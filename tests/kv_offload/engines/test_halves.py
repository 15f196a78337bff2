"""Our connectors inside vLLM's objects, and what their ranks report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.engines.vllm.halves import connectors_in, connectors_with_reports
from kv_offload.messages import OffloadWorkerMetadata, RankReport

OURS = SimpleNamespace(offload_scheduler="s", offload_worker=None)
OTHER = SimpleNamespace()
INNER = SimpleNamespace(_connectors=[OURS])
MULTI = SimpleNamespace(_connectors=[OTHER, OURS, INNER])


def test_our_connectors_are_found_alone_and_inside_others() -> None:
    assert list(connectors_in(OURS)) == [OURS]
    assert list(connectors_in(OURS, "offload_worker")) == []
    assert list(connectors_in(OTHER)) == []
    assert list(connectors_in(MULTI)) == [OURS, OURS]
    assert list(connectors_in(None)) == []


def test_each_of_our_connectors_gets_what_its_own_ranks_report() -> None:
    one, two = (OffloadWorkerMetadata({rank: RankReport()}) for rank in range(2))
    alone = SimpleNamespace(kv_connector_worker_meta=one)
    assert list(connectors_with_reports(OURS, alone)) == [(OURS, one)]
    inner = SimpleNamespace(metadata=(two,))
    nested = SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(metadata=("x", one, inner)))
    assert list(connectors_with_reports(MULTI, nested)) == [(OURS, one), (OURS, two)]
    for nothing in (None, SimpleNamespace(kv_connector_worker_meta=None)):
        assert list(connectors_with_reports(MULTI, nothing)) == [(OURS, None)] * 2
