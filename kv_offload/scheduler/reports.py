"""What the ranks say has ended: in the report of a step, or before that where they can be asked.

A report names asynchronous loads by their requests. The engine must hear of each load once: it may
have freed the blocks, and forgotten the request, when it is told again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from kv_offload.messages import DrainAnswer, OffloadWorkerMetadata, StoreJob
from kv_offload.scheduler.contents import Contents
from kv_offload.scheduler.load_jobs import LoadJobs
from kv_offload.scheduler.request import Phase, RequestTable
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.steps import StepWatch
from kv_offload.scheduler.stores.budget import StoreBudget
from kv_offload.scheduler.stores.planner import StorePlanner

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Reports:
    """Takes in what the ranks have ended."""

    _requests: RequestTable
    _loads: LoadJobs
    _stores: StorePlanner
    _watch: StepWatch
    _budget: StoreBudget
    _contents: Contents
    _statistics: Statistics
    _ranks_ready: Callable[[Mapping[int, int]], None]

    # What has arrived and was not read yet, after an error: mostly nothing.
    _unread: deque[OffloadWorkerMetadata] = field(default_factory=deque)
    _retried: OffloadWorkerMetadata | None = None
    _received_unread: set[str] = field(default_factory=set)
    _draining: bool = False

    # -- steps ---------------------------------------------------------------------------------

    def take(
        self,
        report: OffloadWorkerMetadata | None,
        received: Set[str],
        ended: Set[str] = frozenset(),
        told_early: Set[str] = frozenset(),
    ) -> set[str]:
        """Take a step's report; return the requests whose loads the engine is to hear of now.

        `received` are those that the ranks' report names, `ended` those that the only rank has told
        of instead of a report, and `told_early` those that it told of and its last report names
        too. That report may be this one, or one that is still under way.

        `read` must follow, once the engine's output names what this returns: an error in reading
        must not make the engine hear of a load twice.
        """
        heard = {r for r in received | ended if self._is_due(r)}
        news = {*received, *ended} - heard
        for request_id in heard:
            self._set_due(request_id, due=False)
        for request_id in told_early - received:
            if not self._is_due(request_id) and request_id not in heard:
                self._set_due(request_id, due=True)
                news.add(request_id)
        if self._draining:
            for request_id in news:
                self._set_due(request_id, due=True)
        if report is not None:
            self._unread.append(report)
        self._received_unread |= news
        return news

    def _is_due(self, request_id: str) -> bool:
        tracked = self._requests.of_report(request_id)
        return tracked is not None and tracked.report_due

    def _set_due(self, request_id: str, *, due: bool) -> None:
        tracked = self._requests.of_report(request_id)
        if tracked is not None:
            tracked.report_due = due
            self._requests.settle(tracked)

    def read(self) -> None:
        """Take in what the ranks have reported; what an error interrupted is read once more.

        After a second error a report is given up, since the later ones wait for it: see `_give_up`.
        """
        while self._unread:
            report = self._unread.popleft()
            try:
                for part in self._parts(report):
                    part()
            except Exception:
                if report is self._retried:
                    self._give_up(report)
                else:
                    self._retried = report
                    self._unread.appendleft(report)
                raise
        if self._received_unread:
            received, self._received_unread = self._received_unread, set()
            for request_id in received:
                self._end_load(request_id)

    def _parts(self, report: OffloadWorkerMetadata) -> Iterable[Callable[[], None]]:
        """Return what reads a report, in order; only figures count twice where it is read again."""
        return (
            lambda: self._contents.weights_were_loaded(report.weight_loads),
            lambda: self._fail_loads(report.failed_loads),
            lambda: self._stores.complete(report.stores),
            lambda: self._loads.complete_synchronous(report.loads),
            lambda: self._learn(report),
        )

    def _give_up(self, report: OffloadWorkerMetadata) -> None:
        """Take in what can be read of a report. Its stores have failed: no block stays pinned."""
        self._stores.fail(report.stores)
        for part in self._parts(report):
            try:
                part()
            except Exception:
                logger.exception("kv-offload: a part of a rank's report is given up")

    def _fail_loads(self, request_ids: Set[str]) -> None:
        for request_id in request_ids:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.load_failed = True
        self._statistics.count("failed_loads", len(request_ids))

    def _learn(self, report: OffloadWorkerMetadata) -> None:
        if report.load_bytes_per_second is not None:
            self._watch.load_rate.learn(report.load_bytes_per_second)
        for rank, speed in report.store_bytes_per_second.items():
            self._budget.learn(speed, rank)
        if report.ready_slots:
            self._ranks_ready(report.ready_slots)

    def _end_load(self, request_id: str) -> None:
        tracked = self._requests.of_report(request_id)
        if tracked is None:
            return
        self._loads.complete(tracked)
        if tracked.phase is Phase.LOADING:
            tracked.phase = Phase.READY
        self._requests.settle(tracked)

    @property
    def may_come_early(self) -> bool:
        """Whether a request waits to hear that a rank has ended its load, and may hear it now.

        Not while a drain tells of loads: what the rank says then would be lost.
        """
        return self._loads.running_asynchronous > 0 and not self._draining

    # -- drains --------------------------------------------------------------------------------

    def begin_drain(self) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """Return the stores that no rank has seen, and the ids of all that must end."""
        unsent = self._stores.jobs.take_planned()
        return unsent, self._stores.jobs.running_jobs()

    def end_drain(self, answer: DrainAnswer) -> bool:
        """Take the ranks' answer. False if some store did not end: it is given up, unpinned."""
        if self._loads.running_synchronous(answer.lost_loads):
            # The engine has not taken in the step that lost them; `lose` comes when it does.
            self._stores.jobs.distrust()
        self._stores.complete(answer.stores)
        drained = not self._stores.jobs.pending
        self._stores.jobs.abandon()
        return drained

    def running_loads(self) -> set[str]:
        """Return the requests whose asynchronous loads the engine does not know to have ended."""
        loading = {tracked.request_id for tracked in self._requests if tracked.held is not None}
        return loading - self._received_unread

    def abandoned_loads(self) -> set[str]:
        """Return the requests that ended while their loads run: the engine holds their blocks."""
        return {name for name in self.running_loads() if self._requests.get(name) is None}

    def waiting_loads(self) -> set[str]:
        """Return the requests that may wait for a load of ours, or for their turn after it."""
        return {
            tracked.request_id
            for tracked in self._requests
            if tracked.loaded is not None or tracked.load_failed
        }

    def loaded(self) -> set[str]:
        """Return the requests whose loads have ended, and that have not been scheduled since."""
        return {
            tracked.request_id
            for tracked in self._requests
            if tracked.phase is Phase.READY and tracked.loaded is not None
        }

    def deliver(self, request_ids: Iterable[str], tell: Callable[[set[str]], None]) -> None:
        """Tell the engine that these loads have ended on all ranks, whose reports are on their way.

        `tell` must come back to `take` with them.
        """
        self._draining = True
        try:
            tell(set(request_ids))
        finally:
            self._draining = False
