"""Passes spans to the OpenTelemetry tracer that vLLM has set up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_offload.scheduler.spans import ReportSpan, Span

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_tracer(vllm_config: VllmConfig) -> ReportSpan | None:
    """Return a function that reports spans; None without `--otlp-traces-endpoint`."""
    if vllm_config.observability_config.otlp_traces_endpoint is None:
        return None
    from opentelemetry import trace
    from vllm.tracing import extract_trace_context

    tracer = trace.get_tracer("kv_offload")

    def report(span: Span) -> None:
        # Without headers from the client this starts a new trace, as vLLM's own span does.
        context = extract_trace_context(span.request.trace_headers)
        attributes = {**span.attributes, "gen_ai.request.id": span.request.request_id}
        copied = tracer.start_span(
            span.name, context, start_time=span.start_ns, attributes=attributes
        )
        if not span.ok:
            copied.set_status(trace.StatusCode.ERROR)
        copied.end(span.end_ns)

    return report
