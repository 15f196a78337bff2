"""Builds the scheduler's half of the plugin, and has the copies of a step planned in order."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, KeyMaker, PrefixMap
from kv_offload.config import OffloadConfig
from kv_offload.engine import BlockPool, StepOutput
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, StoreJob
from kv_offload.metrics import OffloadStats
from kv_offload.scheduler.admissions import Admissions
from kv_offload.scheduler.contents import Contents
from kv_offload.scheduler.ends import Ends
from kv_offload.scheduler.load_jobs import LoadJobs
from kv_offload.scheduler.loads import LoadChoice, LoadMode
from kv_offload.scheduler.lookups import Lookups
from kv_offload.scheduler.progress import Progress
from kv_offload.scheduler.reports import Reports
from kv_offload.scheduler.request import RequestTable
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.steps import StepWatch
from kv_offload.scheduler.stores.budget import StoreBudget
from kv_offload.scheduler.stores.leftovers import Leftovers
from kv_offload.scheduler.stores.planner import StorePlanner


class OffloadScheduler:
    """Lives on the engine's one scheduling thread; the connector's hooks call it and its parts.

    Built when the block sizes and the number of slots are final: `num_slots` is what the smallest
    rank holds. No slot is used before `ranks_ready` has heard of all ranks.
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
    ) -> None:
        self._num_ranks = num_ranks
        self._slot_bytes = slot_bytes
        self.requests = RequestTable()
        self.manager = CacheManager(make_policy(config.eviction_policy, num_slots))
        self.prefixes = PrefixMap(groups, pool.hash_block_size, make_key)
        self.statistics = Statistics(self.manager, self._read_gauges)
        self.watch = StepWatch()
        self.lookups = Lookups(self.prefixes, self.manager)
        self.loads = LoadJobs(self.prefixes, self.manager, pool.null_block.block_id, num_ranks)
        self.load_choice = LoadChoice(
            config.load_or_recompute, slot_bytes, self.watch, self.loads.queue
        )
        self.load_mode = LoadMode(slot_bytes, self.watch)
        self.admissions = Admissions(
            self.requests,
            self.prefixes,
            self.lookups,
            self.load_choice,
            self.load_mode,
            self.loads,
            self.statistics,
        )
        self.budget = StoreBudget(slot_bytes, config.max_pinned_share, self.requests)
        self.stores = StorePlanner(
            self.prefixes,
            self.manager,
            pool,
            num_ranks,
            self.budget,
            self.statistics,
            prompt_only=config.store_blocks == "prompt",
            after_uses=config.store_after_uses,
        )
        self.leftovers = Leftovers(self.stores, self.statistics)
        self.progress = Progress(self.requests, self.stores.candidates)
        self.ends = Ends(
            self.requests,
            self.lookups,
            self.loads,
            self.stores,
            self.leftovers,
            pool,
            self.statistics,
        )
        self.contents = Contents(self.manager, self.leftovers, keeps_on_sleep=config.keep_on_sleep)
        self.reports = Reports(
            self.requests,
            self.loads,
            self.stores,
            self.watch,
            self.budget,
            self.contents,
            self.statistics,
            self.ranks_ready,
        )
        self._ready_slots: dict[int, int] = {}
        self._grown_blocks = 0
        self._idle_loaded: set[str] = set()
        self.stranded: set[str] = set()
        """Loaded requests that two steps have not run, though nothing else is under way.

        Not one step: the engine admits nothing in a step that preempts."""
        self.ranks_ready({})

    def ranks_ready(self, ready_slots: Mapping[int, int]) -> None:
        """Use slots whose memory is ready on every rank; `ready_slots` has news by rank.

        Memory that is ready stays so. News that says less is older: vLLM asks for a rank's capacity
        again when it wakes up, while a report of more may have been read.
        """
        for rank, slots in ready_slots.items():
            self._ready_slots[rank] = max(slots, self._ready_slots.get(rank, 0))
        known = len(self._ready_slots) == self._num_ranks
        usable = min(self._ready_slots.values()) if known else 0
        self.manager.limit_slots(min(usable, self.manager.num_slots))

    def build_metadata(self, output: StepOutput) -> OffloadMetadata:
        """Plan the stores of this step's requests; return them with the loads planned before.

        If it raises, `metadata_without_new_stores` must follow: the engine counts on the loads, and
        the step has begun.
        """
        self.load_mode.next_step()
        self.budget.next_step(
            load_seconds=self.load_choice.queued_seconds(), grown_blocks=self._grown_blocks
        )
        self.stores.candidates.next_step()
        self.stores.give_up_late()
        self.leftovers.examine()
        self._grown_blocks = self.progress.follow(output)
        self.stores.pin_chosen()
        idle = not output.num_scheduled_tokens and self._is_still
        self.leftovers.settle(idle=idle)
        loaded = self.reports.loaded() if idle and not self.has_pending_stores else set()
        self.stranded, self._idle_loaded = loaded & self._idle_loaded, loaded
        return self._begin_step(output, self.stores.jobs.take_planned())

    def metadata_without_new_stores(self, output: StepOutput) -> OffloadMetadata:
        """Return the plan of a step for which `build_metadata` failed."""
        self.stranded = set()
        return self._begin_step(output, ())

    def _begin_step(self, output: StepOutput, stores: tuple[StoreJob, ...]) -> OffloadMetadata:
        # Last, and nothing here raises: what has been taken must be sent.
        self.watch.begin(output, loads=self.loads.running > 0, waits=self.loads.plans_synchronous)
        return OffloadMetadata(stores, self.loads.take_planned(), self.requests.admissions)

    def lose(self, report: OffloadWorkerMetadata) -> set[str] | None:
        """Hear what a report says was lost, before the engine takes in the tokens of its step.

        Returns the requests that computed with it: the engine must end them, and know no block by
        its key any more. None if nothing was lost.
        """
        if report.cut_short is not None:
            self.watch.forget()
        return self.ends.lose(report.lost_loads, report.cut_short)

    def engine_was_reset(self) -> None:
        """Hear that the engine's own cache is empty, and that no request has blocks."""
        self.contents.engine_was_reset()
        self.requests.engine_was_reset()

    @property
    def _is_still(self) -> bool:
        """Whether no step that computes something is under way, and no load."""
        return not self.loads.running and not any(
            tracked.request.num_in_flight_tokens
            for tracked in self.requests
            if tracked.cursor is not None
        )

    def others_load_failed(self) -> None:
        """Let nothing become readable that may hold what another connector failed to load."""
        self.stores.jobs.distrust()

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping for a job to be planned, submitted or reported."""
        return self.has_pending_stores or len(self.leftovers) > 0 or self.loads.awaits_report

    @property
    def has_pending_stores(self) -> bool:
        """Whether a store has not ended on all ranks, so that it pins GPU blocks."""
        return self.stores.jobs.pending

    def take_stats(self) -> OffloadStats | None:
        """Return what was counted since the last call; None if nothing was."""
        return self.statistics.take(idle=not self.requests.admitted)

    def _read_gauges(self) -> dict[str, float]:
        return {
            "slots": self.manager.usable_slots,
            "slots_in_use": self.manager.slots_in_use,
            "pool_slots": self.manager.num_slots,
            "slot_bytes": self._slot_bytes,
            "running_loads": self.loads.running,
            "running_stores": self.stores.jobs.running,
            "oldest_copy_seconds": self._oldest_copy_seconds,
            "pinned_blocks": self.stores.jobs.pinned_blocks,
            "waiting_slots": self.leftovers.slots,
            **self.watch.gauges(),
        }

    @property
    def _oldest_copy_seconds(self) -> float:
        sent = (self.loads.oldest_sent, self.stores.jobs.oldest_sent)
        oldest = min((moment for moment in sent if moment is not None), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself; tests call it each step."""
        self.requests.check_integrity()
        self.lookups.check_integrity()
        self.manager.check_integrity()
        held = sum(tracked.held is not None for tracked in self.requests)
        assert held == self.loads.running_asynchronous
