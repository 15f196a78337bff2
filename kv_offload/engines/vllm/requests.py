"""Changes requests in vLLM's scheduler in ways for which there is no hook."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


def waiting_for_loads(engine_scheduler: Any, request_ids: set[str]) -> set[str]:
    """Return the requests that wait for a load, or for their turn after it."""
    return _in_state(engine_scheduler, request_ids, "WAITING_FOR_REMOTE_KVS")


def waiting_for_room(engine_scheduler: Any, request_ids: set[str]) -> set[str]:
    """Return the loaded requests whose turn came and that found too few free blocks."""
    return _in_state(engine_scheduler, request_ids, "WAITING", "PREEMPTED")


def _in_state(engine_scheduler: Any, request_ids: set[str], *states: str) -> set[str]:
    alive = engine_scheduler.requests
    return {name for name in request_ids & alive.keys() if alive[name].status.name in states}


def keep_at(request: Any, shared_tokens: int) -> None:
    """Make vLLM cache the windows and states at the end of a request's shared prefix.

    vLLM does this itself if its own cache has the rest of the prefix. Otherwise it caches them only
    at the end of a prompt.
    """
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, shared_tokens)


def recompute(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Make vLLM free requests once their loads have ended, and schedule them without loads.

    vLLM 0.31 to 0.33 does this with `failed_recving_kv_req_ids` that have no computed tokens.
    """
    for request_id in request_ids:
        _forget_load(engine_scheduler, request_id)
    engine_scheduler.failed_recving_kv_req_ids |= request_ids


def _forget_load(engine_scheduler: Any, request_id: str) -> Any:
    """Discard vLLM's record of a request's loaded tokens; return the request.

    Without this, a request whose load is given up would stay in `_inflight_prefills`, for which
    vLLM keeps blocks free, and would need its blocks twice to be admitted.
    """
    request = engine_scheduler.requests[request_id]
    request.num_computed_tokens = 0
    engine_scheduler._inflight_prefills.discard(request)
    return request


def give_blocks_back(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Make requests whose loads have ended wait without blocks, as if nothing had been loaded.

    vLLM looks them up again when it is their turn. No step reads or writes the freed blocks. Call
    `recompute` first for requests that vLLM still considers loading; vLLM then frees their blocks a
    second time, which is harmless.
    """
    for request_id in request_ids:
        request = _forget_load(engine_scheduler, request_id)
        engine_scheduler.kv_cache_manager.free(request)
    queue_without_blocks(engine_scheduler, request_ids)


def queue_without_blocks(engine_scheduler: Any, request_ids: set[str]) -> None:
    """Move waiting requests whose blocks were freed to the queue for requests without blocks.

    vLLM first serves the queue of requests that hold blocks, and stops there at the first one that
    finds no room. A request without blocks at its head would hold up requests that free blocks,
    such as sessions whose prompts grow.
    """
    holding = engine_scheduler.kv_holding_waiting
    moved = [request for request in holding if request.request_id in request_ids]
    if moved:
        holding.remove_requests(moved)
        engine_scheduler.waiting.prepend_requests(reversed(moved))


def make_room(engine_scheduler: Any, stranded: set[str]) -> None:
    """Make loaded requests give up their blocks if they keep each other from running.

    vLLM loads for many requests at a time and reserves the blocks that they need to run, but too
    few for windows. Of several requests, the first one that vLLM has tried to run keeps its blocks,
    since vLLM tries it again first. Otherwise all of them could load and give up blocks forever.
    """
    from vllm.v1.core.sched.interface import PauseState

    alive = engine_scheduler.requests
    held = {r for r in stranded & alive.keys() if alive[r].num_computed_tokens}
    waiting = waiting_for_loads(engine_scheduler, held)
    tried = waiting_for_room(engine_scheduler, held)
    given = waiting | tried
    if tried and len(given) > 1:
        given.remove(min(alive[name] for name in tried).request_id)
    if not given or engine_scheduler.pause_state is not PauseState.UNPAUSED:
        return
    recompute(engine_scheduler, waiting)
    give_blocks_back(engine_scheduler, given)
    logger.info(
        "kv-offload: no loaded request had room to run: %d of them gave back their GPU blocks, "
        "and will load again when it is their turn",
        len(given),
    )


def report_failed(engine_scheduler: Any, request_ids: set[str], *, recomputes: bool) -> list[Any]:
    """Report failed loads to vLLM before it learns that they have ended.

    vLLM recomputes these requests with `recomputes`; otherwise this ends them with an error and
    returns them.
    """
    failed = waiting_for_loads(engine_scheduler, request_ids)
    if recomputes:
        recompute(engine_scheduler, failed)
        return []
    return end_with_error(engine_scheduler, failed)


def report_loaded(engine_scheduler: Any) -> None:
    """Make vLLM ask its connector which loads have ended, without a step's output."""
    from vllm.v1.outputs import KVConnectorOutput

    engine_scheduler._update_from_kv_xfer_finished(KVConnectorOutput())


def end_with_error(engine_scheduler: Any, request_ids: set[str]) -> list[Any]:
    """End requests with an error; return those that were still alive."""
    from vllm.v1.request import RequestStatus

    ended: list[Any] = engine_scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR)
    return ended


def end_lost(engine_scheduler: Any, request_ids: set[str]) -> list[Any]:
    """End requests that may have computed with missing KV; return those that were still alive.

    Also clears the hashes of all GPU blocks: others could hit blocks computed with that KV.
    """
    num_blocks = engine_scheduler.kv_cache_config.num_blocks
    engine_scheduler.kv_cache_manager.evict_blocks(set(range(num_blocks)))
    return end_with_error(engine_scheduler, request_ids)


def add_ends(outputs: Any, ended: Sequence[Any]) -> None:
    """Report the end of these requests in vLLM's outputs of a step."""
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
