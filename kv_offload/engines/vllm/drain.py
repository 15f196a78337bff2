"""Ends copies before vLLM resets, requests with wrong KV, and recomputes those that got none."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from kv_offload.engines.vllm.halves import (
    failed_loads,
    halves,
    requests_with_lost_kv,
    schedulers_of,
    workers_of_process,
)
from kv_offload.engines.vllm.idle import tell_front_end
from kv_offload.engines.vllm.weights import hear_of_weight_loads
from kv_offload.messages import DrainAnswer, StoreJob

logger = logging.getLogger(__name__)


def reset_after_drain(
    original: Callable[..., Any],
    self: Any,
    reset_running_requests: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run around `EngineCore.reset_prefix_cache`, through which sleep and pause reset as well."""
    schedulers = schedulers_of(self)
    if not schedulers:
        return original(self, reset_running_requests, *args, **kwargs)
    hear_of_weight_loads(self, schedulers)
    # Running requests can make the reset fail. Then those that wait for loads keep waiting.
    drain_engine_core(self, requeue=reset_running_requests or not self.scheduler.running)
    with blocks_freed_at_once(self):
        done = original(self, reset_running_requests, *args, **kwargs)
    if done:
        for scheduler in schedulers:
            scheduler.engine_was_reset()
    tell_front_end(self, schedulers)
    return done


def drain_engine_core(core: Any, *, requeue: bool = True) -> None:
    """Have all ranks end their copies, and the scheduler release the blocks that they hold.

    Those are the sources of stores and the destinations of loads. Aborted requests are freed. With
    `requeue` a request that waits for its load, or for room to run with what was loaded, gives its
    blocks back, so that a reset can succeed; vLLM looks it up again when it is its turn.

    The ranks are called directly, not through a step: a step would also run live requests, and its
    outputs would have no receiver. A rank has executed all steps that were launched before, so it
    knows their stores.
    """
    for scheduler in schedulers_of(core):
        reports = scheduler.reports
        abandoned = reports.abandoned_loads()
        waiting = _waiting_for_loads(core.scheduler, reports.waiting_loads()) if requeue else set()
        loaded = _waiting_for_room(core.scheduler, reports.loaded()) if requeue else set()
        if not (scheduler.has_pending_stores or abandoned or waiting or loaded):
            continue
        arguments = *reports.begin_drain(), frozenset(abandoned | waiting)
        answers = core.model_executor.collective_rpc(drain_rank, args=arguments)
        answer: DrainAnswer = functools.reduce(DrainAnswer.merge, answers)
        if not reports.end_drain(answer):
            logger.error("kv-offload: gave up stores that did not end; their prefixes are not kept")
        ended = reports.running_loads() - answer.loading
        if not requeue:
            ended &= abandoned
        if ended:
            reports.deliver(ended, functools.partial(_deliver_loads, core.scheduler))
        # Also those whose loads have not ended on all ranks: one may have failed where it has.
        _recompute(core.scheduler, waiting)
        _give_blocks_back(core.scheduler, waiting - answer.loading | loaded)


def drain_rank(
    _worker: Any, unsent: Sequence[StoreJob], running: Sequence[int], given_up: Set[str]
) -> DrainAnswer:
    """Drain this process's rank, between steps; see `OffloadWorker.drain`."""
    answers = [worker.drain(unsent, running, given_up) for worker in workers_of_process()]
    merged: DrainAnswer = functools.reduce(DrainAnswer.merge, answers)
    return merged


def fence_rank(_worker: Any) -> bool:
    """Fence the loads of this process's rank; see `OffloadWorker.fence_loads`."""
    return False not in [worker.fence_loads() for worker in workers_of_process()]


