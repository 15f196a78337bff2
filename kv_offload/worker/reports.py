"""What a rank tells of its copies, each fact once.

There are several ways to tell, because they differ in how soon the scheduler hears:

- At the end of a step `take_received` names the asynchronous loads that ended, for vLLM, and
  `take_report` has everything else, for our scheduler. Under asynchronous scheduling both arrive
  one or two steps later.
- A scheduler in the same process asks directly, with `take_ended_loads` and `take_ended_stores`.
  It is also told what the last report says, because that report may still be under way.
- `take_losses` stands in for a report that could not be made.
"""

from __future__ import annotations

from collections import deque

from kv_offload.messages import JobResult, LoadJob, OffloadWorkerMetadata
from kv_offload.metrics import OffloadStats

REMEMBERED_LOSSES = 1024
"""Lost loads kept for a drain, which must name those whose report is still under way."""


class Reports:
    """What ended on this rank, until it was told."""

    def __init__(self, rank: int) -> None:
        self._ranks = frozenset({rank})
        self._rank = rank
        self._stats = OffloadStats()
        # Stores that ended since the last report, and those that the last report names.
        self._stores: dict[int, JobResult] = {}
        self._stores_in_report: dict[int, JobResult] = {}
        # Requests whose asynchronous loads ended; the value is the load if it failed. vLLM has not
        # been told.
        self._received: dict[str, LoadJob | None] = {}
        # Of the requests that vLLM was told of last, those whose loads ended well.
        self._received_in_report: set[str] = set()
        # Requests whose asynchronous loads failed. Our scheduler has not been told.
        self._failed_requests: set[str] = set()
        # Synchronous loads that ended, and those that were lost. Our scheduler has not been told.
        self._synchronous: set[int] = set()
        self._lost: set[int] = set()
        self._loss_in_report = False
        self._lost_lately: deque[int] = deque(maxlen=REMEMBERED_LOSSES)
        # What the scheduler was told last.
        self._ready_slots_told = 0
        self._weight_loads_told = 0

    # -- what happens --------------------------------------------------------------------------

    def result(self, *, ok: bool) -> JobResult:
        """Return how a store ended on this rank."""
        return JobResult(self._ranks, ok)

    def store_ended(self, job_id: int, *, ok: bool) -> None:
        """Take in that a store has ended."""
        self._stores[job_id] = self.result(ok=ok)

    def load_starts(self, job: LoadJob) -> None:
        """Take in that an asynchronous load starts: what was told last is of an earlier one."""
        self._received_in_report.discard(job.request_id)

    def load_ended(self, job: LoadJob, *, failed: bool) -> None:
        """Take in that an asynchronous load has ended."""
        if failed:
            self._received[job.request_id] = job
            self._failed_requests.add(job.request_id)
        else:
            self._received.setdefault(job.request_id, None)

    def synchronous_load_ended(self, job: LoadJob) -> None:
        """Take in that nothing copies to the blocks of a synchronous load any more."""
        self._synchronous.add(job.job_id)

    def load_lost(self, job: LoadJob) -> None:
        """Take in that a forward read what this load had not brought: its request must end.

        The scheduler hears so in the report of that very step. The load itself ends when its
        copies do.
        """
        self._lost.add(job.job_id)
        self._lost_lately.append(job.job_id)

    def count(self, name: str, amount: float) -> None:
        """Add to a metric."""
        self._stats.count(name, amount)

    # -- the end of a step ---------------------------------------------------------------------

    def take_received(self) -> tuple[set[str], dict[str, LoadJob]]:
        """Return the requests whose loads ended, each once, and the loads of those that failed."""
        received, self._received = self._received, {}
        failed = {request: job for request, job in received.items() if job is not None}
        self._received_in_report = received.keys() - failed.keys()
        return set(received), failed

    def received_were_not_told(self) -> None:
        """Take in that an error kept `take_received` from telling vLLM anything in this step."""
        self._received_in_report = set()

    def take_report(
        self,
        *,
        load_speed: float | None,
        store_speed: float | None,
        ready_slots: int,
        weight_loads: int,
    ) -> OffloadWorkerMetadata | None:
        """Return what the scheduler must know; None where nothing happened.

        `ready_slots` and `weight_loads` are as of now, and told where they have grown.
        """
        stores, self._stores = self._stores, {}
        synchronous, self._synchronous = self._synchronous, set()
        failed, lost = self._take_failed_and_lost()
        self._stores_in_report = stores
        ready = {}
        if ready_slots > self._ready_slots_told:
            ready = {self._rank: ready_slots}
            self._ready_slots_told = ready_slots
        weights = {}
        if weight_loads > self._weight_loads_told:
            weights = {self._rank: weight_loads}
            self._weight_loads_told = weight_loads
        loads = dict.fromkeys(synchronous, self._ranks)
        store_speeds = {} if store_speed is None else {self._rank: store_speed}
        if not (
            stores or failed or loads or lost or load_speed or ready or store_speeds or weights
        ):
            return None
        return OffloadWorkerMetadata(
            stores, failed, loads, lost, load_speed, ready, store_speeds, weights
        )

    def take_losses(self) -> OffloadWorkerMetadata | None:
        """Return what cannot wait for the next report: which loads did not bring what they should.

        In this step vLLM hears that those loads have ended, and takes in the tokens that were
        computed with them.
        """
        failed, lost = self._take_failed_and_lost()
        if not (failed or lost):
            return None
        return OffloadWorkerMetadata(failed_loads=failed, lost_loads=lost)

    def _take_failed_and_lost(self) -> tuple[frozenset[str], frozenset[int]]:
        failed, self._failed_requests = self._failed_requests, set()
        lost, self._lost = self._lost, set()
        self._loss_in_report = bool(lost)
        return frozenset(failed), frozenset(lost)

    # -- between steps -------------------------------------------------------------------------

    def take_ended_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads ended well and that a scheduler in this process awaits.

        First those that no report will name any more, then those that the last report names: that
        may be the report of a step that has only been launched.
        """
        ended = {request for request, failed in self._received.items() if failed is None}
        for request in ended:
            del self._received[request]
        reported, self._received_in_report = self._received_in_report, set()
        return ended, reported

    def take_ended_stores(self) -> dict[int, JobResult]:
        """Return the stores that ended, those of the last report included.

        None while the last report or the next one says that a load was lost: first the scheduler
        must distrust what was computed with that load, and a store may hold it.
        """
        if self._lost or self._loss_in_report:
            return {}
        results = self._stores_in_report | self._stores
        self._stores_in_report, self._stores = {}, {}
        return results

    def forgive_failed_loads(self) -> None:
        """Name failed loads to vLLM as ended only: whoever drains takes their blocks back."""
        self._received = dict.fromkeys(self._received)

    @property
    def lost_lately(self) -> frozenset[int]:
        """Loads that were lost, told or not: a report of them may be under way."""
        return frozenset(self._lost_lately)

    def take_stats(self) -> OffloadStats | None:
        """Return the metrics counted since the last call; None where nothing was counted."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats
