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
from collections.abc import Set

from kv_offload.messages import JobResult, LoadJob, OffloadWorkerMetadata
from kv_offload.metrics import OffloadStats

REMEMBERED_LOSSES = 1024
"""Lost loads kept for a drain, which must name those whose report is still under way."""


class Reports:
    """What ended on this rank, until it was told."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stats = OffloadStats()
        # What our scheduler has not been told.
        self._stores: dict[int, JobResult] = {}
        self._loads: dict[int, frozenset[int]] = {}
        self._failed_loads: set[str] = set()
        self._lost_loads: set[int] = set()
        self._cut_short: int | None = None
        # What it was told last of stores, and whether it was told of a loss.
        self._last_stores: dict[int, JobResult] = {}
        self._told_loss = False
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
        self._stores[job_id] = self.result(ok=ok)

    def load_starts(self, job: LoadJob) -> None:
        """Take in that an asynchronous load starts: what was told last is of an earlier one."""
        self._last_received.discard(job.request_id)

    def load_ended(self, job: LoadJob, *, failed: bool) -> None:
        """Take in that an asynchronous load has ended."""
        if failed:
            self._received[job.request_id] = job
            self._failed_loads.add(job.request_id)
        else:
            self._received.setdefault(job.request_id, None)

    def synchronous_load_ended(self, job: LoadJob) -> None:
        """Take in that nothing copies to the blocks of a synchronous load any more."""
        self._loads[job.job_id] = frozenset({self._rank})

    def load_lost(self, job: LoadJob) -> None:
        """Take in that a forward read what this load had not brought: its request must end.

        The report of this very step says so. The load itself ends when its copies do.
        """
        self._lost_loads.add(job.job_id)
        self._lost_lately.append(job.job_id)

    def step_cut_short(self, admissions: int) -> None:
        """Take in that an error of the engine cut a step short, which had so many `admissions`."""
        self._cut_short = admissions

    def count(self, name: str, amount: float) -> None:
        """Add to a metric."""
        self._stats.count(name, amount)

    def load_copied(self, nbytes: int, seconds: float) -> None:
        """Count a load whose copies ended well, once: of all ranks only the first does."""
        if self._rank == 0:
            self._stats.observe("load_bytes", nbytes)
            self._stats.observe("load_seconds", seconds)

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
        self._last_stores, self._stores = self._stores, {}
        loads, self._loads = self._loads, {}
        failed, lost, cut_short = self._take_losses()
        ready = self._if_grown("ready_slots", ready_slots)
        weights = self._if_grown("weight_loads", weight_loads)
        stores, is_cut_short = self._last_stores, cut_short is not None
        news = (stores, loads, failed, lost, is_cut_short, load_speed, store_speed, ready, weights)
        if not any(news):
            return None  # as in most steps
        return OffloadWorkerMetadata(
            stores=stores,
            failed_loads=failed,
            loads=loads,
            lost_loads=lost,
            cut_short=cut_short,
            load_bytes_per_second=load_speed,
            ready_slots=ready,
            store_bytes_per_second={} if store_speed is None else {self._rank: store_speed},
            weight_loads=weights,
        )

    def _take_losses(self) -> tuple[frozenset[str], frozenset[int], int | None]:
        """Return the loads that failed and that were lost, and a step that was cut short."""
        failed, lost = frozenset(self._failed_loads), frozenset(self._lost_loads)
        cut_short, self._cut_short = self._cut_short, None
        self._failed_loads.clear()
        self._lost_loads.clear()
        self._told_loss = bool(lost) or cut_short is not None
        return failed, lost, cut_short

    def _if_grown(self, name: str, value: int) -> dict[int, int]:
        if value <= self._told[name]:
            return {}
        self._told[name] = value
        return {self._rank: value}

    def take_losses(self) -> OffloadWorkerMetadata | None:
        """Return what cannot wait for the next report: loads that failed, and all that was lost.

        In this step vLLM takes in the tokens that were computed with them.
        """
        failed, lost, cut_short = self._take_losses()
        if not (failed or lost or cut_short is not None):
            return None
        return OffloadWorkerMetadata(failed_loads=failed, lost_loads=lost, cut_short=cut_short)

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

        Empty while the last report or the next one says that a load was lost or a step cut short:
        first the scheduler must distrust what was computed with it, and a store may hold that.
        """
        if self._lost_loads or self._told_loss or self._cut_short is not None:
            return {}
        results = self._last_stores | self._stores
        self._last_stores, self._stores = {}, {}  # not cleared: a report may hold the first
        return results

    def forgive_failed_loads(self, requests: Set[str]) -> None:
        """Name failed loads of these requests to vLLM as ended only: it takes their blocks back."""
        self._received |= dict.fromkeys(self._received.keys() & requests)

    @property
    def lost_lately(self) -> frozenset[int]:
        """Loads that were lost, told or not: a report of them may be under way."""
        return frozenset(self._lost_lately)

    def take_stats(self) -> OffloadStats | None:
        """Return the metrics counted since the last call; None where nothing was counted."""
        return self._stats.take()
