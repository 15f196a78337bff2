"""Builds the connector's half for its role, from vLLM's configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_swap.layout import packed_page_bytes
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kv_offload.config import trace_config
from kv_offload.engines.vllm.events import describe_blocks, events_are_on, find_tracer
from kv_offload.engines.vllm.model import groups
from kv_offload.engines.vllm.model.ordering import gives_idle_blocks
from kv_offload.engines.vllm.patches import install_for_scheduler
from kv_offload.engines.vllm.runner import VLLMRank
from kv_offload.engines.vllm.start import log, members, ranks, support, tiers
from kv_offload.engines.vllm.versions import bytes_per_block, vllm_version
from kv_offload.scheduler.core import EngineFacts, SlotFacts
from kv_offload.scheduler.observers import Observers
from kv_offload.scheduler.scheduler import OffloadScheduler
from kv_offload.simulation.trace_recorder import TraceRecorder
from kv_offload.worker.capacity import check_available
from kv_offload.worker.sharing import ALONE, arena_bytes
from kv_offload.worker.worker import OffloadWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kv_offload.engine import BlockPool


class Engine:
    """vLLM's configuration, read and checked while a connector is being built.

    Raises `ConfigError`, `CapacityError` or `UnsupportedError`.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.version = vllm_version()
        replicas = ranks.count_local_replicas(vllm_config)
        self.hidden_replicas = replicas.hidden
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.traced = trace_config(options, replicas=replicas.count)
        self.multi_connectors = members.enclosing_connectors()
        self.enclosing = tuple(o._vllm_config.kv_transfer_config for o in self.multi_connectors)
        support.check_supported(vllm_config, self.version, self.enclosing, kv_cache_config)
        parallel = vllm_config.parallel_config
        self.cache_groups = groups.engine_groups(vllm_config, kv_cache_config)
        self.gives_idle_blocks = gives_idle_blocks(vllm_config, self.cache_groups)
        self.sharing_ranks = groups.ranks_with_equal_bytes(parallel, kv_cache_config)
        config = self.traced.config
        found = tiers.find_tiers(config, vllm_config, kv_cache_config)
        self.disk, self.remote, self.pool = found

    @functools.cached_property
    def recorder(self) -> TraceRecorder | None:
        """Records this replica's requests; None without `record_trace`."""
        config = self.traced.config
        file = tiers.recording_file(config, self.vllm_config)
        return None if file is None else TraceRecorder(file, config.record_trace_bytes)


def prepare_scheduler(engine: Engine) -> SlotFacts:
    """Patch vLLM for the scheduler's half, and return the slots that a rank holds at most.

    The number is exact once the ranks report: ranks that cannot share memory, and pipeline stages
    with larger blocks, hold fewer, and only ranks know a packed slot's size.
    """
    config = engine.traced.config
    log.log_warnings(engine.traced, engine.vllm_config, engine.enclosing)
    if config.keep_on_sleep:
        support.check_keep_on_sleep()
    install_for_scheduler(engine.version, config)
    log.log_configuration(engine.traced, hidden_replicas=engine.hidden_replicas)
    block_bytes = bytes_per_block(engine.kv_cache_config)
    world_size = engine.vllm_config.parallel_config.world_size
    rank_bytes = arena_bytes(config.cpu_bytes, world_size, engine.sharing_ranks)
    least_bytes = packed_page_bytes(block_bytes) if config.pack_kv else block_bytes
    return SlotFacts(max(1, rank_bytes // least_bytes), block_bytes, block_bytes)


def build_scheduler(
    engine: Engine,
    pool: BlockPool,
    slots: SlotFacts,
    is_to_rest: Callable[[], bool],
    wake: Callable[[], None] | None,
) -> OffloadScheduler:
    """Build the scheduler's half, which is built again if ranks hold fewer slots."""
    config, vllm_config = engine.traced.config, engine.vllm_config
    world_size = vllm_config.parallel_config.world_size
    specs = []
    if engine.disk is not None and config.disk is not None:
        disk, sharing_ranks = engine.disk, engine.sharing_ranks
        specs.append(
            tiers.disk_tier(config.disk, disk, slots.slot_bytes, world_size, sharing_ranks)
        )
    if engine.remote is not None and config.remote is not None:
        specs.append(tiers.remote_tier(config.remote, world_size))
    # Inside a MultiConnector, or if vLLM zeroes new blocks, loads start just before a forward pass.
    starts_late = bool(engine.enclosing) or engine.kv_cache_config.needs_kv_cache_zeroing
    facts = EngineFacts(
        engine.cache_groups,
        pool,
        make_block_hash_with_group_id,
        world_size,
        loads_overlap=engine.gives_idle_blocks and not starts_late,
        is_to_rest=is_to_rest,
        wake=wake,
    )
    observers = Observers(
        describe=describe_blocks if events_are_on(vllm_config) else None,
        recorder=engine.recorder,
        report_span=find_tracer(vllm_config),
    )
    return OffloadScheduler(config, facts, slots, specs, observers)


def build_worker(engine: Engine) -> OffloadWorker:
    """Build a rank's half. No rank allocates memory before all have checked how much is free."""
    parallel, seat = engine.vllm_config.parallel_config, None
    if engine.pool is not None:
        seat = engine.pool.take_seat(parallel.rank, ranks.gather_over_ranks)
    kept_bytes, wait = (0, None) if seat is None else (seat.kept_bytes, seat.wait_for_readers)
    try:
        warning = check_available(engine.traced, ranks.gather_over_ranks, kept_bytes, wait)
    except BaseException:
        if seat is not None:
            seat.leave()
        raise
    if warning and parallel.rank == 0:
        log.logger.warning("kv-offload: %s", warning)
    shares = engine.sharing_ranks > 1
    return OffloadWorker(
        engine.traced.config,
        VLLMRank(
            engine.vllm_config,
            engine.kv_cache_config,
            gives_idle_blocks=engine.gives_idle_blocks,
            packs=engine.traced.config.pack_kv,
        ),
        parallel.rank,
        parallel.world_size,
        ranks.tensor_parallel_ranks() if shares else ALONE,
        {
            name: tier
            for name, tier in (
                ("disk", engine.disk),
                ("remote", engine.remote),
            )
            if tier is not None
        },
        seat,
    )