def _deliver_loads(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Tell vLLM's scheduler that all ranks have ended these loads: it frees aborted requests.

    The ranks' own reports come with a later step; the plugin's scheduler takes them out.
    """
    from vllm.v1.outputs import KVConnectorOutput

    engine_scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=request_ids))


def _waiting_for_loads(engine_scheduler: Any, request_ids: set[str]) -> set[str]:
    """Return which of the requests wait for a load, or for their turn after it."""
    from vllm.v1.request import RequestStatus

    alive, waiting = engine_scheduler.requests, RequestStatus.WAITING_FOR_REMOTE_KVS
    return {name for name in request_ids & alive.keys() if alive[name].status == waiting}


def _waiting_for_room(engine_scheduler: Any, request_ids: set[str]) -> set[str]:
    """Return which of the requests have been loaded, and taken from those that wait for loads.

    That is when it is their turn. Where too few blocks are free they do not run then.
    """
    from vllm.v1.request import RequestStatus

    alive, states = engine_scheduler.requests, (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    return {name for name in request_ids & alive.keys() if alive[name].status in states}


def _give_blocks_back(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Have requests whose loads have ended wait without blocks, as if nothing had been loaded.

    vLLM looks a request without computed tokens up anew when it is its turn. One that it takes to
    wait for its load must have the state of one whose load has failed, and is freed then; freeing
    it twice does no harm. No step reads or writes these blocks: no such request has been computed.
    """
    for request_id in request_ids:
        request = engine_scheduler.requests[request_id]
        request.num_computed_tokens = 0
        engine_scheduler._inflight_prefills.discard(request)
        engine_scheduler.kv_cache_manager.free(request)


def _make_room(engine_scheduler: Any, schedulers: Sequence[Any]) -> None:
    """Have loaded requests give their blocks back where they keep each other from running.

    vLLM loads for many requests side by side. It keeps free what they need to run, but of windows
    too little. Up to 0.28 at least, with priorities, a request that finds no room holds up those
    behind it, also those that were loaded. One that vLLM has tried to run keeps its blocks, since
    it is tried again first; alone it does not.
    """
    from vllm.v1.core.sched.interface import PauseState

    alive = engine_scheduler.requests
    for scheduler in schedulers:
        held = {r for r in scheduler.stranded & alive.keys() if alive[r].num_computed_tokens}
        tried = _waiting_for_room(engine_scheduler, held)
        waiting = _waiting_for_loads(engine_scheduler, held)
        if not tried | waiting or engine_scheduler.pause_state is not PauseState.UNPAUSED:
            continue
        given = tried | waiting
        if tried and len(given) > 1:
            given.remove(min(alive[name] for name in tried).request_id)
        _recompute(engine_scheduler, waiting)
        _give_blocks_back(engine_scheduler, given)
        logger.info(
            "kv-offload: no loaded request found room to run: %d of them gave their GPU blocks "
            "back, and load again when it is their turn",
            len(given),
        )


@contextlib.contextmanager
def blocks_freed_at_once(core: Any) -> Iterator[None]:
    """Have vLLM's scheduler free at once all blocks that it holds back for steps in flight.

    With a connector it keeps what a request frees until those steps have ended: they may still
    write the block, and a load into it might not wait for them. A reset of running requests raises
    then. The ranks have executed all steps that were launched, so from now on their loads wait for
    these, and the forwards of a rank follow one another. Nothing is known of other connectors, so
    inside a MultiConnector nothing changes.
    """
    engine_scheduler = core.scheduler
    alone = getattr(engine_scheduler.get_kv_connector(), "offload_scheduler", None) is not None
    if not alone or not engine_scheduler.defer_block_free:
        yield
        return
    ended = engine_scheduler.processed_step_seq
    in_flight = ended < engine_scheduler.sched_step_seq
    if in_flight and not all(core.model_executor.collective_rpc(fence_rank)):
        yield
        return
    engine_scheduler.processed_step_seq = engine_scheduler.sched_step_seq
    engine_scheduler._drain_deferred_frees()
    engine_scheduler.processed_step_seq = ended
    engine_scheduler.defer_block_free = False
    try:
        yield
    finally:
        engine_scheduler.defer_block_free = True


def end_lost_requests(
    original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    """Run around `Scheduler.update_from_output`.

    All requests of the step end if an error hides which of them computed with wrong KV.
    """
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
    ended = _end_with_error(self, lost) if lost is not None else ()
    outputs = original(self, scheduler_output, model_runner_output)
    _add_ends(outputs, ended)
    stranded = [s for s in halves(self.connector, "offload_scheduler") if s.stranded]
    if stranded:  # hardly ever
        _make_room(self, stranded)
    return outputs


def recompute_failed_requests(original: Callable[..., Any], self: Any, output: Any) -> None:
    """Run around `Scheduler._update_from_kv_xfer_finished`.

    Older schedulers cannot be told of a failed request, but have the state that newer ones set: a
    request in `failed_recving_kv_req_ids` without computed tokens is freed, then scheduled.
    """
    original(self, output)
    _recompute(self, _waiting_for_loads(self, failed_loads(self.connector, output)))


def _recompute(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Have vLLM free requests that wait for their loads, and schedule them as ones without any."""
    for request_id in request_ids:
        engine_scheduler.requests[request_id].num_computed_tokens = 0
    engine_scheduler.failed_recving_kv_req_ids |= request_ids


def _end_with_error(engine_scheduler: Any, request_ids: set[str]) -> list[Any]:
    """End requests that computed with KV that was not there; return those that had not ended.

    vLLM can be told of invalid blocks, but has no right way to go on from there under asynchronous
    scheduling: it rewinds a running request's computed tokens without its placeholders, and asserts
    or computes a token in the wrong place (0.26 to 0.33). No block keeps its key: others would be
    served what was computed with that KV, also in the step behind.
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
