"""The class that vLLM builds: dispatches each hook to the scheduler's or the worker's half."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kv_offload.config import trace_config
from kv_offload.engines.vllm import compat as engine_compat
from kv_offload.engines.vllm.compat import logger
from kv_offload.engines.vllm.engine_hooks import (
    drain_engine_core,
    failed_loads,
    rank_capacities,
    requests_with_lost_kv,
)
from kv_offload.engines.vllm.hook_errors import HookErrors, survives
from kv_offload.engines.vllm.plugin import register
from kv_offload.engines.vllm.replicas import count_local_replicas
from kv_offload.engines.vllm.support import (
    cache_groups,
    check_supported,
    consequences,
    has_draft_head,
)
from kv_offload.engines.vllm.weight_hooks import check_keep_on_sleep, watch_weights
from kv_offload.messages import LoadJob, OffloadMetadata, OffloadWorkerMetadata, WorkerCapacity
from kv_offload.metrics import OffloadPromMetrics, OffloadStats
from kv_offload.scheduler.scheduler import OffloadScheduler
from kv_offload.worker.capacity import check_available, describe_share, warn_of_hidden_replicas
from kv_offload.worker.sharing import ALONE, Peers, arena_bytes, ranks_with_equal_bytes
from kv_offload.worker.worker import OffloadWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kv_offload.cache.prefix import CacheGroup


# By this name a MultiConnector looks up who reads a member's stats, also where the member was given
# by the path of this module.
register()


class KVOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps computed KV blocks in host memory and loads them for later requests.

    vLLM builds one object in the scheduler's process and one per rank. Raises `ConfigError`,
    `CapacityError` or `UnsupportedError` at start; afterwards nothing it does ends the engine.
    """

    _cache_hit_source = engine_compat.host_hit_source()

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.hook_errors = HookErrors()
        version = engine_compat.vllm_version()
        transfer_config = vllm_config.kv_transfer_config
        replicas = count_local_replicas(vllm_config)
        traced = trace_config(transfer_config.kv_connector_extra_config, replicas=replicas.count)
        config = traced.config
        enclosing = engine_compat.enclosing_configs()
        check_supported(config, vllm_config, kv_cache_config, version, enclosing)
        self._is_member = bool(enclosing)
        self._by_request = engine_compat.reports_failed_requests(version)
        self._by_block = not self._by_request and config.on_load_failure == "fail"
        self._failed_loads: dict[str, LoadJob] = {}
        self.engine_id = transfer_config.engine_id
        # Whether the only rank may live in this process; that rank, once it was found.
        self._alone = vllm_config.parallel_config.world_size == 1
        self._rank: weakref.ref[OffloadWorker] | None = None
        parallel = vllm_config.parallel_config
        # One of the two stays None; a hook is only called on the half that it belongs to.
        self.offload_scheduler: OffloadScheduler = None  # type: ignore[assignment]
        self.offload_worker: OffloadWorker = None  # type: ignore[assignment]
        if role == KVConnectorRole.SCHEDULER:
            if self._is_member:
                engine_compat.observe_local_stats()
            for consequence in consequences(config, vllm_config, enclosing):
                logger.warning("kv-offload: %s", consequence)
            # Read by the engine's scheduler after it has built its connector.
            engine_config = enclosing[-1] if enclosing else transfer_config
            engine_config.kv_load_failure_policy = config.on_load_failure
            groups = cache_groups(
                kv_cache_config,
                parallel.decode_context_parallel_size,
                draft_head=has_draft_head(vllm_config),
            )
            self._start_scheduler(config, kv_cache_config, groups, parallel, version)
            logger.info("kv-offload: %s", describe_share(traced))
            if replicas.hidden:
                warn_of_hidden_replicas(traced)
        else:
            # No rank takes memory before all have looked how much there is.
            check_available(traced, engine_compat.gather_over_ranks)
            peers = ALONE
            if ranks_with_equal_bytes(parallel, kv_cache_config) > 1:
                peers = Peers(*engine_compat.tensor_parallel_ranks())
            self.offload_worker = OffloadWorker(
                config, kv_cache_config, parallel.rank, parallel.world_size, peers
            )

    def _start_scheduler(
        self,
        config: Any,
        kv_cache_config: KVCacheConfig,
        groups: tuple[CacheGroup, ...],
        parallel: ParallelConfig,
        version: tuple[int, int],
    ) -> None:
        num_ranks = parallel.world_size
        slot_bytes = engine_compat.bytes_per_block(kv_cache_config)
        # At most: ranks that cannot share memory, or stages with larger blocks, report less.
        sharing_ranks = ranks_with_equal_bytes(parallel, kv_cache_config)
        self._num_slots = max(
            1, arena_bytes(config.cpu_bytes, num_ranks, sharing_ranks) // slot_bytes
        )
        self._scheduler_arguments = (config, groups, slot_bytes, num_ranks)
        if config.keep_on_sleep:
            check_keep_on_sleep()
        engine_compat.drain_before_reset(drain_engine_core)
        engine_compat.end_requests_with_lost_kv(requests_with_lost_kv)
        watch_weights()
        if any(group.holds_state for group in groups) and engine_compat.counts_attention_hits(
            version
        ):
            engine_compat.count_common_hits()
        if not self._by_request and not self._by_block:
            engine_compat.recompute_failed_requests(failed_loads)
        logger.info("kv-offload: %s", config.describe())

    # -- worker: the start of a step -----------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `OffloadWorker.register_kv_caches`."""
        self.offload_worker.register_kv_caches(kv_caches)
        engine_compat.before_each_step(self.begin_step)

    def unregister_kv_caches(self) -> None:
        """See `OffloadWorker.unregister_kv_caches`. From vLLM 0.33, before a sleep."""
        self.offload_worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """See `OffloadWorker.restore_kv_caches`. From vLLM 0.33, after waking up."""
        self.offload_worker.restore_kv_caches()

    def get_handshake_metadata(self) -> WorkerCapacity | None:
        """Tell the scheduler how many slots this rank holds, and how many are ready.

        None inside a MultiConnector: it hands on the metadata of the first member that has some,
        and to all of them, most of which fail on another's.
        """
        return None if self._is_member else self.offload_worker.capacity()

    @survives(lambda self, scheduler_output: None)  # the later hooks start what was not
    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Submit this step's copies before the engine prepares it, unless that touches KV blocks.

        Preparing takes the host some milliseconds, in which the link need not idle. Below a
        MultiConnector the metadata is that one's, and copies start with the later hooks.
        """
        metadata = scheduler_output.kv_connector_metadata
        if isinstance(metadata, OffloadMetadata) and not engine_compat.changes_blocks(
            scheduler_output
        ):
            self.offload_worker.start_copies(metadata)

    @survives(lambda self, metadata: None)  # what is queued stays so
    def handle_preemptions(self, kv_connector_metadata: OffloadMetadata) -> None:
        """Submit the last step's stores, if they were not: this is the first hook of every step.

        Runner V1 zeroes and copies blocks after it, runner V2 before it. Neither touches the pinned
        sources of a store.
        """
        self.offload_worker.submit_stores()

    def bind_connector_metadata(self, connector_metadata: OffloadMetadata) -> None:
        """Have the forward wait for its loads: this hook comes after zeroing and just before it.

        `start_load_kv` would not do: from vLLM 0.32 it is called after the forward was launched.
        """
        super().bind_connector_metadata(connector_metadata)
        self.start_kv_transfers(connector_metadata)

    @survives(lambda self, metadata: self.offload_worker.rescue(metadata))
    def start_kv_transfers(self, metadata: OffloadMetadata) -> None:
        """See `OffloadWorker.start_kv_transfers`."""
        self.offload_worker.start_kv_transfers(metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: the loads of this step run already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Have compute wait for what this layer reads, where a load still arrives.

        Called by attention layers, on the host, just before they are queued. Costs next to nothing
        in every other step.
        """
        on_layer = self.offload_worker.on_layer
        if on_layer is not None:
            self._call_on_layer(on_layer, layer_name)

    @survives(lambda self, on_layer, layer_name: None)  # such a layer counts as one without a call
    def _call_on_layer(self, on_layer: Callable[[str], None], layer_name: str) -> None:
        on_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: blocks are stored whole, over all layers."""

    # -- worker: the end of a step -------------------------------------------------------------

    def prepare_store_kv(self, metadata: OffloadMetadata) -> None:
        """See `OffloadWorker.prepare_store_kv`."""
        self.offload_worker.prepare_store_kv(metadata)

    @survives(lambda self: None)  # `get_finished` queues them
    def wait_for_save(self) -> None:
        """Queue this step's stores. Nothing is waited for: their sources are pinned."""
        self.prepare_store_kv(self._get_connector_metadata())

    @survives(lambda self, _: self._end_step_anyhow())
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Queue this step's stores where `wait_for_save` was skipped; report the loads that ended.

        vLLM 0.26 and 0.28 do not call `wait_for_save` in a step without a forward.
        """
        if self.has_connector_metadata():
            self.prepare_store_kv(self._get_connector_metadata())
        self.offload_worker.poll()
        received, self._failed_loads = self.offload_worker.take_received()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Report the loads that ended and those that failed. From vLLM 0.32."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = set(self._failed_loads)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name the blocks of failed loads where a request can be ended in no other way.

        Of asynchronous loads only: nothing has read these blocks.
        """
        if not self._by_block:
            return set()
        return {int(block) for job in self._failed_loads.values() for block in job.pairs[:, 0]}

    @survives(lambda self: self.offload_worker.take_losses())  # the next step reports the rest
    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        """Report the stores that ended, and again the loads that failed."""
        return self.offload_worker.take_report()

    # -- scheduler -----------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is dropped is a later miss, nothing more."""
        return False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """Take the ranks' capacities. Inside a MultiConnector the metadata is another's: ask them.

        Raises `UnsupportedError` where they cannot be asked.
        """
        capacities = [rank for rank in metadata.values() if isinstance(rank, WorkerCapacity)]
        if self._is_member:
            answers = engine_compat.ask_ranks(rank_capacities)
            capacities = [capacity for answer in answers for capacity in answer]
        if capacities:
            num_slots = min(rank.num_slots for rank in capacities)
            if num_slots < self._num_slots:
                self._num_slots = num_slots
                self.bind_gpu_block_pool(self._pool)
            self.offload_scheduler.ranks_ready({c.rank: c.ready_slots for c in capacities})
            if not all(rank.synchronous_loads for rank in capacities):
                self.offload_scheduler.load_mode.allowed = False

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Build the scheduler's half: the block sizes are final now."""
        self._pool = gpu_block_pool
        config, groups, slot_bytes, num_ranks = self._scheduler_arguments
        self.offload_scheduler = OffloadScheduler(
            config,
            groups,
            gpu_block_pool,
            self._num_slots,
            slot_bytes,
            num_ranks,
            make_block_hash_with_group_id,
        )

    @survives(lambda self, request, _: self._go_on_without(request))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See `Admissions.match`; the only rank may tell of new weights just before."""
        rank = self._rank_beside()
        if rank is not None:
            self.offload_scheduler.contents.weights_were_loaded(rank.weight_loads)
        return self.offload_scheduler.admissions.match(request, num_computed_tokens)

    @survives(
        lambda self, *arguments: self.offload_scheduler.admissions.allocation_failed(*arguments)
    )
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See `Admissions.allocated`."""
        self.offload_scheduler.admissions.allocated(request, blocks, num_external_tokens)

    @survives(lambda self, _: self.offload_scheduler.metadata_without_new_stores())
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMetadata:
        """See `OffloadScheduler.build_metadata`."""
        return self.offload_scheduler.build_metadata(scheduler_output)

    @survives(lambda self, _: None)  # what was not read of the report is read with the next
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the ranks' reports, with what has ended since, where that is known already.

        A report is as old as the launch of its step; under asynchronous scheduling its copies may
        have ended one or two steps before anybody hears of it.
        """
        if self._is_member and connector_output.invalid_block_ids:
            self.offload_scheduler.others_load_failed()
        ended, reported = self._take_ended_loads()
        report = connector_output.kv_connector_worker_meta
        received = connector_output.finished_recving or set()
        news = self.offload_scheduler.reports.take(
            report if isinstance(report, OffloadWorkerMetadata) else None, received, ended, reported
        )
        if news != received:
            connector_output.finished_recving = news

    @survives(lambda self: (set(), set()))  # a report will tell
    def _take_ended_loads(self) -> tuple[set[str], set[str]]:
        rank = self._rank_beside() if self.offload_scheduler.reports.may_come_early else None
        return (set(), set()) if rank is None else rank.take_ended_loads()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the engine free the blocks at once: what is being stored is pinned."""
        return self.request_finished_all_groups(request, (block_ids,))

    @survives(lambda self, request, _: self._end_unseen(request.request_id))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the engine free the blocks at once: what is being stored is pinned."""
        self.offload_scheduler.finished(request, block_ids)
        return False, None

    def _end_step_anyhow(self) -> tuple[None, None]:
        """Let nothing of this step be left; what ended is reported by the next one."""
        if self.has_connector_metadata():
            self.offload_worker.end_step_anyhow(self._get_connector_metadata())
        return None, None

    def _go_on_without(self, request: Request) -> tuple[int, bool]:
        self.offload_scheduler.admissions.go_on_without(request)
        return 0, False

    def _end_unseen(self, request_id: str) -> tuple[bool, None]:
        self.offload_scheduler.forget(request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping until the last store is reported."""
        return self.offload_scheduler.has_pending_work

    def has_pending_block_frees(self) -> bool:
        """Let the engine wait for a store rather than preempt a request. From vLLM 0.32."""
        return self.offload_scheduler.stores.jobs.holds_idle_blocks

    def reset_cache(self) -> bool:
        """Forget what is in host memory, for instance after the weights changed."""
        self.offload_scheduler.contents.reset()
        return True

    def _rank_beside(self) -> OffloadWorker | None:
        """Return the only rank, if it lives in this process, on the scheduler's thread.

        Found once: it begins before the first step, and ends with the engine.
        """
        if self._rank is None and self._alone:
            rank = engine_compat.local_rank(self.engine_id)
            if rank is None:
                self._alone = False
            else:
                self._rank = weakref.ref(rank)
        return None if self._rank is None else self._rank()

    # -- both ----------------------------------------------------------------------------------

    @survives(lambda self: None)
    def get_kv_connector_stats(self) -> OffloadStats | None:
        """Return what this half counted since the last call.

        Of the scheduler's hooks it is the only one that vLLM calls at the end of every step.
        """
        if self.hook_errors.new:
            errors = self.hook_errors.take()
            if self.offload_scheduler is None:
                self.offload_worker.count_hook_errors(errors)
            else:
                self.offload_scheduler.statistics.count("hook_errors", errors)
        if self.offload_scheduler is not None:
            self.offload_scheduler.reports.read()
            rank = self._rank_beside()
            if rank is not None and self.offload_scheduler.has_pending_stores:
                self.offload_scheduler.reports.stores_ended(rank.take_ended_stores())
            self.offload_scheduler.watch.end()
            stats = self.offload_scheduler.take_stats()
            moved = None if rank is None else rank.take_stats()
            if stats is None or moved is None:
                return stats or moved
            # No step may follow that would report what was polled just now.
            return stats.aggregate(moved)
        return self.offload_worker.take_stats()

    def shutdown(self) -> None:
        """End this half."""
        if self.offload_worker is not None:
            self.offload_worker.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        """Rebuild stats from what crossed a process boundary."""
        return OffloadStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        """Register the Prometheus metrics in the API front end."""
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
