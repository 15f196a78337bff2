"""Texts, groups and short steps for tests of the played engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import pytest
from vllm.v1.request import Request, RequestStatus

from kv_offload.cache.prefix import CacheGroup
from kv_offload.scheduler.stores.budget import MIN_HORIZON_SECONDS
from kv_offload.scheduler.timing import StepTime
from tests.support.configurations import PAGE_WORDS
from tests.support.played_engine import PlayedEngine
from tests.support.timing import Harsh

BLOCK = 4
FULL, WINDOW = CacheGroup(0, BLOCK), CacheGroup(1, BLOCK, 6)
CHUNKS = CacheGroup(1, BLOCK, chunk_tokens=8)
STATE = CacheGroup(1, BLOCK, holds_state=True)
RING = CacheGroup(1, 2 * BLOCK, chunk_tokens=BLOCK, is_scratch=True)

SLOT_BYTES = PAGE_WORDS * 8
"""Bytes of any group's slot in host memory."""

PROMPT = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1]
"""Five blocks of four tokens, and one more token."""
OTHER = [0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0]

both_ways = pytest.mark.usefixtures("async_scheduling")
both_runners = pytest.mark.usefixtures("replaces_resumed")
"""Run a test with both of vLLM's schedulers, or both model runners."""


def harsh_engine(*arguments: Any, eager: bool = False, **more: Any) -> PlayedEngine:
    """Return an engine whose device always has the worst timing allowed."""
    return PlayedEngine(*arguments, timing=Harsh(eager=eager), **more)


Engine = TypeVar("Engine", bound=PlayedEngine)


def blocks(count: int) -> int:
    """Return the bytes of these blocks in the totals."""
    return count * SLOT_BYTES


def store(engine: Engine, prompt: Sequence[int], request_id: str = "stored") -> Engine:
    """Compute a prompt, store it in host memory, and drop it from the engine's cache."""
    engine.serve(request_id, prompt, 1)
    return forget(engine)


def serve_under_pressure(engine: Engine) -> Engine:
    """Serve requests that share prefixes and do not all fit; one of them is aborted.

    Then serve one of them again, after the engine's own cache has lost it.
    """
    branch = [*PROMPT[:16], PROMPT[16] ^ 1, 1, 0, 0, 1]
    for i, text in enumerate([PROMPT, branch] * 4):
        engine.add(f"{i}", [*text, *OTHER[: i + 1]], max_tokens=28)
    requests = list(engine.scheduler.requests.values())
    for step in range(900):
        if not engine.scheduler.has_requests():
            break
        if step == 25:
            engine.abort("1")
        engine.step(copies=bool(step % 3))
    assert sum(request.num_preemptions for request in requests) > 0
    store(engine, PROMPT).serve("again", PROMPT)
    assert engine.totals["hit_tokens"] > 0
    return engine


def forget(engine: Engine) -> Engine:
    """Drop what the engine has computed, and the totals."""
    assert engine.scheduler.reset_prefix_cache() is True
    engine.totals.clear()
    return engine


def start_load(engine: PlayedEngine, request_id: str = "a") -> Request:
    """Request `PROMPT`, which host memory has; its load is submitted, and the request waits."""
    request = engine.add(request_id, PROMPT)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.offload.gauges()["running_loads"] == 1
    return request


def pinned(engine: PlayedEngine) -> set[int]:
    """Return the blocks pinned by stores."""
    return engine.offload.in_flight.pinned_blocks


def tables(engine: PlayedEngine, request: Request) -> list[list[int]]:
    """Return a request's blocks by group, from the engine's tables."""
    manager = engine.scheduler.kv_cache_manager
    return [list(group) for group in manager.get_block_ids(request.request_id)]


def wrong_bytes() -> Any:
    """Expect wrong bytes in host memory, or in KV that a forward reads."""
    return pytest.raises(AssertionError, match=r"holds another prefix|wrong KV at")


def stored_blocks(output: Any) -> list[int]:
    """Return the blocks for which a step plans stores."""
    return [int(b) for job in output.kv_connector_metadata.stores for b in job.pairs[:, 0]]


def ends_of(engine: PlayedEngine, request: Request, ids: Sequence[int]) -> list[int]:
    """Return the number of tokens up to the end of each of the request's blocks."""
    (table,) = tables(engine, request)
    return [(table.index(block) + 1) * BLOCK for block in ids]


def clocked(clock: Callable[[], float], **arguments: Any) -> PlayedEngine:
    """Return an engine whose steps are timed by this clock."""
    with mock.patch("kv_offload.scheduler.transfers.StepTime", return_value=StepTime(clock)):
        return PlayedEngine(**arguments)


def narrow(engine: PlayedEngine, slots: int) -> PlayedEngine:
    """Make the link so slow that only this many slots may be in flight, but at least one."""
    for _ in range(15):
        engine.offload.watch.store_rate.learn(blocks(1) * (slots + 0.5) / MIN_HORIZON_SECONDS)
    return engine


def slow(slots: int, **arguments: Any) -> PlayedEngine:
    """Return an engine with a narrow link, whose steps take no time."""
    return narrow(clocked(lambda: 0.0, **arguments), slots)
