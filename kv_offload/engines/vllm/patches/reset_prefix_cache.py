"""Ends all copies before vLLM resets its prefix cache: blocks held by copies would prevent it.

A reset also invalidates the disk's contents for a restart, and returns `True` only once that is
certain: a process can be killed at any moment, and a trainer that changes weights relies on the
answer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kv_offload.engines.vllm import requests
from kv_offload.engines.vllm.locate import call_ranks, connector_of
from kv_offload.engines.vllm.publish_stats import publish_stats

if TYPE_CHECKING:
    from kv_offload.scheduler.scheduler import OffloadScheduler

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Time limit for removing the disk's index, if all ranks failed to invalidate their files."""


def reset_after_drain(
    original: Callable[..., Any],
    self: Any,
    reset_running_requests: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run around `EngineCore.reset_prefix_cache`, which sleep and pause also call.

    Also returns False if a restart might find the disk's earlier contents.
    """
    connector = connector_of(self)
    if connector is None:
        return original(self, reset_running_requests, *args, **kwargs)
    offload = connector.offload_scheduler
    # A rank's own report may arrive after the reset and must not drop blocks stored since.
    for weight_loads in call_ranks(self, "weight_loads"):
        offload.resets.weights_were_loaded(weight_loads)
    # Running requests can make the reset fail: then requests that wait for loads keep waiting.
    requeue = reset_running_requests or not self.scheduler.running
    drain(self, connector, requeue=requeue)
    with blocks_freed_at_once(self):
        done = original(self, reset_running_requests, *args, **kwargs)
    if done:
        offload.resets.engine_was_reset()
    settled = settle(self, offload)
    publish_stats(self)
    return done if settled else False


def settle(core: Any, offload: OffloadScheduler) -> bool:
    """Ensure that no restart finds dropped blocks; return whether that is certain. Blocks."""
    if offload.tiers.is_settled:
        return True
    problems = call_ranks(core, "revoke_tiers")
    return offload.tiers.settle(problems, SETTLE_SECONDS)


def drain(core: Any, connector: Any, *, requeue: bool = True) -> None:
    """Make all ranks end our connector's copies, and release the blocks that these hold.

    With `requeue`, aborted requests are freed, and requests that wait for their load, or for room
    to run after it, give up their blocks; vLLM looks them up again when it is their turn.

    The ranks are called directly: a step would also run live requests, and its outputs would be
    lost. Each rank has executed all steps launched so far, so it knows their jobs.
    """
    engine_scheduler, offload = core.scheduler, connector.offload_scheduler
    in_flight = offload.in_flight
    waiting = requests.waiting_for_loads(engine_scheduler, in_flight.waiting)
    loaded = requests.waiting_for_room(engine_scheduler, in_flight.loaded)
    held = in_flight.pinned_blocks or in_flight.abandoned
    if not (held or in_flight.has_loaded or waiting or loaded):
        return
    for answer in call_ranks(core, "drain", offload.plan_drain()):
        connector.apply_drain_report(answer)
    if offload.give_up_stores():
        logger.error("kv-offload: gave up stores that did not end; their prefixes are not kept")
    if requeue:
        # Include requests whose loads have not ended on all ranks: a load may already have failed
        # on one rank.
        requests.recompute(engine_scheduler, waiting)
        # `loaded` includes failed loads. vLLM frees aborted requests.
        connector.loaded |= offload.take_effects(between_steps=True).loaded
        requests.report_loaded(engine_scheduler)
        requests.give_blocks_back(engine_scheduler, waiting - in_flight.loading | loaded)


@contextlib.contextmanager
def blocks_freed_at_once(core: Any) -> Iterator[None]:
    """Make vLLM's scheduler free at once the blocks that it holds back for steps in flight.

    A reset of running requests raises while blocks are held back. Steps in flight may still write
    such a block, so each rank makes later loads wait for them (`fence_loads`); the ranks have
    already executed all launched steps. Does nothing inside a MultiConnector: loads of other
    connectors may not wait.
    """
    engine_scheduler = core.scheduler
    alone = getattr(engine_scheduler.get_kv_connector(), "offload_scheduler", None) is not None
    if not alone or not engine_scheduler.defer_block_free:
        yield
        return
    ended = engine_scheduler.processed_step_seq
    in_flight = ended < engine_scheduler.sched_step_seq
    if in_flight and not all(call_ranks(core, "fence_loads")):
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
