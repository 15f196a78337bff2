"""What the plugin changes in vLLM's scheduler: blocks that come free, and requests that must end.

It ends copies before a reset or a sleep, and requests that computed with KV that was not there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kv_offload.engines.vllm.halves import (
    failed_loads,
    requests_with_lost_kv,
    schedulers_of,
    workers_of_process,
)
from kv_offload.engines.vllm.weights import hear_of_weight_loads
from kv_offload.messages import DrainAnswer, StoreJob

logger = logging.getLogger(__name__)

# -- before a reset or a sleep -----------------------------------------------------------------


def resetting_after_drain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineCore.reset_prefix_cache`, through which sleep and pause reset as well."""

    @functools.wraps(original)
    def reset_prefix_cache(
        self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        schedulers = schedulers_of(self)
        if not schedulers:
            return original(self, reset_running_requests, *args, **kwargs)
        hear_of_weight_loads(self, schedulers)
        # Where running requests make the reset fail anyway those that wait for loads go on.
        requeue = reset_running_requests or not self.scheduler.running
        drain_engine_core(self, requeue=requeue)
        with blocks_freed_at_once(self.scheduler):
            done = original(self, reset_running_requests, *args, **kwargs)
        if done:
            for scheduler in schedulers:
                scheduler.contents.engine_was_reset()
        return done

    return reset_prefix_cache


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
    for scheduler in schedulers_of(core):
        reports = scheduler.reports
        abandoned = reports.abandoned_loads()
        waiting = set()
        if requeue:
            waiting = _waiting_for_loads(core.scheduler, reports.waiting_loads())
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
        _give_blocks_back(core.scheduler, waiting - answer.loading)


def drain_rank(_worker: Any, unsent: Sequence[StoreJob], running: Sequence[int]) -> DrainAnswer:
    """Drain this process's rank, between steps; see `OffloadWorker.drain`."""
    answers = [worker.drain(unsent, running) for worker in workers_of_process()]
    merged: DrainAnswer = functools.reduce(DrainAnswer.merge, answers)
    return merged


def _deliver_loads(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Tell vLLM's scheduler that these loads have ended: it frees the blocks of aborted requests.

    Every rank has ended those loads. The ranks' own reports come with a later step, and the
    plugin's scheduler takes them out.
    """
    from vllm.v1.outputs import KVConnectorOutput

    engine_scheduler._update_from_kv_xfer_finished(
        KVConnectorOutput(finished_recving=set(request_ids))
    )


def _waiting_for_loads(engine_scheduler: Any, request_ids: set[str]) -> set[str]:
    """Return those of the requests that wait for a load, or for their turn after it."""
    from vllm.v1.request import RequestStatus

    return {
        request_id
        for request_id in request_ids & engine_scheduler.requests.keys()
        if engine_scheduler.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    }


def _give_blocks_back(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Have requests whose loads have ended wait without blocks, as if nothing had been loaded.

    They are put into the state of those whose load has failed, which vLLM looks up anew when it
    gets to them; it frees their blocks only then, and a second time does no harm. No step reads or
    writes these blocks: a request that waits for its load has not been computed.
    """
    for request_id in request_ids:
        request = engine_scheduler.requests[request_id]
        _recompute(engine_scheduler, request)
        engine_scheduler._inflight_prefills.discard(request)
        engine_scheduler.kv_cache_manager.free(request)


@contextlib.contextmanager
def blocks_freed_at_once(engine_scheduler: Any) -> Iterator[None]:
    """Have vLLM's scheduler hold back no freed block, not even those that it does already.

    With a connector and steps in flight it keeps what a request frees until the last of them has
    ended: it may still write the block, and a load into it need not come after that. A reset of
    running requests raises then. Ours do come after it (`SwapEngine`), and the forwards of a rank
    follow one another. Of the other connectors in a MultiConnector that is not known: nothing
    changes with those.
    """
    alone = getattr(engine_scheduler.get_kv_connector(), "offload_scheduler", None) is not None
    if not alone or not getattr(engine_scheduler, "defer_block_free", False):
        yield
        return
    ended = engine_scheduler.processed_step_seq
    engine_scheduler.processed_step_seq = engine_scheduler.sched_step_seq
    engine_scheduler._drain_deferred_frees()
    engine_scheduler.processed_step_seq = ended
    engine_scheduler.defer_block_free = False
    try:
        yield
    finally:
        engine_scheduler.defer_block_free = True


# -- after a step ------------------------------------------------------------------------------


def ending_lost_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Scheduler.update_from_output`.

    Where it cannot be told which requests computed with wrong KV all of the step end.
    """

    @functools.wraps(original)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        reported = model_runner_output.kv_connector_output
        try:
            lost = requests_with_lost_kv(self.connector, reported) if reported is not None else None
        except Exception:
            lost = set(scheduler_output.num_scheduled_tokens)
            logger.exception(
                "kv-offload: an error while looking for requests with wrong KV: the %d requests of "
                "this step end, since any of them may be one. Please report this",
                len(lost),
            )
        if not lost:
            return original(self, scheduler_output, model_runner_output)
        ended = _end_with_error(self, lost)
        outputs = original(self, scheduler_output, model_runner_output)
        _add_ends(outputs, ended)
        return outputs

    return update_from_output


def recomputing_failed_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Scheduler._update_from_kv_xfer_finished`.

    Older schedulers cannot be told of a failed request, but have the state that newer ones set: one
    whose id is in `failed_recving_kv_req_ids`, with no computed token, is freed, then scheduled.
    """

    @functools.wraps(original)
    def update(self: Any, output: Any) -> None:
        original(self, output)
        for request_id in _waiting_for_loads(self, failed_loads(self.connector, output)):
            _recompute(self, self.requests[request_id])

    return update


def _recompute(engine_scheduler: Any, request: Any) -> None:
    """Have vLLM free a request that waits for its load, and schedule it as one without any."""
    request.num_computed_tokens = 0
    engine_scheduler.failed_recving_kv_req_ids.add(request.request_id)


def _end_with_error(engine_scheduler: Any, request_ids: set[str]) -> list[Any]:
    """End requests that computed with KV that was not there; return those that had not ended.

    vLLM can be told of invalid blocks, but has no right way to go on from there under asynchronous
    scheduling: it rewinds a running request's computed tokens without its placeholders, and asserts
    or computes a token in the wrong place (0.26 to 0.33). So they end by the method that ends
    others with an error. No block keeps its key: what was computed with that KV, also in the step
    behind, would be served to others.
    """
    from vllm.v1.request import RequestStatus

    num_blocks = engine_scheduler.kv_cache_config.num_blocks
    engine_scheduler.kv_cache_manager.evict_blocks(set(range(num_blocks)))
    ended: list[Any] = engine_scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR)
    return ended


def _add_ends(outputs: Any, ended: Sequence[Any]) -> None:
    """Add to what vLLM returns of a step that these requests have ended."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request in ended:
        outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
