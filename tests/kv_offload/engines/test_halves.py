"""Our halves of a connector, and what their ranks report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.engines.vllm.halves import failed_loads, halves, requests_with_lost_kv
from kv_offload.messages import OffloadWorkerMetadata


def test_halves_of_one_connector_or_of_those_inside_another() -> None:
    ours = SimpleNamespace(offload_scheduler="s", offload_worker=None)
    other = SimpleNamespace()
    multi = SimpleNamespace(_connectors=[other, ours, SimpleNamespace(_connectors=[ours])])
    assert list(halves(ours, "offload_scheduler")) == ["s"]
    assert list(halves(ours, "offload_worker")) == []
    assert list(halves(other, "offload_scheduler")) == []
    assert list(halves(multi, "offload_scheduler")) == ["s", "s"]
    assert list(halves(None, "offload_scheduler")) == []


def test_failed_and_lost_loads_are_collected_from_all_reports() -> None:
    def half(name: str) -> Any:
        def lose(report: OffloadWorkerMetadata) -> set[Any] | None:
            return {(name, *report.lost_loads)} if report.lost_loads else None

        return SimpleNamespace(offload_scheduler=SimpleNamespace(lose=lose))

    def report(failed: set[str], lost: set[int]) -> OffloadWorkerMetadata:
        return OffloadWorkerMetadata(failed_loads=frozenset(failed), lost_loads=frozenset(lost))

    multi = SimpleNamespace(_connectors=[half("x"), SimpleNamespace(), half("y")])
    parts = (report({"a", "b"}, {7}), None, report({"b", "c"}, set()))
    both = SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(metadata=parts))
    assert failed_loads(multi, both) == {"a", "b", "c"}
    assert requests_with_lost_kv(multi, both) == {("x", 7)}
    single = SimpleNamespace(kv_connector_worker_meta=parts[0])
    assert failed_loads(half("z"), single) == {"a", "b"}
    assert requests_with_lost_kv(half("z"), single) == {("z", 7)}
    nothing = SimpleNamespace(kv_connector_worker_meta=None)
    assert failed_loads(multi, nothing) == set()
