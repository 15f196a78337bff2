"""Observers of the scheduler: KV events, quotas, spans, the trace recorder and estimates.

An observer that is on subscribes to the events that it needs. One that is off costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import Slots
from kv_offload.engine import Request
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata
from kv_offload.scheduler.events.announcer import Announcement, Announcer
from kv_offload.scheduler.events.records import Describe
from kv_offload.scheduler.quotas import Quotas
from kv_offload.scheduler.request import Hit, TrackedRequest
from kv_offload.scheduler.spans import ReportSpan, Spans
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.candidates import Span
from kv_offload.scheduler.transfers import Transfer
from kv_offload.simulation.miss_ratio_curve import MissRatioCurve
from kv_offload.simulation.trace_recorder import TraceRecorder

CLOSE_SECONDS = 5.0
"""Bound of the wait for what is still to be recorded at the end."""


@dataclass(frozen=True)
class Observers:
    """The observers that the engine's configuration turns on; None for one that is off.

    `describe` describes blocks for KV events, which routers get. `recorder` is closed with the
    scheduler. `report_span` takes spans of lookups and loads.
    """

    describe: Describe | None = None
    recorder: TraceRecorder | None = None
    report_span: ReportSpan | None = None


StoresPlanned = Callable[[Sequence[Span], Sequence[SlotKey], Sequence[SlotKey], Slots], None]


class Subscribers:
    """The functions to call for each kind of event.

    - `lookup`: the engine asks what can be loaded for a request.
    - `admission`: a request has blocks; with its hit and the number of tokens that are loaded.
    - `load_end`: all ranks have ended a load.
    - `request_end`: a request that was admitted ends; with its computed tokens.
    - `stores`: stores are planned; with the spans that were examined, their keys, the new keys
      among them, and the slots that the first of these have got. `tails`: the same, of blocks
      inside of which a prefix ends.
    - `promotions`: a part of a request's prefix, from token to token, is read from lower tiers.
    - `demotions`: slots are written to a tier.
    - `emptied`: host memory is empty. `engine_reset`: so is the engine's own cache.
    - `work`: the step ends; True if the engine is idle. `has_work`: returns whether it must step.
    - `announcements`: returns the announcements for routers.
    - `plans`: takes the plan of a step, and returns it with additions. `reports`: ranks report.
    - `close`: the engine shuts down.
    """

    def __init__(self) -> None:
        self.lookup: list[Callable[[TrackedRequest], None]] = []
        self.admission: list[Callable[[TrackedRequest, Hit | None, int], None]] = []
        self.load_end: list[Callable[[Transfer], None]] = []
        self.request_end: list[Callable[[Request, int], None]] = []
        self.stores: list[StoresPlanned] = []
        self.tails: list[StoresPlanned] = []
        self.promotions: list[Callable[[Request, int, int, Sequence[Transfer]], None]] = []
        self.demotions: list[Callable[[Sequence[Transfer]], None]] = []
        self.emptied: list[Callable[[], None]] = []
        self.engine_reset: list[Callable[[], None]] = []
        self.work: list[Callable[[bool], None]] = []
        self.has_work: list[Callable[[bool], bool]] = []
        self.announcements: list[Callable[[], list[Announcement]]] = []
        self.plans: list[Callable[[OffloadMetadata], OffloadMetadata]] = []
        self.reports: list[Callable[[OffloadWorkerMetadata], None]] = []
        self.close: list[Callable[[], None]] = []

    def add_announcer(self, announcer: Announcer) -> None:
        """Announce blocks of host memory to routers."""
        self.stores.append(announcer.stores_planned)
        self.promotions.append(announcer.promoted)
        self._follow(announcer)

    def add_announcer_below(self, above: Announcer, manager: CacheManager, tier: str) -> None:
        """Announce blocks of a tier to routers; `above` does those of host memory."""
        announcer = above.below(manager, tier)
        self.demotions.append(partial(announcer.demoted, above))
        self._follow(announcer)

    def _follow(self, announcer: Announcer) -> None:
        def admitted(tracked: TrackedRequest, hit: Hit | None, loaded_tokens: int) -> None:
            if hit is not None:
                announcer.learn(tracked.request, hit.start_tokens + loaded_tokens)

        self.admission.append(admitted)
        self.engine_reset.append(announcer.engine_was_reset)
        self.has_work.append(lambda _idle: announcer.has_more)
        self.announcements.append(announcer.take)

    def add_quotas(self, quotas: Quotas) -> None:
        """Bound what one tenant takes of host memory."""
        self.stores.append(quotas.stores_planned)
        self.tails.append(quotas.stores_planned)
        self.promotions.append(quotas.promoted)
        self.load_end.append(quotas.load_ended)
        self.emptied.append(quotas.clear)

    def add_quotas_below(self, above: Quotas, quotas: Quotas) -> None:
        """Bound what one tenant takes of a tier; `above` does so of host memory."""
        self.demotions.append(partial(quotas.demoted, above))
        self.promotions.append(quotas.promoted)

    def add_spans(self, spans: Spans) -> None:
        """Report lookups and loads to a tracer."""
        self.lookup.append(spans.asked)
        self.admission.append(spans.admitted)
        self.load_end.append(spans.load_ended)

    def add_recorder(
        self, recorder: TraceRecorder, hash_block_tokens: int, statistics: Statistics
    ) -> None:
        """Record requests that end."""
        self.request_end.append(lambda request, _: recorder.record(request, hash_block_tokens))
        self.work.append(lambda _: statistics.count("trace_errors", recorder.take_errors()))
        self.close.append(partial(recorder.close, CLOSE_SECONDS))

    def add_other_sizes(self, estimates: MissRatioCurve) -> None:
        """Estimate the hits of caches of other sizes."""

        def admitted(tracked: TrackedRequest, hit: Hit | None, loaded_tokens: int) -> None:
            if hit is not None and hit.decision is not None:
                found_tokens = loaded_tokens + hit.declined_tokens
                estimates.admitted(tracked.request, hit.start_tokens, found_tokens)

        self.admission.append(admitted)
        self.request_end.append(estimates.ended)
        self.emptied.append(estimates.reset)
        self.work.append(lambda idle: estimates.work(idle=idle))
        self.has_work.append(lambda idle: idle and estimates.has_turns)
