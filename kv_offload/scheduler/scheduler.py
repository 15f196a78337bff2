"""The scheduler's half of the connector: follows requests, and asks the planners what to move."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, NamedTuple

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.prefix import CacheGroup, KeyMaker, PrefixMap
from kv_offload.config import OffloadConfig
from kv_offload.engine import (
    AllocatedBlocks,
    Request,
    RunningRequests,
    StepOutput,
    StepReports,
)
from kv_offload.messages import (
    DrainAnswer,
    JobResult,
    OffloadMetadata,
    OffloadWorkerMetadata,
    StoreJob,
)
from kv_offload.metrics import OffloadStats
from kv_offload.scheduler.budget import StoreBudget
from kv_offload.scheduler.leftovers import StoreCursor
from kv_offload.scheduler.load_choice import LoadChoice
from kv_offload.scheduler.load_mode import LoadMode
from kv_offload.scheduler.loads import LoadPlanner
from kv_offload.scheduler.step_watch import StepWatch
from kv_offload.scheduler.stores import StorePlanner

logger = logging.getLogger(__name__)

GAUGE_SECONDS = 0.1
"""While requests run gauges are reported no more often."""


@dataclass(slots=True)
class _RequestState:
    request: Request
    block_ids: list[list[int]]
    cursor: StoreCursor


class _Match(NamedTuple):
    """What a request was last told: how many tokens, where the load that brings them ends, and how.

    The engine must compute at least one token of a request that runs in this step. So a synchronous
    load of all tokens is told as one of all but the last.
    """

    tokens: int
    end_tokens: int
    synchronous: bool


class OffloadScheduler:
    """Lives on the engine's one scheduling thread; every method is one of the connector's hooks.

    `num_slots` may be lowered once, by `set_num_slots`, before the first request.
    """

    def __init__(
        self,
        config: OffloadConfig,
        groups: Sequence[CacheGroup],
        num_slots: int,
        slot_bytes: int,
        num_ranks: int,
        make_key: KeyMaker,
    ) -> None:
        self._config = config
        self._prompt_only = config.store_blocks == "prompt"
        self._groups = groups
        # vLLM may ask for less than it was offered; of several groups a window lacks blocks then.
        # States are moved from block to block before the forward that waits for a load.
        self._may_wait = len(groups) == 1 and not groups[0].holds_state
        self._slot_bytes = slot_bytes
        self.watch = StepWatch()
        self.load_mode = LoadMode(slot_bytes, self.watch.load_rate, self.watch.decode_seconds)
        self.store_budget = StoreBudget(slot_bytes)
        self._matches: dict[str, _Match] = {}
        self._declined_tokens: dict[str, int] = {}
        self._num_ranks = num_ranks
        self._make_key = make_key
        self._num_slots = num_slots
        self._ready_slots: dict[int, int] = {}
        self._pool: Any = None
        self._requests: dict[str, _RequestState] = {}
        # Those of them that have more to store than was planned in the last step.
        self._behind: set[str] = set()
        # Of requests that have not run since: from where to where host memory had them.
        self._loaded_tokens: dict[str, tuple[int, int]] = {}
        self._grown_blocks = 0
        self._load_failed: set[str] = set()
        self._delivered_loads: set[str] = set()
        # What the ranks have reported and `read_reports` has not taken in: mostly nothing.
        self._unread: deque[OffloadWorkerMetadata] = deque()
        self._received_unread: set[str] = set()
        self.draining = False
        """Set while a drain delivers loads."""
        self.falling_asleep = False
        """Set while the engine resets everything for a sleep that host memory is to outlive."""
        self._weights_changed = False
        self._weight_loads: dict[int, int] = {}
        self._evictions_reported = 0
        self._gauges_reported: dict[str, float] = {}
        self._gauges_due = 0.0
        self._stats = OffloadStats()

    # -- start ---------------------------------------------------------------------------------

    def set_num_slots(self, num_slots: int) -> None:
        """Plan with what the smallest rank really holds; told the same again, keep everything."""
        if num_slots < self._num_slots:
            self._num_slots = num_slots
            if self._pool is not None:
                self.bind_pool(self._pool)

    def bind_pool(self, pool: Any) -> None:
        """Build everything that depends on block sizes, from the engine's final block pool."""
        self._pool = pool
        self.manager = CacheManager(
            self._num_slots, make_policy(self._config.eviction_policy, self._num_slots)
        )
        self.ranks_ready({})
        self._prefixes = PrefixMap(self._groups, pool.hash_block_size, self._make_key)
        self._loads = LoadPlanner(self._prefixes, self.manager, self._num_ranks)
        self._choice = LoadChoice(
            self._config.load_or_recompute,
            self._slot_bytes,
            self.watch,
            self._loads.queue,
        )
        self._stores = StorePlanner(
            self._prefixes,
            self.manager,
            pool,
            self._num_ranks,
            self.store_budget,
            self._config.max_pinned_share,
            self._config.store_after_uses,
        )

    def ranks_ready(self, ready_slots: Mapping[int, int]) -> None:
        """Use slots whose memory is ready on every rank; `ready_slots` has news by rank."""
        self._ready_slots.update(ready_slots)
        if self._pool is not None:
            known = len(self._ready_slots) == self._num_ranks
            usable = min(self._ready_slots.values()) if known else 0
            self.manager.limit_slots(min(usable, self._num_slots))

    # -- one step ------------------------------------------------------------------------------

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond the local hit, and whether asynchronously.

        None instead of tokens asks to be asked again.
        """
        request_id = request.request_id
        self._matches.pop(request_id, None)
        self._declined_tokens.pop(request_id, None)
        if request.skip_reading_prefix_cache or request_id in self._load_failed:
            return 0, False
        if request_id in self._delivered_loads:
            # A drain took it back. Reports name requests, and that of the first load must not be
            # taken for one of a second.
            return None, False
        tokens = self._loads.match(
            request_id, request.block_hashes, num_computed_tokens, request.num_tokens
        )
        if not tokens:
            return tokens, False
        slots = self._prefixes.count_slots(num_computed_tokens, num_computed_tokens + tokens)
        idle = self._requests.keys() <= {request_id}
        synchronous = self._may_wait and self.load_mode.is_synchronous(slots, idle=idle)
        if not self._choice.loads(num_computed_tokens, tokens, slots, synchronous=synchronous):
            self._declined_tokens[request_id] = tokens
            return 0, False
        end_tokens = num_computed_tokens + tokens
        if synchronous and end_tokens == request.num_tokens:
            if self.load_mode.brings_last_slot(slots, idle=idle):
                tokens -= 1
            else:
                end_tokens -= self._prefixes.alignment_tokens
                tokens = end_tokens - num_computed_tokens
        self._matches[request_id] = _Match(tokens, end_tokens, synchronous)
        return tokens, not synchronous

    def allocated(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Take the blocks that the engine gave a waiting request, and plan its load if it has one.

        Called again, with no external tokens, when a loaded request is scheduled; then the step's
        plan has its blocks.
        """
        request_id = request.request_id
        self._loads.settle(request_id)
        start = self._loads.take_matched_from(request_id)
        if start is None and request_id in self._loaded_tokens:
            return
        block_ids = [list(group) for group in blocks.get_block_ids()]
        self._requests[request_id] = _RequestState(
            request, block_ids, self._stores.new_cursor(request_id)
        )
        if start is None:
            return
        self._loaded_tokens.pop(request_id, None)  # of a load that was in vain
        self._stats.count("lookup_tokens", request.num_tokens - start)
        self._stats.count("hit_tokens", num_external_tokens)
        declined = self._declined_tokens.pop(request_id, 0)
        if declined:
            self._stats.count("recomputed_tokens", declined)
            self._choice.declined()
        self._choice.admitted(request, start + num_external_tokens)
        if num_external_tokens:
            self._choice.planned()
            end = start + num_external_tokens
            match = self._matches.get(request_id)
            synchronous = match is not None and match.synchronous
            if match is not None and match.tokens == num_external_tokens:
                end = match.end_tokens
            null_block = self._pool.null_block.block_id
            if synchronous:
                self._stats.count("synchronous_loads", 1)
                self.load_mode.plan(self._prefixes.count_slots(start, end))
            self._loads.plan(
                request_id,
                request.block_hashes,
                start,
                end,
                block_ids,
                null_block,
                synchronous=synchronous,
                whole=end == request.num_tokens,
            )
            self._loaded_tokens[request_id] = (start, end)
            self._matches.pop(request_id, None)

    def go_on_without(self, request_id: str) -> None:
        """Answer nothing more for a request, of which a hook has failed."""
        self._load_failed.add(request_id)
        self._matches.pop(request_id, None)

    def allocation_failed(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Let the load that the engine counts on fail, since `allocated` has."""
        request_id = request.request_id
        match = self._matches.get(request_id)
        self.go_on_without(request_id)
        block_ids = [list(group) for group in blocks.get_block_ids()]
        # Its blocks count among those that `lose` looks at, whatever has failed.
        self._requests.setdefault(
            request_id, _RequestState(request, block_ids, self._stores.new_cursor(request_id))
        )
        if num_external_tokens and match is not None:
            before = match.end_tokens - match.tokens
            first = before // self._groups[0].block_tokens
            self._loads.plan_failure(
                request_id, block_ids[0][first:], synchronous=match.synchronous
            )

    def build_metadata(self, output: StepOutput) -> OffloadMetadata:
        """Plan the stores of this step's requests; return them with the loads planned before.

        A running request is looked at when it gets a block, and as long as it is behind. So a block
        that it filled in an earlier step waits for the next one: nobody takes it from the request
        meanwhile, and most requests of a step of decodes are not touched at all.
        """
        scheduled = output.num_scheduled_tokens
        self.load_mode.begin_step()
        self.store_budget.begin_step(
            load_seconds=self._choice.queued_seconds(), grown_blocks=self._grown_blocks
        )
        self.store_budget.anybody_runs = bool(self._requests)
        self._stores.begin_step()
        self._stores.plan_leftovers()
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            if state is not None:
                state.block_ids = [list(group) for group in new.block_ids]
                loaded = self._loaded_tokens.pop(new.req_id, None)
                if loaded is not None and new.req_id not in self._load_failed:
                    # Known, and used just now. What the GPU had before it may have been evicted.
                    self._plan_stores(state, loaded[0])
                    self._stores.skip(state.cursor, loaded[1])
                self._plan_stores(state, new.num_computed_tokens + scheduled[new.req_id])
        self._grown_blocks = self._follow_running(output.scheduled_cached_reqs, scheduled)
        self._stores.pin_chosen()
        self._stores.settle_leftovers(idle=not scheduled and self._is_still)
        self._behind = self._stores.behind
        self.watch.begin(
            output,
            loads=self._loads.running > 0,
            waits=self._loads.plans_synchronous,
        )
        # Last: what has been taken must be sent.
        return OffloadMetadata(self._stores.jobs.take_planned(), self._loads.take_planned())

    def metadata_without_new_stores(self) -> OffloadMetadata:
        """Return the plan where `build_metadata` failed: the engine counts on its loads."""
        return OffloadMetadata((), self._loads.take_planned())

    @property
    def _is_still(self) -> bool:
        """Whether no step that computes something is under way, and no load."""
        states = self._requests.values()
        return not self._loads.running and not any(s.request.num_in_flight_tokens for s in states)

    def _follow_running(self, cached: RunningRequests, scheduled: Mapping[str, int]) -> int:
        """Plan the stores of requests that ran before; return how many blocks they have got."""
        request_ids, new_block_ids = cached.req_ids, cached.new_block_ids
        computed, resumed = cached.num_computed_tokens, cached.resumed_req_ids
        requests, plan_stores = self._requests, self._plan_stores
        grown_blocks = 0
        for index in self._to_look_at(request_ids, new_block_ids):
            request_id, new_ids = request_ids[index], new_block_ids[index]
            state = requests.get(request_id)
            if state is None:
                continue
            if request_id in resumed:
                state.block_ids = [list(group) for group in new_ids or ()]
                state.cursor = self._stores.new_cursor(request_id)
            elif new_ids is not None:
                for group, more in enumerate(new_ids):
                    state.block_ids[group] += more
                    grown_blocks += len(more)
            plan_stores(state, computed[index] + scheduled[request_id])
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

    def _plan_stores(self, state: _RequestState, end_tokens: int) -> None:
        """Have what a request will have computed at `end_tokens` stored, at the end of the step."""
        request = state.request
        # Beyond num_tokens there are drafts and placeholders, which have no hashes. With several
        # groups they would move the boundary up to which blocks are expected to be named.
        self._stores.plan(
            state.cursor,
            request.block_hashes,
            state.block_ids,
            self._store_limit(request, end_tokens) if self._prompt_only else end_tokens,
            request.num_tokens,
        )

    def _store_limit(self, request: Request, end_tokens: int) -> int:
        return min(end_tokens, int(request.num_prompt_tokens)) if self._prompt_only else end_tokens

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plan the stores of what a request leaves behind, just before its blocks are freed."""
        loading = self._loads.is_loading(request.request_id)
        state = self.forget(request.request_id)
        if state is None or loading:
            return
        # Steps in flight are executed before what is planned now is submitted, so all that is
        # computed at their end counts; drafts and placeholders have no hashes.
        end = self._store_limit(request, min(request.num_computed_tokens, request.num_tokens))
        if not self._stores.is_behind(state.cursor, end):
            return
        # Its blocks that nobody shares and no store has pinned are free in a moment.
        own_blocks = sum(self._pool.blocks[b].ref_cnt == 1 for group in block_ids for b in group)
        # The remembered ids: of a group that reads a window the engine's have null blocks where it
        # has moved on, though nobody may have taken those blocks yet.
        block_ids, hashes = state.block_ids, request.block_hashes
        self.store_budget.anybody_runs = bool(self._requests)
        self._stores.begin_step()
        self._stores.plan(state.cursor, hashes, block_ids, end)
        self._stores.pin_chosen(own_blocks)
        deferred = self._stores.keep_leftovers(state.cursor, hashes, block_ids, end)
        self._stats.count("deferred_slots", deferred)

    def forget(self, request_id: str) -> _RequestState | None:
        """Drop what is known of a request that ends; its loads go on. Returns its blocks."""
        self._behind.discard(request_id)
        self._loaded_tokens.pop(request_id, None)
        self._load_failed.discard(request_id)
        self._matches.pop(request_id, None)
        self._declined_tokens.pop(request_id, None)
        self._choice.forget(request_id)
        self._loads.forget(request_id)
        return self._requests.pop(request_id, None)

    def update(
        self,
        output: StepReports,
        ended_loads: Set[str] = frozenset(),
        reported_loads: Set[str] = frozenset(),
    ) -> None:
        """Take what the ranks report at the end of a step; called before the engine reads it.

        `ended_loads` are requests whose loads the only rank has told of instead of a report,
        `reported_loads` those that it told of and the last report that it made names too. That may
        be this one, or one that is still under way.

        A load is told of once: those that a drain has delivered, or that were taken from a report
        under way, are taken out when it arrives. The engine would fail on them: it may have freed
        their blocks and forgotten their requests.
        """
        arrived = output.finished_recving or set()
        told = arrived | ended_loads
        early = reported_loads - arrived - self._delivered_loads
        again = told & self._delivered_loads
        if again or early or ended_loads:
            self._delivered_loads = (self._delivered_loads - again) | early
            output.finished_recving = (told - again) | early
        if isinstance(output.kv_connector_worker_meta, OffloadWorkerMetadata):
            self._unread.append(output.kv_connector_worker_meta)
        self._received_unread |= output.finished_recving or set()
        self.read_reports()

    def read_reports(self) -> None:
        """Take in what the ranks have reported; what an error interrupted is read again."""
        while self._unread:
            self._read(self._unread[0])
            self._unread.popleft()
        if self._received_unread:
            received, self._received_unread = self._received_unread, set()
            self._loads.complete(received)

    def _read(self, report: OffloadWorkerMetadata) -> None:
        self.weights_were_loaded(report.weight_loads)
        if report.failed_loads:
            self._load_failed |= report.failed_loads & self._requests.keys()
            self._stats.count("failed_loads", len(report.failed_loads))
        self._stores.complete(report.stores)
        self._loads.complete_synchronous(report.loads)
        if report.load_bytes_per_second is not None:
            self.watch.load_rate.learn(report.load_bytes_per_second)
        for rank, speed in report.store_bytes_per_second.items():
            self.store_budget.learn(speed, rank)
        if report.ready_slots:
            self.ranks_ready(report.ready_slots)

    def stores_ended(self, results: Mapping[int, JobResult]) -> None:
        """Take results of stores that the only rank would report with a later step."""
        self._stores.complete(results)

    def lose(self, lost_loads: Set[int]) -> set[str]:
        """Take it that a forward read what these synchronous loads had not brought.

        Returns the requests that have computed with those blocks by now: their own and whoever
        shares them. The engine must end them, and know no block by its key any more, before it
        takes in the output of that forward. Nothing that is on its way to host memory becomes
        readable, and of the requests returned nothing is stored any more.

        What they computed in that step and in the one behind it cannot be readable yet: a store
        ends in a later step than the forward whose KV it copies, and `lose` comes first.
        """
        lost, blocks = self._loads.filled_by(lost_loads)
        if not lost:
            return lost
        self._stores.jobs.distrust()
        lost |= {
            request_id
            for request_id, state in self._requests.items()
            if not blocks.isdisjoint(chain.from_iterable(state.block_ids))
        }
        for request_id in lost:
            self._requests.pop(request_id, None)
        self._stats.count("lost_requests", len(lost))
        return lost

    def others_load_failed(self) -> None:
        """Hear that a step may have computed on blocks which another connector failed to load.

        The engine has such steps done again. What they stored must not become readable.
        """
        self._stores.jobs.distrust()

    # -- between steps -------------------------------------------------------------------------

    def count_hook_errors(self, errors: int) -> None:
        """Count exceptions of hooks."""
        self._stats.count("hook_errors", errors)

    @property
    def hears_of_loads(self) -> bool:
        """Whether a request waits to hear that some rank has ended its load, and may hear it now.

        Not while a drain delivers loads: what a rank tells of then would be told for nothing.
        """
        return bool(self._loads.running_requests()) and not self.draining

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping for a job to be planned, submitted or reported."""
        waiting = len(self._stores.leftovers) > 0
        return self.has_pending_stores or waiting or self._loads.awaits_report

    @property
    def has_pending_stores(self) -> bool:
        """Whether a store has not ended on all ranks, so that it pins GPU blocks."""
        return self._stores.jobs.pending

    @property
    def holds_idle_blocks(self) -> bool:
        """Whether waiting for a store would free GPU blocks."""
        return self._stores.jobs.holds_idle_blocks

    def abandoned_loads(self) -> set[str]:
        """Return the requests that ended while their loads run: the engine holds their blocks."""
        return self._loads.running_requests() - self._requests.keys()

    def running_loads(self) -> set[str]:
        """Return the requests whose asynchronous loads some rank has not reported."""
        return set(self._loads.running_requests())

    def waiting_loads(self) -> set[str]:
        """Return the requests that may wait for a load of ours, or for their turn after it."""
        return self._loaded_tokens.keys() | self._load_failed

    def expect_again(self, request_ids: Set[str]) -> None:
        """Say that a drain delivered these loads, whose reports are still on their way."""
        self._delivered_loads |= request_ids

    def begin_drain(self) -> tuple[tuple[StoreJob, ...], tuple[int, ...]]:
        """Return the stores that no rank has seen, and the ids of all that must end."""
        unsent = self._stores.take_planned()
        return unsent, self._stores.jobs.running_jobs()

    def end_drain(self, answer: DrainAnswer) -> bool:
        """Take the ranks' answer. False if some store did not end: it is given up, unpinned."""
        if any(self._loads.filled_by(answer.lost_loads)):
            # The engine has not taken in the step that lost them; `lose` comes when it does.
            self._stores.jobs.distrust()
        self._stores.complete(answer.stores)
        drained = not self._stores.jobs.pending
        self._stores.jobs.abandon()
        return drained

    @property
    def keeps_on_sleep(self) -> bool:
        """Whether the user allows host memory to outlive a sleep of level 1."""
        return self._config.keep_on_sleep

    def reset(self) -> None:
        """Forget everything in host memory; running copies end on their own and leave nothing.

        Does nothing while `falling_asleep`.
        """
        if not self.falling_asleep:
            self._forget_all()

    def weights_change(self) -> bool:
        """Forget everything, since the weights may be about to change, and again at the next reset.

        Until then the engine's own cache may serve blocks of the old weights, which are stored.
        Returns whether there was anything to forget.
        """
        held = self.manager.slots_in_use > 0
        self._forget_all()
        self._weights_changed = True
        return held

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
        """Hear that the engine's own cache is empty."""
        if self._weights_changed:
            self._forget_all()
            self._weights_changed = False

    def _forget_all(self) -> None:
        self.manager.reset()
        self._stores.drop_leftovers()

    def take_stats(self) -> OffloadStats | None:
        """Return the counters since the last call, and gauges that changed; None if nothing did.

        Gauges change with every step of decodes, and nobody looks at them so often: while requests
        run they are looked at every `GAUGE_SECONDS`.
        """
        evictions = self.manager.evictions
        if evictions != self._evictions_reported:
            self._stats.count("evictions", evictions - self._evictions_reported)
            self._evictions_reported = evictions
        if self._stores.has_skipped:
            for reason, slots in self._stores.take_skipped().items():
                self._stats.count(f"skipped_{reason}", slots)
        now = time.monotonic()
        if now >= self._gauges_due or not self._requests:
            self._gauges_due = now + GAUGE_SECONDS
            self._add_gauges()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats

    def _add_gauges(self) -> None:
        manager, jobs = self.manager, self._stores.jobs
        gauges: dict[str, float] = {
            "slots": manager.usable_slots,
            "slots_in_use": manager.slots_in_use,
            "running_loads": self._loads.running,
            "running_stores": jobs.running,
            "pinned_blocks": jobs.pinned_blocks,
            "waiting_slots": self._stores.leftovers.slots,
            **self.watch.gauges(),
        }
        if gauges != self._gauges_reported:
            for name, value in gauges.items():
                if self._gauges_reported.get(name) != value:
                    self._stats.gauge(name, value)
            self._gauges_reported = gauges
