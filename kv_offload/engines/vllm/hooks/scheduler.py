"""The hooks that vLLM calls on its scheduler's thread; `OffloadScheduler` does the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_transfer
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from kv_offload.engines.vllm import requests
from kv_offload.engines.vllm.events import EventMaker
from kv_offload.engines.vllm.hooks.errors import survives
from kv_offload.engines.vllm.locate import EngineState, find_waker
from kv_offload.engines.vllm.patches.waiting import skip_lookups
from kv_offload.engines.vllm.start.build import Engine, build_scheduler, prepare_scheduler
from kv_offload.engines.vllm.start.log import MissedRequests, log_pool
from kv_offload.engines.vllm.start.members import is_chosen, served_by_peer_connector
from kv_offload.engines.vllm.start.ranks import ask_capacities
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, WorkerCapacity
from kv_offload.scheduler.scheduler import OffloadScheduler
from kv_offload.worker.worker import OffloadWorker

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


KVConnectorMetadata.register(OffloadMetadata)


class SchedulerHooks(KVConnectorBase_V1, SupportsHMA):
    """The half of `KVOffloadConnector` in the process of vLLM's scheduler."""

    engine_id: str | None
    offload_scheduler: OffloadScheduler
    _pool_is_logged = False
    _engine_state: EngineState | None = None
    _wake: Callable[[], None] | None = None
    _passed_over: Request | None = None
    """The waiting request whose lookup vLLM has just skipped."""
    loaded: frozenset[str] = frozenset()
    """Requests whose asynchronous loads have ended, not yet reported to vLLM."""

    def _start_scheduler(self, engine: Engine) -> None:
        """Prepare this half, which `bind_gpu_block_pool` builds."""
        self._engine, self._slots = engine, prepare_scheduler(engine)
        self._multi_connectors = engine.multi_connectors  # around this one, innermost first
        # If there is only one rank, it may be in this process.
        self._only_rank = engine.vllm_config.parallel_config.world_size == 1
        self._events = EventMaker(engine.kv_cache_config)
        # None once a request had a hit.
        self._missed_requests: MissedRequests | None = MissedRequests()
        self.restarted_sessions: set[str] = set()
        """Sessions that gave up their blocks and have not been scheduled since."""

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a dropped store only causes a later miss."""
        return False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Apply the ranks' capacities; ask the ranks for them if `metadata` is incomplete.

        A MultiConnector passes another member's metadata. With prefill context parallelism, vLLM
        passes only part of it, because several ranks share a key of `metadata`. vLLM calls this at
        start; vLLM 0.33 also calls it whenever the engine core wakes up.
        """
        capacities = [rank for rank in metadata.values() if isinstance(rank, WorkerCapacity)]
        world_size = self._vllm_config.parallel_config.world_size
        if self._multi_connectors or 0 < len(capacities) < world_size:
            capacities = ask_capacities()
        if capacities:
            # The smallest capacity of any rank. Only ranks know the size of packed slots.
            slots = dataclasses.replace(
                self._slots,
                num_slots=min(self._slots.num_slots, *(rank.num_slots for rank in capacities)),
                slot_bytes=min(self._slots.slot_bytes, max(rank.slot_bytes for rank in capacities)),
            )
            if slots != self._slots:
                self._slots = slots
                self.bind_gpu_block_pool(self._pool)
            self.offload_scheduler.take_capacities(capacities)
            if not self._pool_is_logged:
                log_pool(self._engine, slots.num_slots)
                self._pool_is_logged = True

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Build the scheduler's half; the block sizes are final now."""
        self._pool = gpu_block_pool
        if self._engine_state is None:  # else this is a rebuild: ranks hold fewer slots
            self._engine_state, self._wake = EngineState(), find_waker()
        self.offload_scheduler = build_scheduler(
            self._engine, gpu_block_pool, self._slots, self._engine_state.is_to_rest, self._wake
        )
        skip_lookups(gpu_block_pool, self.waits)

    @survives(lambda self, request: False)
    def waits(self, request: Request) -> bool:
        """Return whether a request keeps waiting no matter what vLLM's own cache has of it."""
        if self._multi_connectors:
            return False  # another member may bring its tokens
        waits = self.offload_scheduler.still_waits(request.request_id)
        self._passed_over = request if waits else None
        return waits

    @survives(lambda self, request: None)  # vLLM still looks the request up later
    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params or {}
        if self._multi_connectors and params.get("do_remote_prefill"):
            return  # another member loads its tokens, so do not prefetch from lower tiers
        self.offload_scheduler.arrived(request)

    @survives(lambda self, request, _: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `OffloadScheduler.match`. Before it, a rank in this process reports new weights.

        Inside a MultiConnector, the first member that has tokens loads them.
        """
        offload, multi = self.offload_scheduler, self._multi_connectors
        passed_over, self._passed_over = self._passed_over, None
        if passed_over is request:
            return None, False
        rank = self._local_rank()
        if rank is not None:
            offload.resets.weights_were_loaded(rank.weight_loads())
        by_peer = served_by_peer_connector(self, multi, request.request_id)
        match = offload.match(request, num_computed_tokens, served_by_peer_connector=by_peer)
        requests.keep_at(request, match.shared_tokens)
        return match.tokens, match.asynchronous

    @survives(lambda self, *arguments: self.offload_scheduler.allocation_failed(*arguments))
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.offload_scheduler.allocated(request, blocks, num_external_tokens)

    @survives(
        lambda self, scheduler_output: self.offload_scheduler.plan_after_error(scheduler_output)
    )
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMetadata:
        if self.restarted_sessions:
            self._restart_sessions(scheduler_output)
        return self.offload_scheduler.plan_step(scheduler_output)

    def _restart_sessions(self, scheduler_output: SchedulerOutput) -> None:
        """Make the runner discard the old state positions of sessions that are scheduled again.

        Runner V1 discards them only for requests that a step with tokens lists as preempted.
        """
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        scheduler_output.preempted_req_ids |= self.restarted_sessions & new
        self.restarted_sessions -= new

    def loads(self, request_id: str) -> bool:
        """Return whether this member is loading, or was chosen to load, a request's tokens."""
        loading = self.offload_scheduler.in_flight.loading
        return request_id in loading or is_chosen(self, self._multi_connectors, request_id)

    def apply_rank_reports(self, report: OffloadWorkerMetadata | None) -> None:
        """Apply a step's report, then the current report of a rank in this process.

        A step's report dates from the launch of the step. With asynchronous scheduling, it reports
        the end of a copy one or two steps late.
        """
        if report is not None:
            self._apply_report(report)
        self._poll_local_rank()

    @survives(lambda self, report: self.offload_scheduler.apply_report(report))  # retry once
    def _apply_report(self, report: OffloadWorkerMetadata) -> None:
        self.offload_scheduler.apply_report(report)

    @survives(lambda self, report: None)  # the rank repeats a report that was not applied
    def apply_drain_report(self, report: OffloadWorkerMetadata) -> None:
        """Apply a rank's report between two steps."""
        self._apply_report(report)

    @survives(lambda self: None)  # the rank's next report includes this one
    def _poll_local_rank(self) -> None:
        rank = self._local_rank()
        if rank is not None and self.offload_scheduler.in_flight.awaits_ranks:
            rank.poll()
            self.offload_scheduler.apply_report(rank.ended())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell vLLM which requests' loads have ended on all ranks; the ranks themselves name none.

        `patches.update_from_output` has already applied the ranks' reports.
        """
        loaded, self.loaded = self.loaded, frozenset()
        if loaded:
            connector_output.finished_recving = {
                *(connector_output.finished_recving or ()),
                *loaded,
            }

    @survives(lambda self, *_: False)
    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Store the partly filled blocks at a request's end; vLLM calls this before the end."""
        self.offload_scheduler.tail_finished(request, partial_tail_offloads, block_ids)
        return False

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @survives(
        lambda self, request, _: self.offload_scheduler.finished(request, None) or (False, None)
    )
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the engine free the blocks at once: the sources of running stores are pinned."""
        self.restarted_sessions.discard(request.request_id)
        self.offload_scheduler.finished(request, block_ids)
        if self._missed_requests is not None:
            self._missed_requests.ended()
        return False, None

    @survives(lambda self: False)
    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping until the last store is reported, and once at the start.

        An engine that is shutting down is not kept stepping: vLLM would kill it after 5 s, and its
        host memory ends with it, except in a pool.
        """
        if self._engine_state is not None and self._engine_state.is_ending():
            return False
        return self.offload_scheduler.has_pending_work

    @survives(lambda self: False)
    def has_pending_block_frees(self) -> bool:
        """Make the engine wait for a store instead of preempting a request."""
        return self.offload_scheduler.in_flight.holds_idle_blocks

    @survives(lambda self: False)  # host memory may not have been emptied
    def reset_cache(self) -> bool:
        """Empty host memory, for instance after the weights changed."""
        self.offload_scheduler.resets.reset_cache()
        return True

    @survives(lambda self: [])
    def take_events(self) -> list[KVCacheEvent]:
        """Return vLLM's KV events about host memory; vLLM asks in every step."""
        announced = self.offload_scheduler.take_announcements()
        return self._events.make(announced) if announced else []

    def _local_rank(self) -> OffloadWorker | None:
        """Return the engine's only rank if it is in this process.

        None inside a MultiConnector, which adds up its members' reports.
        """
        if not self._only_rank or not kv_transfer.has_kv_transfer_group():
            return None
        connector = kv_transfer.get_kv_transfer_group()
        rank: OffloadWorker | None = getattr(connector, "offload_worker", None)
        return rank if rank is not None and connector.engine_id == self.engine_id else None
