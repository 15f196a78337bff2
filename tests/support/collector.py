"""A collector of OpenTelemetry spans on loopback, to which servers export over HTTP."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

pytest.importorskip("opentelemetry.proto", reason="needs OpenTelemetry, which is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.waiting import wait_until

ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
}
"""Variables of a server that exports here, five times a second."""


@dataclass(frozen=True)
class Told:
    """A span. Ids are hexadecimal; `parent_id` is empty for a trace's root span."""

    name: str
    trace_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Collector:
    """A context manager. `url` is the endpoint for `--otlp-traces-endpoint`."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        told = self._told

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                told.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def of_trace(self, trace_id: str, count: int) -> list[Told]:
        """Wait until a trace has this many spans, and return them in the order of their starts."""

        def found() -> list[Told]:
            return [span for span in list(self._told) if span.trace_id == trace_id]

        wait_until(lambda: len(found()) >= count, found)
        return sorted(found(), key=lambda span: span.start_ns)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans(request: ExportTraceServiceRequest) -> list[Told]:
    return [
        Told(
            span.name,
            span.trace_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            {one.key: _value(one.value) for one in span.attributes},
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _value(value: Any) -> Any:
    return getattr(value, str(value.WhichOneof("value")))
