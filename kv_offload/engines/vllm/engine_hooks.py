"""What the engine does with the plugin's two halves from outside the connector's hooks.

Ends copies before a reset or a sleep, names failed loads to the versions that have no hook for
them, and ends requests that computed with KV that was not there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from kv_offload.engines.vllm import compat as engine_compat
from kv_offload.engines.vllm.compat import halves, logger
from kv_offload.messages import DrainAnswer, OffloadWorkerMetadata, StoreJob, WorkerCapacity


def drain_engine_core(core: Any, *, requeue: bool = True) -> None:
    """Have all ranks end their copies, and the scheduler release the blocks that they hold.

    Those are the pinned sources of stores, and the destinations of loads. A request that was
    aborted is freed. With `requeue` one that waits for its load goes back to those that hold no
    block: without the plugin it would be there, and a reset would succeed. It is looked up again
    when it is its turn.

    `core` is vLLM's `EngineCore`. The ranks are called directly, not through steps: a step would
    also run live requests, and its outputs would have no receiver. Steps that were dispatched
    before are executed first, so every store of theirs is known to the ranks.
    """
    for scheduler in halves(core.scheduler.get_kv_connector(), "offload_scheduler"):
        reports = scheduler.reports
        abandoned = reports.abandoned_loads()
        waiting = set()
        if requeue:
            waiting = engine_compat.waiting_for_loads(core.scheduler, reports.waiting_loads())
        if not (scheduler.has_pending_stores or abandoned or waiting):
            continue
        answers = core.model_executor.collective_rpc(drain_rank, args=reports.begin_drain())
        answer: DrainAnswer = functools.reduce(DrainAnswer.merge, answers)
        if not reports.end_drain(answer):
            logger.error("kv-offload: gave up stores that did not end; their prefixes are not kept")
        ended = reports.running_loads() - answer.loading
        if not requeue:
            ended &= abandoned
        if ended:
            reports.deliver(ended, functools.partial(_deliver_loads, core.scheduler))
        engine_compat.give_blocks_back(core.scheduler, waiting - answer.loading)


def _deliver_loads(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Tell vLLM's scheduler that these loads have ended: it frees the blocks of aborted requests.

    Every rank has ended those loads. The ranks' own reports come with a later step, and the
    plugin's scheduler takes them out.
    """
    from vllm.v1.outputs import KVConnectorOutput

    engine_scheduler._update_from_kv_xfer_finished(
        KVConnectorOutput(finished_recving=set(request_ids))
    )


def failed_loads(connector: Any, output: Any) -> set[str]:
    """Return the requests whose loads a step's output reports as failed."""
    return {
        request_id
        for _, report in _own_reports(connector, output.kv_connector_worker_meta)
        for request_id in report.failed_loads
    }


def requests_with_lost_kv(connector: Any, output: Any) -> set[str]:
    """Return the requests that have computed with KV that a step's output reports as lost."""
    return {
        request_id
        for scheduler, report in _own_reports(connector, output.kv_connector_worker_meta)
        if report.lost_loads
        for request_id in scheduler.lose(report.lost_loads)
    }


def rank_capacities(_worker: Any) -> list[WorkerCapacity]:
    """Return what this process's rank holds. Runs in the worker, once its KV cache is there."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return [half.capacity() for half in halves(get_kv_transfer_group(), "offload_worker")]


def _own_reports(connector: Any, report: Any) -> Iterator[tuple[Any, OffloadWorkerMetadata]]:
    """Yield our schedulers, each with what its ranks report, also inside a MultiConnector."""
    if isinstance(report, OffloadWorkerMetadata):
        yield connector.offload_scheduler, report
    else:
        members = getattr(connector, "_connectors", ())
        for member, part in zip(members, getattr(report, "metadata", ()), strict=False):
            yield from _own_reports(member, part)


def drain_rank(_worker: Any, unsent: Sequence[StoreJob], running: Sequence[int]) -> DrainAnswer:
    """Drain this process's rank, between steps; see `OffloadWorker.drain`."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    answers = [
        worker.drain(unsent, running)
        for worker in halves(get_kv_transfer_group(), "offload_worker")
    ]
    merged: DrainAnswer = functools.reduce(DrainAnswer.merge, answers)
    return merged
