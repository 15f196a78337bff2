"""Blocks that vLLM names before they are computed, and that then nobody computes."""

from __future__ import annotations

from collections.abc import Sequence
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

from kv_offload.cache.prefix import CacheGroup
from tests.support.played_cases import FULL, OTHER, PROMPT, STATE, WINDOW, both_ways
from tests.support.played_engine import PlayedEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

LONG = [*PROMPT, *OTHER][:36]
FULL_CACHE = [((FULL,), 11), ((FULL, WINDOW), 18), ((FULL, STATE), 15)]
"""Cache groups, and with how many blocks the third step finds no free one."""


def preempt_what_the_step_has_scheduled(
    groups: Sequence[CacheGroup], blocks: int, async_scheduling: bool
) -> PlayedEngine:
    """Have a chunk of `low` preempted in the step that schedules it; then serve it.

    In the third step `low` gets the last free blocks for 8 tokens. Then `high` needs one, and vLLM
    preempts `low`, frees all its blocks, and gives one of them to `high`.
    """
    engine = PlayedEngine(
        groups,
        blocks=blocks,
        async_scheduling=async_scheduling,
        scheduling_policy="priority",
        long_prefill_token_threshold=8,
        max_model_len=40,
    )
    engine.scheduler.scheduler_reserve_full_isl = False
    low = engine.add("low", LONG, max_tokens=3, priority=1)
    engine.step(copies=True)
    engine.add("high", OTHER[:8], max_tokens=2)
    for _ in range(3):
        computed = low.num_computed_tokens
        output = engine.step(copies=True)
        if low.num_preemptions:
            break
    assert set(output.num_scheduled_tokens) == {"high"}
    assert 0 < computed < len(LONG), "its chunk was scheduled before it was preempted"
    engine.run()
    return engine


@both_ways
@pytest.mark.parametrize(("groups", "blocks"), FULL_CACHE, ids=["full", "window", "state"])
def test_a_block_that_a_preempted_request_never_computed_is_not_served(
    groups: Sequence[CacheGroup], blocks: int, async_scheduling: bool
) -> None:
    engine = preempt_what_the_step_has_scheduled(groups, blocks, async_scheduling)
    assert engine.answers["low"] == engine.expected["low"]
    engine.serve("low again", LONG, 3)
    engine.check_rest()


@pytest.mark.parametrize(("groups", "blocks"), FULL_CACHE[:2], ids=["full", "window"])
def test_without_the_mend_vllm_serves_what_lay_there_before(
    monkeypatch: pytest.MonkeyPatch, groups: Sequence[CacheGroup], blocks: int
) -> None:
    """The control. With states the request's next look-up ends before these blocks."""
    monkeypatch.setattr("kv_offload.engines.vllm.preemption._named_uncomputed", lambda *_: iter(()))
    with pytest.raises(AssertionError, match=r"wrong KV at|holds another prefix"):
        preempt_what_the_step_has_scheduled(groups, blocks, async_scheduling=False)
