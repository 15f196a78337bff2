"""The scheduler's half of the plugin: what the engine's hooks call, and one step in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, KeyMaker, PrefixMap
from kv_offload.cache.retention import Retention
from kv_offload.config import OffloadConfig
from kv_offload.engine import AllocatedBlocks, BlockPool, Request, StepOutput
from kv_offload.messages import (
    OffloadMetadata,
    OffloadWorkerMetadata,
    Outcome,
    StoreJob,
    WorkerCapacity,
)
from kv_offload.metrics import OffloadStats
from kv_offload.scheduler.events.announcer import Announcement, Announcer
from kv_offload.scheduler.events.records import Describe
from kv_offload.scheduler.jobs import Job, Jobs
from kv_offload.scheduler.loads.admissions import Admissions
from kv_offload.scheduler.loads.choice import LoadChoice
from kv_offload.scheduler.loads.lookups import Lookups
from kv_offload.scheduler.loads.mode import LoadMode
from kv_offload.scheduler.losses import computed_with
from kv_offload.scheduler.other_sizes import OtherSizes
from kv_offload.scheduler.request import Phase, RequestTable, TrackedRequest
from kv_offload.scheduler.spans import ReportSpan, Spans
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.planner import StorePlanner
from kv_offload.scheduler.timing import StepWatch
from kv_offload.scheduler.trace_recorder import TraceRecorder

logger = logging.getLogger(__name__)

RECORD_SECONDS = 5.0
"""Bound of the wait for what is still to be recorded at the end."""


class OffloadScheduler:
    """Lives on the engine's one scheduling thread. Hooks call its methods, and none of its parts.

    Built when the block sizes and the number of slots are final: `num_slots` is what the smallest
    rank holds. No slot is used before `take_capacities` has heard of all ranks. `slot_bytes` is
    what a slot takes on one rank, and `block_bytes` what its block takes on the GPU, if that is
    more: speeds of loads and stores are in bytes of blocks. `loads_overlap` says that a load runs
    while the steps under way compute. With `describe` routers are told what becomes readable and
    what is forgotten (`take_announcements`). A `recorder` hears of requests that end; it is closed
    with the scheduler's half. `report_span` is told of look-ups and loads.

    A job lives from its plan until every rank has ended it. Ranks may be asked at any time, and may
    tell of a job twice. What the engine has to do then waits until it is taken: `take_lost`,
    `take_failed` and `take_loaded` return each request once.
    """

    def __init__(
        self,
        config: OffloadConfig,
        groups: Sequence[CacheGroup],
        pool: BlockPool,
        num_slots: int,
        slot_bytes: int,
        num_ranks: int,
        make_key: KeyMaker,
        *,
        block_bytes: int | None = None,
        loads_overlap: bool = False,
        describe: Describe | None = None,
        recorder: TraceRecorder | None = None,
        report_span: ReportSpan | None = None,
    ) -> None:
        self.config = config
        self.loads_overlap = loads_overlap
        self._num_ranks = num_ranks
        self._slot_bytes = slot_bytes
        self._block_bytes = block_bytes = block_bytes or slot_bytes
        self.manager = manager = CacheManager(make_policy(config.eviction_policy, num_slots))
        self._jobs = jobs = Jobs(manager, pool, num_ranks)
        self._statistics = statistics = Statistics(manager, self.gauges)
        self._requests = requests = RequestTable(statistics)
        shares = config.max_retained_share, config.max_retained_share_per_salt
        self._retention = retention = Retention(manager, *shares, statistics.count)
        self.watch = StepWatch()
        self._prefixes = prefixes = PrefixMap(groups, pool.hash_block_size, make_key)
        self._announcer = Announcer(manager, prefixes, describe) if describe else None
        self._recorder, self._hash_block_tokens = recorder, pool.hash_block_size
        self._spans = Spans(report_span)
        self._lookups = Lookups(prefixes, manager)
        self._other_sizes = OtherSizes(config, prefixes, num_slots, self._statistics)
        mode = config.load_or_recompute
        self._choice = LoadChoice(mode, block_bytes, self.watch, jobs.queue)
        self._mode = LoadMode(block_bytes, self.watch, overlaps=loads_overlap)
        self._admissions = Admissions(
            requests,
            prefixes,
            manager,
            self._lookups,
            self._choice,
            self._mode,
            jobs,
            statistics,
            retention,
            self._other_sizes,
            pool.null_block.block_id,
        )
        self._stores = StorePlanner(
            config,
            requests,
            prefixes,
            manager,
            pool,
            jobs,
            statistics,
            retention,
            block_bytes,
            self._announcer,
        )
        self._ready_slots: dict[int, int] = {}
        self._weight_loads: dict[int, int] = {}
        self._weights_changed = False
        self.falls_asleep = False
        """Set while the engine resets everything for a sleep that host memory is to outlive."""
        manager.limit_slots(0)
        self.is_to_rest: Callable[[], bool] = lambda: False
        """Whether the engine is to come to rest soon: its user has paused it, or it ends."""
        self.wake: Callable[[], None] | None = None
        """Has an engine that rests look again for work, from any thread; None if it cannot."""
        self._idle_loaded: set[str] = set()
        self.stranded: set[str] = set()
        """Loaded requests that two steps have not run, though nothing else is under way.

        Not one step: the engine admits nothing in a step that preempts."""
        # What ranks have told and the engine has not been told.
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._lost_loads: list[Job] = []
        self._step_is_lost = False

    # -- requests ------------------------------------------------------------------------------

    def match(
        self, request: Request, num_computed_tokens: int, *, brought: bool = False
    ) -> tuple[int | None, bool]:
        """See `Admissions.match`.

        `brought` says that others bring the first tokens of the request. Once it has had blocks
        that may be over.
        """
        tracked = self._requests.track(request)
        tracked.brought = brought and tracked.cursor is None
        self._spans.asked(tracked)
        return self._admissions.match(tracked, num_computed_tokens)

    def shared_tokens(self, request: Request) -> int:
        """Return where windows and states should be kept for others that share its prefix; or 0."""
        return self._requests.track(request).shared_tokens

    def allocated(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """See `Admissions.allocated`."""
        tracked = self._requests.track(request)
        answer = tracked.answer
        self._admissions.allocated(tracked, blocks, num_external_tokens)
        self._spans.admitted(tracked, answer, num_external_tokens)

    def allocation_failed(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """See `Admissions.allocation_failed`."""
        tracked = self._requests.track(request)
        self._admissions.allocation_failed(tracked, blocks, num_external_tokens)

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plan the stores of what a request leaves behind, just before its blocks are freed."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._end_request(tracked)
        if tracked.cursor is None or tracked.loaded is not None:
            return  # nothing of it was computed
        # Steps in flight are executed before what is planned now is submitted, so all that is
        # computed at their end counts; drafts and placeholders have no hashes.
        end_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._other_sizes.ended(request, end_tokens)
        if self._recorder is not None:
            self._recorder.record(request, self._hash_block_tokens)
        self._stores.request_ends(tracked.cursor, block_ids, end_tokens)

    def forget(self, request_id: str) -> None:
        """End a request without storing what it leaves behind."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._end_request(tracked)

    def _end_request(self, tracked: TrackedRequest) -> None:
        self._lookups.arrived(tracked)
        self._requests.end(tracked)

    # -- steps ---------------------------------------------------------------------------------

    def plan_step(self, output: StepOutput) -> OffloadMetadata:
        """Plan the stores of this step's requests; return them with the loads planned before.

        If it raises, `plan_without_stores` must follow: the engine counts on the loads, and the
        step has begun.
        """
        self._jobs.step_time.next_step()
        self._mode.next_step()
        self._retention.expire()
        idle = not output.num_scheduled_tokens and self._is_still
        load_seconds = self._choice.queued_seconds()
        self._stores.plan_step(output, load_seconds=load_seconds, idle=idle)
        loaded = self.loaded_requests() if idle and not self._jobs.pinned_blocks else set()
        self.stranded, self._idle_loaded = loaded & self._idle_loaded, loaded
        return self._begin_step(output, self._jobs.send_stores())

    def plan_without_stores(self, output: StepOutput) -> OffloadMetadata:
        """Return the plan of a step for which `plan_step` failed."""
        self.stranded = set()
        return self._begin_step(output, ())

    def _begin_step(self, output: StepOutput, stores: tuple[StoreJob, ...]) -> OffloadMetadata:
        # Last, and nothing here raises: what has been taken must be sent.
        jobs = self._jobs
        self._lookups.budget.next_step()
        self._choice.next_step()
        self.watch.begin(output, loads=jobs.running_loads > 0, waits=jobs.plans_synchronous)
        return self._make_plan(stores)

    def _make_plan(self, stores: tuple[StoreJob, ...]) -> OffloadMetadata:
        jobs = self._jobs
        moves = jobs.send_moves()
        loads = jobs.send_loads()
        known, admissions = jobs.take_known(), self._requests.admissions
        return OffloadMetadata(stores, loads, jobs.next_job_id, known, admissions, moves)

    @property
    def _is_still(self) -> bool:
        """Whether no step that computes something is under way, and no load."""
        return not self._jobs.running_loads and not any(
            tracked.request.num_in_flight_tokens
            for tracked in self._requests
            if tracked.cursor is not None
        )

    def step_ended(self) -> None:
        """Hear that the engine has taken in the oldest step under way."""
        self.watch.end()

    # -- reports -------------------------------------------------------------------------------

    def take_report(self, report: OffloadWorkerMetadata) -> None:
        """Take in what ranks tell, before the engine takes in the tokens of the step they tell of.

        To hear of a job again changes nothing. What they computed wrongly cannot be readable yet: a
        store ends in a later step than the forward whose KV it copies.
        """
        ended, lost = self._jobs.hear(report.ranks)
        for told in report.ranks.values():
            if told.cut_short is not None:
                self.watch.forget()
                self._step_is_lost |= told.cut_short > self._requests.admissions_at_reset
        self._lost_loads += lost
        if self._lost_loads or self._step_is_lost:
            self._jobs.distrust_stores(ended)
        for job in ended:
            self._survive(self._end_job, job)
        self._survive(self._learn, report)

    def _survive(self, take: Callable[[Any], None], part: Any) -> None:
        """Take in a part of a report; an error in it keeps nobody from the others."""
        try:
            take(part)
        except Exception:
            self._statistics.count("hook_errors", 1)
            logger.exception("kv-offload: an error in a part of a report. Please report this")

    def _end_job(self, job: Job) -> None:
        """End a job that every rank has ended."""
        ok = job.outcome is Outcome.OK
        if job.request is not None and not job.synchronous:
            job.request.load_ended(ok=ok)
            self._loaded.add(job.request.request_id)
            if not ok:
                self._failed.add(job.request.request_id)
                self._statistics.count("failed_loads", 1)
        if job.is_store and ok:
            refused: Sequence[Any] = ()
            if job.failed_rows:
                refused = self.manager.keys_of(job.slots[job.failed])
            self._stores.stored(len(job.slots), refused)
        elif job.is_store:
            self._statistics.skipped("copy_failed", len(job.slots))
        self._jobs.release(job)
        self._spans.ended(job)
        if job.is_store:
            self._retention.stored(job.slots)

    def _learn(self, report: OffloadWorkerMetadata) -> None:
        told = {rank: news.load_bytes_per_second for rank, news in report.ranks.items()}
        self.watch.load_rate.hear(told)
        for rank, news in report.ranks.items():
            if news.store_bytes_per_second is not None:
                self._stores.budget.learn(news.store_bytes_per_second, rank)
            if news.ready_slots is not None:
                self._use_ready_slots({rank: news.ready_slots})
            if news.weight_loads is not None:
                self.weights_were_loaded({rank: news.weight_loads})

    def take_loaded(self) -> set[str]:
        """Return the requests whose asynchronous loads have ended, well or not, each once.

        One whose load has failed only after `take_failed` has returned it: the engine must not take
        it for loaded.
        """
        loaded = self._loaded - self._failed
        self._loaded &= self._failed
        return loaded

    @property
    def has_loaded(self) -> bool:
        """Whether an asynchronous load has ended, well or not, that `take_loaded` has not told."""
        return bool(self._loaded)

    def take_failed(self) -> set[str]:
        """Return those of them whose loads have failed, each once."""
        failed, self._failed = self._failed, set()
        return failed

    def take_lost(self) -> set[str] | None:
        """Return the requests that have computed with wrong KV by now; None where none was.

        Those of synchronous loads that a forward read before they were there, and all that share
        their blocks or what was computed with them. After a step that was cut short any named block
        may be one that nobody computed, so that is all requests with blocks; none if the engine's
        own cache has been emptied since. The engine must end them, and know no block by its key any
        more, before it takes in the output of that forward. Nothing of them is stored any more.
        """
        loads, self._lost_loads = self._lost_loads, []
        step_is_lost, self._step_is_lost = self._step_is_lost, False
        if not loads and not step_is_lost:
            return None
        self._jobs.distrust_stores()  # also what was planned since the loss was heard of
        lost = computed_with(self._requests, loads) if loads else set()
        if step_is_lost:
            lost |= {tracked for tracked in self._requests if tracked.cursor is not None}
        # An aborted request has left the table, where another may have its name by now.
        alive = [tracked for tracked in lost if tracked.phase is not Phase.ENDED]
        for tracked in alive:
            self._end_request(tracked)
        self._statistics.count("lost_requests", len(alive))
        return {tracked.request_id for tracked in lost}

    def others_load_failed(self) -> None:
        """Let nothing become readable that may hold what another connector failed to load."""
        self._jobs.distrust_stores()

    # -- between steps -------------------------------------------------------------------------

    def plan_drain(self) -> OffloadMetadata:
        """Return the plan with which ranks end all copies, between two steps."""
        return self._make_plan(self._jobs.send_stores())

    def give_up_stores(self) -> int:
        """Release the blocks of the stores that have not ended; return how many these are."""
        return self._jobs.give_up_stores()

    def loading_requests(self) -> set[str]:
        """Return the requests, also ended ones, of asynchronous loads that have not ended."""
        return self._jobs.loading_requests()

    def abandoned_requests(self) -> set[str]:
        """Return those of them that have ended: the engine holds their blocks."""
        return {name for name in self._jobs.loading_requests() if self._requests.get(name) is None}

    def waiting_requests(self) -> set[str]:
        """Return the requests that may wait for a load of ours, or for their turn after it."""
        return {tracked.request_id for tracked in self._requests if tracked.loaded is not None}

    def loaded_requests(self) -> set[str]:
        """Return the requests whose loads have ended, and that have not been scheduled since."""
        return {tracked.request_id for tracked in self._requests if tracked.is_loaded}

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping: for a job, for routers, or for its figures."""
        jobs, leftovers, announcer = self._jobs, self._stores.leftovers, self._announcer
        if announcer is not None and announcer.has_more:
            return True
        if self._other_sizes.has_turns and not self._requests.admitted:
            return True
        return jobs.pinned_blocks > 0 or leftovers.slots > 0 or jobs.awaits_synchronous

    @property
    def awaits_ranks(self) -> bool:
        """Whether some rank has not told of the end of a job."""
        return self._jobs.any_running

    @property
    def has_pending_stores(self) -> bool:
        """Whether a store pins GPU blocks."""
        return self._jobs.pinned_blocks > 0

    def pinned_blocks(self) -> set[int]:
        """Return the GPU blocks that stores pin."""
        return set(self._jobs.pinned())

    @property
    def num_requests(self) -> int:
        """Requests that were looked up and have not ended."""
        return len(self._requests)

    @property
    def holds_idle_blocks(self) -> bool:
        """Whether a store alone keeps some GPU block from being free."""
        return self._jobs.holds_idle_blocks

    # -- host memory ---------------------------------------------------------------------------

    def take_capacities(self, capacities: Sequence[WorkerCapacity]) -> None:
        """Hear what ranks hold, at the start or later."""
        if not all(rank.synchronous_loads for rank in capacities):
            self.allows_synchronous_loads = False
        self._use_ready_slots({rank.rank: rank.ready_slots for rank in capacities})

    @property
    def allows_synchronous_loads(self) -> bool:
        """Whether a load may be synchronous: not if compute cannot wait for it on some rank."""
        return self._mode.allowed

    @allows_synchronous_loads.setter
    def allows_synchronous_loads(self, allows: bool) -> None:
        self._mode.allowed = allows

    def _use_ready_slots(self, ready_slots: Mapping[int, int]) -> None:
        """Use slots whose memory is ready on every rank; `ready_slots` has news by rank.

        Memory that is ready stays so. News that says less is older: vLLM asks for a rank's capacity
        again when it wakes up, while a report of more may have been read.
        """
        for rank, slots in ready_slots.items():
            self._ready_slots[rank] = max(slots, self._ready_slots.get(rank, 0))
        known = len(self._ready_slots) == self._num_ranks
        usable = min(self._ready_slots.values()) if known else 0
        self.manager.limit_slots(min(usable, self.manager.num_slots))

    def _forget_all(self, *, weights_changed: bool) -> bool:
        """Empty host memory, with what waits to be stored; return whether it held anything.

        Running copies end on their own and leave nothing.
        """
        held = self.manager.slots_in_use > 0
        self._retention.drop()
        self.manager.reset()
        self._other_sizes.reset()
        self._stores.forget(weights_changed=weights_changed)
        return held

    def reset(self) -> None:
        """Empty host memory, unless the engine `falls_asleep`."""
        if not self.falls_asleep:
            self._forget_all(weights_changed=False)

    @property
    def is_settled(self) -> bool:
        """Whether no later process can find what was forgotten, without `settle`."""
        return True

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        """See `Tier.settle`: between two steps, before the caller hears that all is forgotten."""
        return True

    def pause_stores(self, *, paused: bool) -> None:
        """Store nothing new until stores are resumed."""
        self._stores.pause(paused=paused)

    def weights_change(self) -> bool:
        """Forget all, since the weights may be about to change, and at the next reset again.

        Until then the engine's own cache may serve blocks of the old weights, which are stored.
        Returns whether there was anything to forget.
        """
        self._weights_changed = True
        return self._forget_all(weights_changed=True)

    def weights_were_loaded(self, weight_loads: Mapping[int, int]) -> None:
        """Hear how often each rank's model has been given weights since the start.

        A count that was heard before, or is older than that, changes nothing: it may come from
        several sides, and with a report that was on its way during a reset.
        """
        news = [r for r, loads in weight_loads.items() if loads > self._weight_loads.get(r, 0)]
        if news:
            self._weight_loads.update({rank: weight_loads[rank] for rank in news})
            if self.weights_change():
                logger.info("kv-offload: host memory emptied: the model was given weights")

    def engine_was_reset(self) -> None:
        """Hear that the engine's own cache is empty, and that no request has blocks."""
        if self._weights_changed:
            self._forget_all(weights_changed=True)
            self._weights_changed = False
        self._requests.engine_was_reset()
        if self._announcer is not None:
            self._announcer.engine_was_reset()

    def close(self) -> None:
        """Hear that the engine ends."""
        if self._recorder is not None:
            self._recorder.close(RECORD_SECONDS)

    def take_announcements(self) -> list[Announcement]:
        """Return what routers are to be told now of host memory; called in every step."""
        return [] if self._announcer is None else self._announcer.take()

    # -- figures -------------------------------------------------------------------------------

    def take_stats(self, errors: int = 0, *, at_once: bool = False) -> OffloadStats | None:
        """Return what was counted since the last call, and `errors` of hooks; None if nothing was.

        Of gauges those that have changed, at intervals unless `at_once` or the engine is idle.
        """
        idle = at_once or not self._requests.admitted
        self._statistics.count("hook_errors", errors)
        if self._recorder is not None:
            self._statistics.count("trace_errors", self._recorder.take_errors())
        self._other_sizes.work(idle=idle)
        return self._statistics.take(idle=idle)

    @property
    def has_told(self) -> bool:
        """Whether `take_stats` has returned all gauges once: until then they read 0."""
        return self._statistics.has_told

    def gauges(self) -> dict[str, float]:
        """Return what the gauges of `kv_offload.metrics` are now."""
        sent = self._jobs.oldest_sent
        return {
            "slots": self.manager.usable_slots,
            "slots_in_use": self.manager.slots_in_use,
            "pool_slots": self.manager.num_slots,
            "slot_bytes": self._slot_bytes,
            "block_bytes": self._block_bytes,
            "running_loads": self._jobs.running_loads,
            "running_stores": self._jobs.running_stores,
            "oldest_copy_seconds": 0.0 if sent is None else time.monotonic() - sent,
            "pinned_blocks": self._jobs.pinned_blocks,
            "waiting_slots": self._stores.leftovers.slots,
            "retained_slots": self._retention.slots,
            "stores_paused": float(self._stores.paused),
            **self.watch.gauges(),
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself; tests call it each step."""
        self._requests.check_integrity()
        self._lookups.check_integrity()
        self._jobs.check_integrity()
        self.manager.check_integrity()
        self._retention.check_integrity()
        loading = self.loading_requests()
        for tracked in self._requests:
            planned = self._jobs.has_planned_load(tracked)
            assert tracked.phase is not Phase.LOADING or planned or tracked.request_id in loading
