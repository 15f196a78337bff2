"""What a tracer is told of look-ups and loads, by OpenTelemetry's own SDK."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry, which is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.played_cases import PROMPT, both_ways, start_load, store
from tests.support.played_engine import PlayedEngine

pytestmark = pytest.mark.engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LOOKUP, LOAD = "kv_offload.lookup", "kv_offload.load"


class Tracer:
    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.spans))

    def take(self) -> list[ReadableSpan]:
        found = list(self.spans.get_finished_spans())
        self.spans.clear()
        return found


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """A tracer that is this test's alone: a process has one for good."""
    tracer = Tracer()
    monkeypatch.setattr(trace, "get_tracer", tracer.provider.get_tracer)
    yield tracer
    tracer.provider.shutdown()


def traced(**arguments: Any) -> PlayedEngine:
    return PlayedEngine(traces="http://127.0.0.1:1", **arguments)


def said(span: ReadableSpan) -> dict[str, Any]:
    prefix = "kv_offload."
    found = dict(span.attributes or {})
    return {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}


@both_ways
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_request_has_a_lookup_and_a_load(tracer, synchronous):
    engine = store(traced(synchronous_loads=synchronous), PROMPT)
    (miss,) = tracer.take()
    assert miss.name == LOOKUP
    assert said(miss) == {"hit_tokens": 0, "engine_hit_tokens": 0, "recomputed_tokens": 0}
    began = time.time_ns()
    request = engine.add("hit", PROMPT, 2)
    request.trace_headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    engine.run()
    ended = time.time_ns()
    lookup, load = tracer.take()
    assert (lookup.name, load.name) == (LOOKUP, LOAD)
    assert said(lookup)["hit_tokens"] == 20
    assert said(load) == {"slots": 5, "synchronous": synchronous, "outcome": "ok"}
    for span in lookup, load:
        assert span.parent is not None
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert (span.attributes or {})["gen_ai.request.id"] == "hit"
        assert began <= (span.start_time or 0) <= (span.end_time or 0) <= ended
        assert span.status.is_ok or span.status.status_code is trace.StatusCode.UNSET
    engine.check_rest()


def test_what_was_in_the_gpu_is_no_hit_of_host_memory(tracer):
    engine = traced()
    engine.serve("first", PROMPT, 1)
    tracer.take()
    engine.serve("again", PROMPT, 1)
    (lookup,) = tracer.take()
    assert said(lookup) == {"hit_tokens": 0, "engine_hit_tokens": 20, "recomputed_tokens": 0}


@both_ways
def test_a_load_that_fails_says_so_and_the_request_is_looked_up_again(tracer):
    engine = store(traced(), PROMPT)
    tracer.take()
    start_load(engine)
    engine.run_copies(fail=True)
    engine.run()
    names = [(span.name, said(span).get("outcome")) for span in tracer.take()]
    assert names == [(LOOKUP, None), (LOAD, "failed"), (LOOKUP, None)]
    engine.check_rest()


def test_a_lookup_lasts_while_another_load_is_waited_for(tracer, monkeypatch):
    engine = store(traced(), PROMPT)
    tracer.take()
    now = [10**18]
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    start_load(engine)
    engine.add("b", PROMPT, 1)
    engine.step()
    now[0] += 10**9
    engine.run()
    lasted = {
        (span.attributes or {})["gen_ai.request.id"]: (span.end_time or 0) - (span.start_time or 0)
        for span in tracer.take()
        if span.name == LOOKUP
    }
    assert lasted == {"a": 0, "b": 10**9}


def test_an_engine_that_does_not_trace_tells_nothing(tracer):
    engine = store(PlayedEngine(), PROMPT)
    engine.serve("hit", PROMPT, 1)
    assert tracer.take() == []


def test_a_tracer_that_raises_costs_no_request_and_is_not_called_again(monkeypatch):
    called = []

    class Broken(trace.NoOpTracer):
        def start_span(self, *arguments: Any, **more: Any) -> Any:
            called.append(arguments)
            raise OSError("the tracer is gone")

    monkeypatch.setattr(trace, "get_tracer", lambda _: Broken())
    engine = store(traced(), PROMPT)
    engine.serve("hit", PROMPT, 1)
    assert engine.ended["hit"] == "length"
    assert engine.totals["hit_tokens"] == 20
    assert len(called) == 1
    assert "hook_errors" not in engine.totals
    engine.check_rest()
