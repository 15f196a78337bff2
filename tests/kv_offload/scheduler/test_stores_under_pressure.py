"""Stores while GPU blocks are short: nearly nothing is lost, and no request pays for it."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import pytest

from kv_offload.cache.prefix import CacheGroup
from kv_offload.scheduler.stores.budget import StoreBudget
from tests.support.simulated_engine import Clock, SimulatedEngine

BLOCK = 8
PROMPTS = 24


class Run(NamedTuple):
    seconds: float
    preempted: int
    waits: int
    """Times a running request found no free block while a store held one."""
    stored: int
    lost: int


def run(
    patch: pytest.MonkeyPatch,
    *,
    prompt_blocks: int,
    pool_blocks: int,
    prompts_a_step: float,
    max_tokens: int = 1,
    stores: bool = True,
) -> Run:
    """Ask for `PROMPTS` new prompts at once, in an engine whose GPU cache holds a few of them."""
    clock = Clock()
    patch.setattr(time, "monotonic", clock)
    patch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    engine = SimulatedEngine(
        clock,
        groups=(CacheGroup(0, BLOCK),),
        blocks=pool_blocks,
        slots=PROMPTS * (prompt_blocks + max_tokens),
        max_num_batched_tokens=int(prompts_a_step * prompt_blocks * BLOCK),
        max_num_seqs=64,
        max_model_len=prompt_blocks * BLOCK + max_tokens + BLOCK,
    )
    engine.offload.pause_stores(paused=not stores)
    waits = []
    has_pending_block_frees = engine.connector.has_pending_block_frees
    engine.connector.has_pending_block_frees = lambda: (
        waits.append(has_pending_block_frees()) or waits[-1]
    )
    texts = np.random.default_rng(0).integers(100, 30_000, (PROMPTS, prompt_blocks * BLOCK))
    for number, text in enumerate(texts.tolist()):
        engine.ask(f"{number}", text, max_tokens)
    requests = list(engine.scheduler.requests.values())
    begun = clock.now
    while engine.scheduler.has_unfinished_requests():
        engine.pass_step()
    seconds = clock.now - begun
    while engine.scheduler.has_requests():
        engine.pass_step()
    engine.offload.check_integrity()
    preempted = sum(request.num_preemptions for request in requests)
    totals = engine.totals
    return Run(
        seconds, preempted, sum(waits), int(totals["stored_slots"]), int(totals["skipped_moved_on"])
    )


@pytest.mark.parametrize(("pool_blocks", "prompts_a_step"), [(138, 1.0), (330, 2.1)])
def test_prompts_that_fill_the_gpu_cache_are_stored(monkeypatch, pool_blocks, prompts_a_step):
    """No block is free while they run, and those that they leave are reused at once."""
    shape = {"prompt_blocks": 64, "pool_blocks": pool_blocks, "prompts_a_step": prompts_a_step}
    found = run(monkeypatch, **shape)
    without = run(monkeypatch, **shape, stores=False)
    assert (found.stored, found.lost) == (PROMPTS * 64, 0)
    assert found.seconds < 1.1 * without.seconds
    assert found.preempted == without.preempted == 0


@pytest.mark.parametrize("reserve", [True, False])
def test_answers_do_not_wait_for_stores(monkeypatch, reserve):
    """Prompts leave as many blocks unpinned as answers lack; the control reserves none."""
    if not reserve:
        monkeypatch.setattr(StoreBudget, "reserved_blocks", 0)
    shape = {"prompt_blocks": 8, "pool_blocks": 120, "prompts_a_step": 1.0, "max_tokens": 60}
    found = run(monkeypatch, **shape)
    without = run(monkeypatch, **shape, stores=False)
    assert without.preempted > 0, "blocks are short"
    assert found.preempted <= without.preempted
    assert (found.waits == 0) == reserve
    assert found.lost == 0
