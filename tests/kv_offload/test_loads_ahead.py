"""Loads that are copied while a step that was launched earlier has not been computed.

`kv_offload.engines.vllm.model.ordering` argues why this is safe. `Lagging` computes each step as
late as a device may and copies such loads at once, so a load into a block that a launched step uses
gives wrong KV. Each rule of vLLM on which the argument rests is removed once, and then the test
fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kv_swap.engine import SwapJob
from kv_swap.errors import CopyError
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.kv_cache_interface import KVCacheConfig

from kv_offload.cache.prefix import CacheGroup
from kv_offload.engines.vllm.model.ordering import gives_idle_blocks
from tests.support.configurations import make_vllm_config
from tests.support.played_cases import (
    CHUNKS,
    FULL,
    OTHER,
    PROMPT,
    STATE,
    WINDOW,
    both_runners,
    store,
    tables,
    wrong_bytes,
)
from tests.support.played_engine import PlayedEngine
from tests.support.timing import Lagging

pytestmark = pytest.mark.usefixtures("beside")

both_kinds = pytest.mark.parametrize("synchronous", [False, True], ids=["waiting", "before"])


def make(groups: tuple[CacheGroup, ...] = (FULL,), **more: Any) -> PlayedEngine:
    arguments: dict[str, Any] = {"async_scheduling": True, "max_model_len": 44, "blocks": 12}
    return PlayedEngine(groups, timing=Lagging(), **(arguments | more))


def blocks_of(jobs: Sequence[SwapJob]) -> set[int]:
    """Return the GPU blocks of jobs."""
    return {int(block) for job in jobs for block in job.pairs[:, 0]}


def busy(engine: PlayedEngine, steps: int) -> None:
    for _ in range(steps):
        engine.schedule_all()
        while engine.scheduled:
            engine.execute()
        engine.process()


PIPELINE = {"async_scheduling": False, "stages": 2, "ranks": 2}


def take_over(
    engine: PlayedEngine, end: Callable[[], object], steps: int = 7
) -> tuple[set[int], set[int]]:
    """End a request with one of its steps in flight; others load into its blocks at once.

    Return those of its blocks that were loaded, and those loaded ahead of a launched step.
    """
    store(engine, PROMPT)
    store(engine, PROMPT[4:], "second")
    owner = engine.add("owner", OTHER, max_tokens=20)
    # At 8 a block is full, and a reset waits for the step after which it is stored.
    busy(engine, steps)
    engine.schedule_all()
    engine.execute()
    owned = set(tables(engine, owner)[0])
    engine.timing.loaded.clear()
    engine.timing.ran_ahead.clear()
    end()
    engine.add("loads", PROMPT)
    engine.add("loads too", PROMPT[4:])
    busy(engine, 12)
    engine.rest()
    return owned & blocks_of(engine.timing.loaded), owned & blocks_of(engine.timing.ran_ahead)


@both_runners
@both_kinds
@pytest.mark.parametrize("how", ["is aborted", "is preempted by a reset", "comes to its end"])
def test_blocks_of_a_request_that_has_a_step_in_flight_when_it(synchronous, how):
    engine = make(synchronous_loads=synchronous)

    def end() -> None:
        if how == "is aborted":
            engine.abort("owner")
        elif how == "is preempted by a reset":
            assert engine.reset(reset_running_requests=True)
        else:
            tokens = len(engine.answers["owner"]) + 1
            engine.scheduler.requests["owner"].max_tokens = tokens
            engine.expected["owner"] = engine.expected["owner"][:tokens]

    loaded, ahead = take_over(engine, end)
    assert loaded, "the test must load into blocks of the last owner"
    assert bool(ahead) == (how != "is preempted by a reset")


@both_kinds
@pytest.mark.parametrize(("steps", "more"), [(7, {}), (8, PIPELINE)], ids=["async", "pipeline"])
def test_if_blocks_were_freed_at_once_a_launched_step_would_spoil_the_load(
    monkeypatch, synchronous, steps, more
):
    """The control: vLLM does not hold back blocks that steps in flight use."""
    engine = make(synchronous_loads=synchronous, **more)

    def end() -> None:
        monkeypatch.setattr(engine.scheduler, "defer_block_free", False)
        engine.abort("owner")

    with wrong_bytes():
        take_over(engine, end, steps)


def test_a_reset_frees_nothing_at_once_if_loads_cannot_be_fenced(monkeypatch):
    engine = make()
    engine.add("owner", OTHER, max_tokens=20)
    busy(engine, 8)
    engine.schedule_all()
    engine.execute()

    def refuse() -> None:
        raise CopyError("injected fault: no event")

    monkeypatch.setattr(engine.ranks[0].copies, "fence_loads", refuse)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.reset(reset_running_requests=True)
    assert engine.scheduler.defer_block_free
    engine.rest()


def leave_behind(engine: PlayedEngine) -> None:
    """Decode through many windows, into whose blocks others load: few are free otherwise."""
    texts = [random.Random(seed).choices([0, 1], k=21) for seed in range(6)]
    for index, text in enumerate(texts):
        store(engine, text, f"stored {index}")
    engine.add("moves on", OTHER, max_tokens=60)
    engine.add("moves on, too", PROMPT, max_tokens=60)
    for index in range(24):
        engine.add(f"loads {index}", texts[index % len(texts)], max_tokens=2)
        busy(engine, 3)
    engine.rest()
    assert len(engine.timing.ran_ahead) > 3, "the test must load ahead of launched steps"


MOVES_ON = CacheGroup(0, 4, 6)
TIGHT = {"max_model_len": 96, "blocks": 10}


@pytest.mark.parametrize(
    "group", [MOVES_ON, CacheGroup(0, 4, chunk_tokens=8)], ids=["window", "chunks"]
)
@both_runners
def test_blocks_that_a_launched_step_reads_for_the_last_time(group):
    leave_behind(make((group,), **TIGHT))


def test_if_windows_moved_on_with_the_plan_a_launched_step_would_read_what_is_loaded(monkeypatch):
    """The control: blocks are freed by planned tokens, not by those whose output is known."""
    engine = make((MOVES_ON,), **TIGHT)
    remove = KVCacheCoordinator.remove_skipped_blocks

    def remove_as_planned(
        coordinator: KVCacheCoordinator, request_id: str, tokens: int, *rest: Any, **more: Any
    ) -> None:
        tokens += engine.scheduler.requests[request_id].num_in_flight_tokens
        remove(coordinator, request_id, tokens, *rest, **more)

    monkeypatch.setattr(KVCacheCoordinator, "remove_skipped_blocks", remove_as_planned)
    with wrong_bytes():
        leave_behind(engine)


def ask_beside_decodes(engine: PlayedEngine) -> None:
    """Request a prompt that is in host memory, while another request decodes."""
    store(engine, PROMPT)
    engine.add("decodes", OTHER, max_tokens=12)
    busy(engine, 4)
    engine.add("loads", PROMPT)


@pytest.mark.parametrize(
    ("groups", "more"),
    [((FULL,), {"async_scheduling": False}), ((FULL,), {"drafts": 2}), ((FULL, STATE), {})],
    ids=["one step in flight", "drafts", "states"],
)
def test_loads_wait_where_launched_steps_may_touch_their_blocks(groups, more):
    engine = make(groups, blocks=40, synchronous_loads=True, **more)
    ask_beside_decodes(engine)
    busy(engine, 4)
    engine.rest()
    assert engine.totals["hit_tokens"] > 0
    assert not engine.timing.ran_ahead


@pytest.mark.parametrize("zeroes", [False, True])
def test_the_time_of_steps_under_way_counts_only_where_loads_may_start_within_it(
    zeroes, monkeypatch
):
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", zeroes)
    assert make().offload._engine.loads_overlap is not zeroes
    assert make(**PIPELINE).offload._engine.loads_overlap is not zeroes
    assert not make(async_scheduling=False).offload._engine.loads_overlap
    assert not make(drafts=2).offload._engine.loads_overlap


def test_loads_wait_in_a_step_that_zeroes_blocks():
    engine = make(blocks=40)
    ask_beside_decodes(engine)
    engine.schedule_all()
    output = engine.scheduled[-1]
    assert output.kv_connector_metadata.loads
    output.new_block_ids_to_zero = [b for b in range(1, 40) if not engine.pool.blocks[b].ref_cnt]
    engine.execute()
    engine.rest()
    assert engine.totals["hit_tokens"] > 0
    assert not engine.timing.ran_ahead


@pytest.mark.parametrize(
    ("more", "role", "idle"),
    [
        ({"async_scheduling": True}, "kv_both", True),
        ({"async_scheduling": False}, "kv_both", False),
        ({"async_scheduling": True, "drafts": 2}, "kv_both", False),
        ({"async_scheduling": True}, "kv_producer", False),
    ],
)
def test_which_engines_give_idle_blocks(more, role, idle):
    config = make_vllm_config({}, **more)
    config.kv_transfer_config.kv_role = role
    assert gives_idle_blocks(config, [FULL, WINDOW, CHUNKS]) is idle
    assert not gives_idle_blocks(config, [FULL, STATE])
