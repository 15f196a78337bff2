"""Requests that come, wait, are cut short and go; what is moved, and what is never moved twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction

from kv_offload.engines.vllm.hooks import worker as worker_hooks
from kv_offload.messages import OffloadMetadata
from tests.engine.copies import Copies
from tests.engine.harness import (
    BLOCK_TOKENS,
    Engine,
    Tokens,
    engine,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
)

LONG = random_tokens(10 * BLOCK_TOKENS + 1, seed=2)
LONGER = LONG + random_tokens(70, seed=3)
SHARED = prompts_with_shared_prefix(seed=1)

Answer = Callable[[Tokens], Tokens]


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> Answer:
    """The answer without the plugin to each of the prompts above."""
    prompts = [*SHARED, LONG, LONGER]
    # Asked before the engine with the plugin starts: one process holds one at a time.
    answers = plain_answers(model_folder, prompts, one_by_one=True)
    return lambda prompt: answers[prompts.index(prompt)]


@pytest.fixture(scope="module")
def shared_engine(model_folder: Path, plain: Answer) -> Iterator[Engine]:
    with engine(model_folder, plugin={}, max_num_batched_tokens=128, max_num_seqs=8) as running:
        yield running


@pytest.fixture
def ours(shared_engine: Engine) -> Iterator[Engine]:
    """An engine that computes prompts in chunks of 128 tokens; empty before and after each test."""
    shared_engine.totals.clear()
    yield shared_engine
    shared_engine.assert_nothing_left()
    assert shared_engine.core.reset_prefix_cache() is True


def answers(finished: dict[str, Any]) -> dict[str, Tokens]:
    return {
        request_id: list(output.outputs[0].token_ids) for request_id, output in finished.items()
    }


def store(ours: Engine, prompt: Tokens) -> None:
    """Compute a prompt, keep it in host memory and forget it on the engine's side."""
    ours.generate([prompt], max_tokens=1)
    ours.forget()


