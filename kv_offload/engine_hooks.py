"""What the engine does with the plugin's two halves from outside the connector's hooks.

Ends running stores before a reset or a sleep, and names failed loads to the versions that have no
hook for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_offload.engine_compat import halves, logger
from kv_offload.metadata import JobResult, StoreJob


def drain_engine_core(core: Any) -> None:
    """Have all ranks end their copies, and the scheduler release the blocks that they hold.

    Those are the pinned sources of stores, and the destinations of loads whose requests were
    aborted. A request that still waits for its load keeps its blocks, as with any connector.

    `core` is vLLM's `EngineCore`. The ranks are called directly, not through steps: a step would
    also run live requests, and its outputs would have no receiver. Steps that were dispatched
    before are executed first, so every store of theirs is known to the ranks.
    """
    for scheduler in halves(core.scheduler.get_kv_connector(), "offload_scheduler"):
        abandoned = scheduler.abandoned_loads()
        if not (scheduler.has_pending_stores or abandoned):
            continue
        unsent, running = scheduler.begin_drain()
        answers = core.model_executor.collective_rpc(drain_rank, args=(unsent, running))
        results: dict[int, JobResult] = {}
        for stored, loading in answers:
            abandoned -= loading
            for job_id, result in stored.items():
                results[job_id] = result.merge(results[job_id]) if job_id in results else result
        if not scheduler.end_drain(results):
            logger.error("kv-offload: gave up stores that did not end; their prefixes are not kept")
        if abandoned:
            scheduler.draining = True
            try:
                _deliver_loads(core.scheduler, abandoned)
            finally:
                scheduler.draining = False
            scheduler.expect_again(abandoned)


def _deliver_loads(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Have vLLM's scheduler free the blocks of requests that ended while their loads ran.

    Every rank has ended those loads. The ranks' own reports come with a later step, and the
    plugin's scheduler takes them out.
    """
    from vllm.v1.outputs import KVConnectorOutput

    engine_scheduler._update_from_kv_xfer_finished(
        KVConnectorOutput(finished_recving=set(request_ids))
    )


def take_failed_loads(connector: Any) -> set[str]:
    """Return the requests whose loads failed since the last call, for the engine to recompute."""
    return {
        request_id
        for scheduler in halves(connector, "offload_scheduler")
        for request_id in scheduler.take_failed_loads()
    }


def drain_rank(
    _worker: Any, unsent: Sequence[StoreJob], running: Sequence[int]
) -> tuple[dict[int, JobResult], frozenset[str]]:
    """Drain this process's rank; return its stores' results and the loads that are not well ended.

    Runs in the worker, between steps.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    results: dict[int, JobResult] = {}
    loading: frozenset[str] = frozenset()
    for worker in halves(get_kv_transfer_group(), "offload_worker"):
        results.update(worker.drain(unsent, running))
        loading |= worker.unfinished_loads
    return results, loading
