"""The connector class, which vLLM builds in the scheduler's process and in each rank's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kv_offload.engines.vllm.hooks.errors import HookErrors, survives
from kv_offload.engines.vllm.hooks.scheduler import SchedulerHooks
from kv_offload.engines.vllm.hooks.worker import WorkerHooks
from kv_offload.engines.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from kv_offload.engines.vllm.model.block_order import wanted_layout
from kv_offload.engines.vllm.patches.patch import log_new
from kv_offload.engines.vllm.plugin import register
from kv_offload.engines.vllm.start.build import Engine
from kv_offload.engines.vllm.start.members import is_asked_of_member
from kv_offload.engines.vllm.versions import host_hit_source

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A MultiConnector looks up a member's stats by the registered name, even if the member was
# configured by the path of this module.
register()


class KVOffloadConnector(SchedulerHooks, WorkerHooks):
    """Keeps computed KV blocks in host memory and loads them for later requests.

    Raises `ConfigError`, `CapacityError` or `UnsupportedError` at start. Later errors do not end
    the engine.
    """

    _cache_hit_source = host_hit_source()

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.hook_errors = HookErrors()
        engine = Engine(vllm_config, kv_cache_config)
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        # One of the two stays None: vLLM calls each hook only on its own half.
        self.offload_scheduler = None  # type: ignore[assignment]
        self.offload_worker = None  # type: ignore[assignment]
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler(engine)
            log_new()
        else:
            self._start_worker(engine)

    @survives(lambda self: None)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Return this half's figures since the last call. vLLM asks at the end of every step."""
        errors = self.hook_errors.take()
        scheduler = self.offload_scheduler
        if scheduler is None:
            return ConnectorStats.of(self.offload_worker.take_stats(errors))
        scheduler.step_ended()  # first: the step has ended even if something below fails
        counted = scheduler.take_stats(errors)
        if counted is not None and counted.data.get("hit_tokens"):
            self._missed_requests = None
        # Poll the local rank: there might be no further step to report its figures.
        rank = self._local_rank()
        moved = None if rank is None else rank.take_stats()
        if counted is None or moved is None:
            return ConnectorStats.of(counted or moved)
        return ConnectorStats(counted.data).aggregate(moved)

    def shutdown(self) -> None:
        if self.offload_worker is not None:
            self.offload_worker.shutdown()
        if self.offload_scheduler is not None:
            self.offload_scheduler.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the KV cache order that is fastest to copy, if vLLM supports it for this model.

        None for a member: a MultiConnector fails to start if its members request different orders.
        """
        return None if is_asked_of_member() else wanted_layout(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorPromMetrics:
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
