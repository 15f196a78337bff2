"""Observers of the scheduler: KV events, quotas, spans, the trace recorder and estimates.

An observer that is on subscribes to the events that it needs; an observer that is off costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import Slots
from kv_offload.engine import Request
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata
from kv_offload.scheduler.events.announcer import Announcement, Announcer
from kv_offload.scheduler.events.records import Describe
from kv_offload.scheduler.request import Hit, TrackedRequest
from kv_offload.scheduler.spans import ReportSpan
from kv_offload.scheduler.stores.candidates import Span
from kv_offload.scheduler.transfers import Transfer
from kv_offload.simulation.trace_recorder import TraceRecorder

CLOSE_SECONDS = 5.0
"""Maximum wait at shutdown for requests that are not recorded yet."""


@dataclass(frozen=True)
class Observers:
    """The observers that the engine's configuration turns on; None for an observer that is off.

    `describe` describes blocks for routers' KV events. `recorder` is closed with the scheduler.
    `report_span` takes spans of lookups and loads.
    """

    describe: Describe | None = None
    recorder: TraceRecorder | None = None
    report_span: ReportSpan | None = None


StoresPlanned = Callable[[Sequence[Span], Sequence[SlotKey], Sequence[SlotKey], Slots], None]


class Subscribers:
    """The functions to call for each kind of event.

    - `lookup`: the engine looks up a request.
    - `admission`: a request has blocks; with its hit and the number of tokens that are loaded.
    - `load_end`, `store_end`: all ranks have ended a load, or a store.
    - `request_end`: a request that was admitted ends; with its computed tokens.
    - `stores`: stores are planned; with the spans that were examined, their keys, the new keys
      among them, and the slots given to the first of these. `tails`: the same, for blocks inside
      which a prefix ends.
    - `promotions`: a range of tokens of a request's prefix is read from lower tiers.
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
        self.store_end: list[Callable[[Transfer], None]] = []
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

    def follow(self, announcer: Announcer) -> None:
        """Announce blocks of host memory, or of a tier, to routers."""

        def admitted(tracked: TrackedRequest, hit: Hit | None, loaded_tokens: int) -> None:
            if hit is not None:
                announcer.learn(tracked.request, hit.start_tokens + loaded_tokens)

        self.admission.append(admitted)
        self.engine_reset.append(announcer.engine_was_reset)
        self.has_work.append(lambda _idle: announcer.has_more)
        self.announcements.append(announcer.take)
