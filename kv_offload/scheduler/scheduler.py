"""The scheduler's half of the plugin: follows requests, and has loads and stores planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain, compress
from typing import Any

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, KeyMaker, PrefixMap
from kv_offload.config import OffloadConfig
from kv_offload.engine import BlockPool, Request, RunningRequests, StepOutput
from kv_offload.messages import OffloadMetadata
from kv_offload.metrics import OffloadStats
from kv_offload.scheduler.admissions import Admissions
from kv_offload.scheduler.budget import StoreBudget
from kv_offload.scheduler.contents import Contents
from kv_offload.scheduler.leftovers import Leftovers
from kv_offload.scheduler.load_jobs import LoadJobs
from kv_offload.scheduler.loads import LoadChoice, LoadMode
from kv_offload.scheduler.lookups import Lookups
from kv_offload.scheduler.reports import Reports
from kv_offload.scheduler.request import Phase, RequestTable, StoreCursor, TrackedRequest
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.steps import StepWatch
from kv_offload.scheduler.stores import StorePlanner


class OffloadScheduler:
    """Lives on the engine's one scheduling thread; its methods are the connector's hooks.

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
        self._pool = pool
        self._num_ranks = num_ranks
        self._prompt_only = config.store_blocks == "prompt"
        self.requests = RequestTable()
        self.manager = CacheManager(num_slots, make_policy(config.eviction_policy, num_slots))
        self.prefixes = PrefixMap(groups, pool.hash_block_size, make_key)
        self.watch = StepWatch()
        self.lookups = Lookups(self.prefixes, self.manager)
        self.loads = LoadJobs(self.prefixes, self.manager, num_ranks)
        self.load_choice = LoadChoice(
            config.load_or_recompute, slot_bytes, self.watch, self.loads.queue
        )
        self.load_mode = LoadMode(slot_bytes, self.watch)
        self.budget = StoreBudget(slot_bytes)
        self.stores = StorePlanner(
            self.prefixes,
            self.manager,
            pool,
            num_ranks,
            self.budget,
            config.max_pinned_share,
            config.store_after_uses,
        )
        self.leftovers = Leftovers(self.stores)
        self.contents = Contents(self.manager, self.leftovers, keeps_on_sleep=config.keep_on_sleep)
        self.statistics = Statistics(
            self.manager, self.loads, self.stores, self.leftovers, self.watch, slot_bytes
        )
        self.admissions = Admissions(
            self.requests,
            self.prefixes,
            self.lookups,
            self.load_choice,
            self.load_mode,
            self.loads,
            self.statistics,
            pool.null_block.block_id,
        )
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
        # Requests that had more to store in the last step than was planned.
        self._behind: Set[str] = frozenset()
        self._grown_blocks = 0
        self.ranks_ready({})

    def ranks_ready(self, ready_slots: Mapping[int, int]) -> None:
        """Use slots whose memory is ready on every rank; `ready_slots` has news by rank."""
        self._ready_slots.update(ready_slots)
        known = len(self._ready_slots) == self._num_ranks
        usable = min(self._ready_slots.values()) if known else 0
        self.manager.limit_slots(min(usable, self.manager.num_slots))

    # -- a step --------------------------------------------------------------------------------

    def build_metadata(self, output: StepOutput) -> OffloadMetadata:
        """Plan the stores of this step's requests; return them with the loads planned before.

        A running request is looked at when it gets a block, and as long as it is behind. So a block
        that it filled in an earlier step waits for the next one: the request keeps the block
        meanwhile, and most requests of a step of decodes are not touched at all.
        """
        scheduled = output.num_scheduled_tokens
        self.load_mode.next_step()
        self.budget.next_step(
            load_seconds=self.load_choice.queued_seconds(), grown_blocks=self._grown_blocks
        )
        self.budget.anybody_runs = self.requests.admitted > 0
        self.stores.next_step()
        self.leftovers.examine()
        for new in output.scheduled_new_reqs:
            tracked = self.requests.get(new.req_id)
            if tracked is not None and tracked.cursor is not None:
                end = new.num_computed_tokens + scheduled[new.req_id]
                self._run_first(tracked, new.block_ids, end)
        self._grown_blocks = self._follow_running(output.scheduled_cached_reqs, scheduled)
        self.stores.pin_chosen()
        self.leftovers.settle(idle=not scheduled and self._is_still)
        self._behind = self.stores.behind
        self.watch.begin(output, loads=self.loads.running > 0, waits=self.loads.plans_synchronous)
        # Last: what has been taken must be sent.
        return OffloadMetadata(self.stores.take_planned(), self.loads.take_planned())

    def metadata_without_new_stores(self) -> OffloadMetadata:
        """Return the plan where `build_metadata` failed: the engine counts on its loads."""
        return OffloadMetadata((), self.loads.take_planned())

    @property
    def _is_still(self) -> bool:
        """Whether no step that computes something is under way, and no load."""
        return not self.loads.running and not any(
            tracked.request.num_in_flight_tokens
            for tracked in self.requests
            if tracked.cursor is not None
        )

    def _run_first(
        self, tracked: TrackedRequest, block_ids: Sequence[Sequence[int]], end_tokens: int
    ) -> None:
        """Plan the stores of a request that has not run with these blocks before."""
        cursor = tracked.cursor
        assert cursor is not None
        tracked.phase = Phase.RUNNING
        cursor.block_ids = [list(group) for group in block_ids]
        cursor.next_slot = [0] * len(block_ids)
        loaded, tracked.loaded = tracked.loaded, None
        if loaded is not None and not tracked.load_failed:
            # Known, and used just now. What the GPU had before it may have been evicted.
            self._examine(cursor, loaded[0])
            self.stores.skip(cursor, loaded[1])
        self._examine(cursor, end_tokens)

    def _follow_running(self, cached: RunningRequests, scheduled: Mapping[str, int]) -> int:
        """Plan the stores of requests that ran before; return how many blocks they have got."""
        request_ids, new_block_ids = cached.req_ids, cached.new_block_ids
        computed, resumed = cached.num_computed_tokens, cached.resumed_req_ids
        grown_blocks = 0
        for index in self._to_look_at(request_ids, new_block_ids):
            request_id, new_ids = request_ids[index], new_block_ids[index]
            tracked = self.requests.get(request_id)
            if tracked is None or tracked.cursor is None:
                continue
            end = computed[index] + scheduled[request_id]
            if request_id in resumed:
                self._run_first(tracked, new_ids or (), end)
                continue
            if new_ids is not None:
                for ids, more in zip(tracked.cursor.block_ids, new_ids, strict=True):
                    ids += more
                    grown_blocks += len(more)
            self._examine(tracked.cursor, end)
        return grown_blocks

    def _to_look_at(
        self, request_ids: Sequence[str], new_block_ids: Sequence[Any]
    ) -> Iterable[int]:
        """Return the places of those that got a block or are behind; most got none, which is None.

        The only work of a step that is done for every running request.
        """
        places = range(len(request_ids))
        if not self._behind:
            return compress(places, new_block_ids)
        behind = self._behind
        return [i for i in places if new_block_ids[i] is not None or request_ids[i] in behind]

    def _examine(self, cursor: StoreCursor, end_tokens: int) -> None:
        """Have what a request will have computed at `end_tokens` stored, at the end of the step."""
        # Beyond num_tokens there are drafts and placeholders, which have no hashes. With several
        # groups they would move the boundary up to which blocks are expected to be named.
        request = cursor.request
        self.stores.examine(cursor, self._store_limit(request, end_tokens), request.num_tokens)

    def _store_limit(self, request: Request, end_tokens: int) -> int:
        return min(end_tokens, int(request.num_prompt_tokens)) if self._prompt_only else end_tokens

    # -- the end of a request ------------------------------------------------------------------

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plan the stores of what a request leaves behind, just before its blocks are freed."""
        tracked = self.requests.get(request.request_id)
        if tracked is None:
            return
        cursor, loading = tracked.cursor, tracked.held is not None
        self.end(tracked)
        if cursor is None or loading:
            return
        # Steps in flight are executed before what is planned now is submitted, so all that is
        # computed at their end counts; drafts and placeholders have no hashes.
        end = self._store_limit(request, min(request.num_computed_tokens, request.num_tokens))
        if not self.stores.is_behind(cursor, end):
            return
        # Blocks that it shares with no other request and no store has pinned are free in a moment.
        own_blocks = sum(self._pool.blocks[b].ref_cnt == 1 for group in block_ids for b in group)
        # The remembered ids: of a group that reads a window the engine's have null blocks where it
        # has moved on, though these blocks may still hold what they held.
        self.budget.anybody_runs = self.requests.admitted > 0
        self.stores.next_step()
        self.stores.examine(cursor, end)
        self.stores.pin_chosen(own_blocks)
        self.statistics.count("deferred_slots", self.leftovers.keep(cursor, end))

    def end(self, tracked: TrackedRequest) -> None:
        """End a request. Its load goes on."""
        self.lookups.settle(tracked)
        self.requests.end(tracked)

    def forget(self, request_id: str) -> None:
        """End a request without storing what it leaves behind."""
        tracked = self.requests.get(request_id)
        if tracked is not None:
            self.end(tracked)

    def lose(self, lost_loads: Set[int]) -> set[str]:
        """Take it that a forward read what these synchronous loads had not brought.

        Returns the requests that have computed with those blocks by now: their own, and all that
        share them. The engine must end them, and know no block by its key any more, before it
        takes in the output of that forward. Nothing that is on its way to host memory becomes
        readable, and of the requests returned nothing is stored any more.

        What they computed in that step and in the one behind it cannot be readable yet: a store
        ends in a later step than the forward whose KV it copies, and `lose` comes first.
        """
        owners, blocks = self.loads.filled_by(lost_loads)
        if not owners:
            return set()
        self.stores.jobs.distrust()
        lost = owners | {
            tracked
            for tracked in self.requests
            if tracked.cursor is not None
            and not blocks.isdisjoint(chain.from_iterable(tracked.cursor.block_ids))
        }
        for tracked in lost:
            self.end(tracked)
        self.statistics.count("lost_requests", len(lost))
        return {tracked.request_id for tracked in lost}

    def others_load_failed(self) -> None:
        """Let nothing become readable that may hold what another connector failed to load."""
        self.stores.jobs.distrust()

    # -- between steps -------------------------------------------------------------------------

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

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself; tests call it each step."""
        self.requests.check_integrity()
        self.lookups.check_integrity()
        self.manager.check_integrity()
        held = sum(tracked.held is not None for tracked in self.requests)
        assert held == self.loads.running_asynchronous
