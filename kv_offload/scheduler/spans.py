"""Reports to a tracer how long requests waited for host memory, and how much it brought them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from kv_offload.engine import Request
from kv_offload.messages import Outcome
from kv_offload.scheduler.request import Hit, TrackedRequest
from kv_offload.scheduler.transfers import Transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A phase of a request from `start_ns` to `end_ns`, both nanoseconds since the epoch."""

    name: str
    request: Request
    start_ns: int
    end_ns: int
    attributes: Mapping[str, int | bool | str]
    ok: bool = True


ReportSpan = Callable[[TraceSpan], None]
"""Hands a span to a tracer. Called in the engine's step, so it must not wait."""


class Spans:
    """Reports two spans for each admission of a request: its lookup, and its load if it has one.

    The lookup lasts from the engine's first lookup of the request until the request has blocks,
    including waits for another request's load or a read from a tier. The load lasts from the step
    that sends it until every rank has reported its end.

    A tracer that raises is not called again.
    """

    def __init__(self, report: ReportSpan) -> None:
        self._report: ReportSpan | None = report
        # When the engine first looked up each request that has not been admitted since.
        self._asked_ns: WeakKeyDictionary[TrackedRequest, int] = WeakKeyDictionary()

    def asked(self, tracked: TrackedRequest) -> None:
        """Note that the engine looks up a request."""
        if self._report is not None:
            self._asked_ns.setdefault(tracked, time.time_ns())

    def admitted(self, tracked: TrackedRequest, hit: Hit | None, loaded_tokens: int) -> None:
        """Note that a request has blocks, and how many tokens of its `hit` are loaded into them.

        A second call before the next lookup changes nothing.
        """
        asked_ns = self._asked_ns.pop(tracked, None)
        if asked_ns is None:
            return
        attributes = {
            "gen_ai.usage.prompt_tokens": tracked.request.num_prompt_tokens,
            "kv_offload.hit_tokens": loaded_tokens,
        }
        if hit is not None and hit.decision is not None:
            attributes["kv_offload.engine_hit_tokens"] = hit.start_tokens
            attributes["kv_offload.recomputed_tokens"] = hit.declined_tokens
        self._send(
            TraceSpan("kv_offload.lookup", tracked.request, asked_ns, time.time_ns(), attributes)
        )

    def load_ended(self, load: Transfer) -> None:
        """Report the span of a load that every rank has ended."""
        if load.request is None or self._report is None:
            return
        end_ns = time.time_ns()
        attributes: dict[str, int | bool | str] = {
            "kv_offload.slots": len(load.slots),
            "kv_offload.synchronous": load.synchronous,
            "kv_offload.outcome": load.outcome.name.lower(),
        }
        start_ns = end_ns - round((time.monotonic() - load.sent) * 1e9)
        ok = load.outcome is Outcome.OK
        request = load.request.request
        self._send(TraceSpan("kv_offload.load", request, start_ns, end_ns, attributes, ok))

    def _send(self, span: TraceSpan) -> None:
        if self._report is None:
            return
        try:
            self._report(span)
        except Exception:
            logger.exception("kv-offload: a span cannot be reported; no more are. Please report it")
            self._report = None