@pytest.mark.parametrize("changes_blocks", [False, True])
def test_copies_start_before_the_step_is_prepared_unless_that_changes_blocks(
    ours: Engine, plain: Answer, monkeypatch: pytest.MonkeyPatch, changes_blocks: bool
) -> None:
    store(ours, LONG)
    rank, told = ours.rank, []
    runner = ours.core.model_executor.driver_worker.worker.model_runner
    start_copies, prepare = rank.start_copies, runner._update_states

    def started(metadata: OffloadMetadata, **how: bool) -> None:
        told.append("loads" if metadata.loads else "copies")
        start_copies(metadata, **how)

    def prepared(output: object) -> object:
        told.append("prepared")
        return prepare(output)

    monkeypatch.setattr(rank, "start_copies", started)
    monkeypatch.setattr(runner, "_update_states", prepared)
    if changes_blocks:
        monkeypatch.setattr(worker_hooks, "changes_blocks", lambda output: True)
    assert ours.generate([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 10
    before = told[: told.index("loads")]
    assert (before[-1:] == ["prepared"]) == changes_blocks
    assert "prepared" in told[len(before) :]


@pytest.mark.parametrize("reports", [True, False], ids=["reported", "heard of before"])
def test_chunked_prefill_stores_each_block_once(
    ours: Engine, plain: Answer, monkeypatch: pytest.MonkeyPatch, reports: bool
) -> None:
    """Also where the rank, which lives beside the scheduler, reports nothing of what has ended."""
    if not reports:
        monkeypatch.setattr(ours.rank, "take_report", lambda: None)
        monkeypatch.setattr(ours.rank.reports, "take_received", lambda: (set(), {}))
    assert ours.generate([LONG]) == [plain(LONG)]
    ours.settle()
    assert ours.blocks_stored() == 10
    assert ours.offload.manager.slots_in_use == 10
    assert ours.reload([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 10
    assert ours.cached_tokens == [10 * BLOCK_TOKENS]


def test_gpu_hit_is_extended_from_host_memory(ours: Engine, plain: Answer) -> None:
    store(ours, LONG)
    ours.generate([LONG[: 4 * BLOCK_TOKENS + 1]], max_tokens=1)
    assert ours.blocks_loaded() == 4
    # Four blocks lie in the engine's own cache now; only what follows them is loaded.
    assert ours.generate([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 10


def test_a_longer_prompt_loads_its_prefix_and_computes_the_rest(
    ours: Engine, plain: Answer
) -> None:
    store(ours, LONG)
    assert ours.generate([LONGER]) == [plain(LONGER)]
    assert ours.blocks_loaded() == 10
    ours.settle()
    assert ours.blocks_stored() == len(LONGER) // BLOCK_TOKENS - 10


def test_requests_at_once_load_and_store_a_shared_prefix_once(ours: Engine, plain: Answer) -> None:
    unique = {tuple(p[: (i + 1) * BLOCK_TOKENS]) for p in SHARED for i in range(len(p) // 32)}
    expected = [plain(prompt) for prompt in SHARED]
    assert ours.generate(SHARED) == expected
    ours.settle()
    assert ours.blocks_stored() == len(unique)
    assert ours.reload(SHARED) == expected
    assert ours.blocks_loaded() == len(unique)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_second_request_waits_for_the_first_ones_load(
    ours: Engine, copies: Copies, plain: Answer, aborted: bool
) -> None:
    """And loads itself when the first is aborted."""
    store(ours, LONG)
    copies.hold(Direction.LOAD)
    ours.add("first", LONG)
    ours.add("second", LONG)
    for _ in range(1 if aborted else 20):
        assert not ours.step()
    assert ours.offload.loads.running == 1
    if aborted:
        ours.abort("first")
    copies.release()
    answered = ["second"] if aborted else ["first", "second"]
    assert answers(ours.run()) == dict.fromkeys(answered, plain(LONG))
    ours.settle()
    assert ours.blocks_loaded() == (20 if aborted else 10)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6])
def test_abort_at_any_step_of_the_first_computation(
    ours: Engine, plain: Answer, steps: int
) -> None:
    """Waiting, in the middle of a chunked prefill, with stores queued, running and reported."""
    ours.add("gone", LONG)
    for _ in range(steps):
        ours.step()
    ours.abort("gone")
    assert ours.generate([LONG]) == [plain(LONG)]
    assert ours.reload([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 10


@pytest.mark.parametrize("direction", Direction)
def test_abort_while_a_copy_runs(
    ours: Engine, copies: Copies, plain: Answer, direction: Direction
) -> None:
    """The blocks of the gone request stay its own until the copy has ended."""
    if direction is Direction.LOAD:
        store(ours, LONG)
    copies.hold(direction)
    ours.add("gone", LONG)
    for _ in range(5):
        ours.step()
    ours.abort("gone")
    free = ours.pool.get_num_free_blocks()
    ours.add("other", SHARED[0])
    for _ in range(3):
        ours.step()
    assert ours.pool.get_num_free_blocks() <= free
    assert ours.rank.transfer.in_flight > 0
    copies.release()
    assert answers(ours.run()) == {"other": plain(SHARED[0])}
    ours.settle()
    ours.forget()
    assert ours.generate([LONG]) == [plain(LONG)]


def test_reset_without_the_connector_keeps_host_memory(ours: Engine, plain: Answer) -> None:
    ours.generate([LONG], max_tokens=1)
    assert ours.offload.has_pending_stores, "the test must reset with a store under way"
    assert ours.llm.reset_prefix_cache() is True
    assert not ours.offload.has_pending_stores
    assert ours.generate([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 10


def test_reset_with_the_connector_empties_host_memory(ours: Engine, plain: Answer) -> None:
    ours.generate([LONG], max_tokens=1)
    assert ours.llm.reset_prefix_cache(reset_connector=True) is True
    assert ours.offload.manager.slots_in_use == 0
    assert ours.generate([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 0


def test_reset_of_running_requests_recomputes_them(ours: Engine, plain: Answer) -> None:
    ours.add("running", LONG)
    for _ in range(4):
        ours.step()
    assert ours.core.reset_prefix_cache(reset_running_requests=True) is True
    assert answers(ours.run()) == {"running": plain(LONG)}


def test_reset_gives_up_a_store_that_does_not_end(
    ours: Engine, copies: Copies, plain: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a store copies is never served, and its slots stay taken until it ends."""
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.2)
    copies.hold(Direction.STORE)
    ours.generate([LONG], max_tokens=1)
    assert ours.llm.reset_prefix_cache() is True
    assert ours.offload.manager.slots_in_use == 10
    assert ours.generate([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 0
    copies.release()
    ours.settle()


def test_pausing_as_sleep_does_drains_first(ours: Engine, plain: Answer) -> None:
    """`sleep` resets through the same method, and raises where a pinned block is left."""
    ours.generate([LONG], max_tokens=1)
    assert ours.offload.has_pending_stores
    ours.core.pause_scheduler(mode="abort", clear_cache=True)
    ours.core.resume_scheduler()
    assert not ours.offload.has_pending_stores
    assert ours.generate([LONG]) == [plain(LONG)]


def test_a_request_that_skips_the_cache_loads_nothing(ours: Engine) -> None:
    store(ours, LONG)
    ours.add("logprobs", LONG, max_tokens=2, prompt_logprobs=1)
    ours.run()
    assert ours.blocks_loaded() == 0


def test_empty_steps_submit_and_report_the_last_stores(ours: Engine) -> None:
    ours.add("only", LONG, max_tokens=1)
    ours.run()
    assert ours.offload.has_pending_stores
    assert ours.scheduler.has_requests(), "an engine that idles here would keep the pins"
    ours.settle()
    assert ours.blocks_stored() == 10
    assert not ours.offload.has_pending_stores


def test_stores_are_submitted_one_step_late(ours: Engine, copies: Copies) -> None:
    """The deferral that keeps a store from delaying the tokens of the step that computed it."""
    copies.hold(Direction.STORE)
    ours.add("only", LONG[: 3 * BLOCK_TOKENS + 1], max_tokens=4)
    ours.step()
    assert ours.offload.has_pending_stores
    assert ours.rank.transfer.in_flight == 0
    ours.step()
    assert ours.rank.transfer.in_flight == 1
    copies.release()
    ours.run()
