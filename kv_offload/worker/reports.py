"""What a rank tells of its copies, each fact once.

- At the end of a step `take_received` names the asynchronous loads that ended, for vLLM, and
  `take_report` has everything else, for our scheduler. Under asynchronous scheduling both arrive
  one or two steps later.
- A scheduler in the same process asks directly, with `take_ended_loads` and `take_ended_stores`.
  It is also told what the last report says, because that report may still be under way.
- `take_losses` stands in for a report that could not be made.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from kv_offload.messages import JobResult, LoadJob, OffloadWorkerMetadata
from kv_offload.metrics import OffloadStats

NOTHING = OffloadWorkerMetadata()
REMEMBERED_LOSSES = 1024
"""Lost loads kept for a drain, which must name those whose report is still under way."""


class Reports:
    """What ended on this rank, until it was told."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stats = OffloadStats()
        # What our scheduler has not been told, and what it was told last.
        self._next = OffloadWorkerMetadata()
        self._last = OffloadWorkerMetadata()
        # Requests whose asynchronous loads ended; the value is the load if it failed. vLLM has not
        # been told.
        self._received: dict[str, LoadJob | None] = {}
        # Of the requests that vLLM was told of last, those whose loads ended well.
        self._last_received: set[str] = set()
        self._lost_lately: deque[int] = deque(maxlen=REMEMBERED_LOSSES)
        # The most ready slots and weight loads that the scheduler was told.
        self._told = {"ready_slots": 0, "weight_loads": 0}

    def result(self, *, ok: bool) -> JobResult:
        """Return how a store ended on this rank."""
        return JobResult(frozenset({self._rank}), ok)

    def store_ended(self, job_id: int, *, ok: bool) -> None:
        """Take in that a store has ended."""
        self._next.stores[job_id] = self.result(ok=ok)

    def load_starts(self, job: LoadJob) -> None:
        """Take in that an asynchronous load starts: what was told last is of an earlier one."""
        self._last_received.discard(job.request_id)

    def load_ended(self, job: LoadJob, *, failed: bool) -> None:
        """Take in that an asynchronous load has ended."""
        if failed:
            self._received[job.request_id] = job
            failed_loads = self._next.failed_loads | {job.request_id}
            self._next = replace(self._next, failed_loads=failed_loads)
        else:
            self._received.setdefault(job.request_id, None)

    def synchronous_load_ended(self, job: LoadJob) -> None:
        """Take in that nothing copies to the blocks of a synchronous load any more."""
        self._next.loads[job.job_id] = frozenset({self._rank})

    def load_lost(self, job: LoadJob) -> None:
        """Take in that a forward read what this load had not brought: its request must end.

        The report of this very step says so. The load itself ends when its copies do.
        """
        self._next = replace(self._next, lost_loads=self._next.lost_loads | {job.job_id})
        self._lost_lately.append(job.job_id)

    def count(self, name: str, amount: float) -> None:
        """Add to a metric."""
        self._stats.count(name, amount)

    def take_received(self) -> tuple[set[str], dict[str, LoadJob]]:
        """Return the requests whose loads ended, each once, and the loads of those that failed."""
        received, self._received = self._received, {}
        failed = {request: job for request, job in received.items() if job is not None}
        self._last_received = received.keys() - failed.keys()
        return set(received), failed

    def received_were_not_told(self) -> None:
        """Take in that an error kept `take_received` from telling vLLM anything in this step."""
        self._last_received = set()

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
        self._last, self._next = self._next, OffloadWorkerMetadata()
        report = replace(
            self._last,
            load_bytes_per_second=load_speed,
            store_bytes_per_second={} if store_speed is None else {self._rank: store_speed},
            ready_slots=self._if_grown("ready_slots", ready_slots),
            weight_loads=self._if_grown("weight_loads", weight_loads),
        )
        return None if report == NOTHING else report

    def _if_grown(self, name: str, value: int) -> dict[int, int]:
        if value <= self._told[name]:
            return {}
        self._told[name] = value
        return {self._rank: value}

    def take_losses(self) -> OffloadWorkerMetadata | None:
        """Return what cannot wait for the next report: loads that failed or were lost.

        In this step vLLM takes in the tokens that were computed with them.
        """
        failed, lost = self._next.failed_loads, self._next.lost_loads
        self._next = replace(self._next, failed_loads=frozenset(), lost_loads=frozenset())
        self._last = replace(self._last, lost_loads=lost)
        report = OffloadWorkerMetadata(failed_loads=failed, lost_loads=lost)
        return None if report == NOTHING else report

    def take_ended_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads ended well and that a scheduler in this process awaits.

        First the requests that no report will name any more, then the requests that the last report
        names. It may be the report of a step that has only been launched.
        """
        ended = {request for request, failed in self._received.items() if failed is None}
        for request in ended:
            del self._received[request]
        reported, self._last_received = self._last_received, set()
        return ended, reported

    def take_ended_stores(self) -> dict[int, JobResult]:
        """Return the stores that ended, also the ones that the last report names.

        Empty while the last report or the next one says that a load was lost: first the scheduler
        must distrust what was computed with that load, and a store may hold it.
        """
        if self._next.lost_loads or self._last.lost_loads:
            return {}
        results = self._last.stores | self._next.stores
        # The last report itself may still be read: it keeps its stores.
        self._last, self._next = replace(self._last, stores={}), replace(self._next, stores={})
        return results

    def forgive_failed_loads(self) -> None:
        """Name failed loads to vLLM as ended only: who drains takes their blocks back."""
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
