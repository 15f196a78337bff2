"""Requests that come, wait, are cut short and go; what is moved, and what is never moved twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_swap.engine import Direction

from kv_offload.engines.vllm.hooks import worker as worker_hooks
from kv_offload.messages import OffloadMetadata
from tests.engine.harness import (
    BLOCK_TOKENS,
    Copies,
    Engine,
    engine,
    prompts_with_shared_prefix,
    random_tokens,
)


@pytest.fixture(scope="module")
def plain(model_folder: Path) -> Iterator[object]:
    """Answers without the plugin, computed once per prompt."""
    with engine(model_folder) as reference:
        known: dict[tuple[int, ...], list[int]] = {}

        def answer(prompt: list[int], max_tokens: int = 8) -> list[int]:
            key = (max_tokens, *prompt)
            if key not in known:
                known[key] = reference.generate([prompt], max_tokens)[0]
            return known[key]

        # Asked before the engine with the plugin starts: one process holds one at a time.
        prompts = [
            *prompts_with_shared_prefix(seed=1),
            random_tokens(10 * BLOCK_TOKENS + 1, seed=2),
            random_tokens(10 * BLOCK_TOKENS + 1, seed=2) + random_tokens(70, seed=3),
        ]
        for prompt in prompts:
            answer(prompt)
    return answer


@pytest.fixture(scope="module")
def shared_engine(model_folder: Path, plain: object) -> Iterator[Engine]:
    with engine(model_folder, plugin={}, max_num_batched_tokens=128, max_num_seqs=8) as running:
        yield running


@pytest.fixture
def offloading(shared_engine: Engine) -> Iterator[Engine]:
    """An engine that computes prompts in chunks of 128 tokens; empty before and after each test."""
    shared_engine.totals.clear()
    yield shared_engine
    shared_engine.assert_nothing_left()
    assert shared_engine.llm.llm_engine.engine_core.engine_core.reset_prefix_cache() is True


LONG = random_tokens(10 * BLOCK_TOKENS + 1, seed=2)


def answers(finished: dict[str, object]) -> dict[str, list[int]]:
    return {
        request_id: list(output.outputs[0].token_ids)  # type: ignore[attr-defined]
        for request_id, output in finished.items()
    }


def store(offloading: Engine, prompt: list[int]) -> None:
    """Compute a prompt, keep it in host memory and forget it on the engine's side."""
    offloading.generate([prompt], max_tokens=1)
    offloading.reset_gpu_cache()
    offloading.totals.clear()


@pytest.mark.parametrize("changes_blocks", [False, True])
def test_copies_start_before_the_step_is_prepared_unless_that_changes_blocks(
    offloading: Engine, plain, monkeypatch: pytest.MonkeyPatch, changes_blocks: bool
) -> None:
    store(offloading, LONG)
    rank, told = offloading.rank, []
    runner = offloading.core.model_executor.driver_worker.worker.model_runner
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
    assert offloading.generate([LONG]) == [plain(LONG)]
    assert offloading.blocks_loaded() == 10
    before = told[: told.index("loads")]
    assert (before[-1:] == ["prepared"]) == changes_blocks
    assert "prepared" in told[len(before) :]


def test_ended_copies_are_heard_of_before_their_report(
    offloading: Engine, plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank lives beside the scheduler; here its reports say nothing of what has ended."""
    rank, prompt = offloading.rank, LONG
    monkeypatch.setattr(rank, "take_report", lambda: None)
    monkeypatch.setattr(rank.reports, "take_received", lambda: (set(), {}))
    assert offloading.generate([prompt]) == [plain(prompt)]
    offloading.settle()
    assert offloading.blocks_stored() == 10
    assert offloading.offload.manager.slots_in_use >= 10
    offloading.reset_gpu_cache()
    assert offloading.generate([prompt]) == [plain(prompt)]
    assert offloading.blocks_loaded() == 10


def test_chunked_prefill_stores_each_block_once(offloading: Engine, plain) -> None:
    prompt = LONG
    assert offloading.generate([prompt]) == [plain(prompt)]
    offloading.settle()
    assert offloading.blocks_stored() == 10
    offloading.reset_gpu_cache()
    assert offloading.generate([prompt]) == [plain(prompt)]
    assert offloading.blocks_loaded() == 10
    assert offloading.cached_tokens == [10 * BLOCK_TOKENS]


def test_gpu_hit_is_extended_from_host_memory(offloading: Engine, plain) -> None:
    store(offloading, LONG)
    offloading.generate([LONG[: 4 * BLOCK_TOKENS + 1]], max_tokens=1)
    assert offloading.blocks_loaded() == 4
    # Four blocks lie in the engine's own cache now; only what follows them is loaded.
    assert offloading.generate([LONG]) == [plain(LONG)]
    assert offloading.blocks_loaded() == 10


def test_a_longer_prompt_loads_its_prefix_and_computes_the_rest(offloading: Engine, plain) -> None:
    longer = LONG + random_tokens(70, seed=3)
    store(offloading, LONG)
    assert offloading.generate([longer]) == [plain(longer)]
    assert offloading.blocks_loaded() == 10
    offloading.settle()
    assert offloading.blocks_stored() == len(longer) // BLOCK_TOKENS - 10


def test_requests_at_once_load_and_store_a_shared_prefix_once(offloading: Engine, plain) -> None:
    prompts = prompts_with_shared_prefix(seed=1)
    unique = {tuple(p[: (i + 1) * BLOCK_TOKENS]) for p in prompts for i in range(len(p) // 32)}
    assert offloading.generate(prompts) == [plain(prompt) for prompt in prompts]
    offloading.settle()
    assert offloading.blocks_stored() == len(unique)
    offloading.reset_gpu_cache()
    assert offloading.generate(prompts) == [plain(prompt) for prompt in prompts]
    assert offloading.blocks_loaded() == len(unique)


def test_a_second_request_waits_for_the_first_ones_load(
    offloading: Engine, copies: Copies, plain
) -> None:
    store(offloading, LONG)
    copies.hold(Direction.LOAD)
    offloading.add("first", LONG)
    offloading.add("second", LONG)
    for _ in range(20):
        assert not offloading.step()
    assert offloading.offload.loads.running == 1
    copies.release()
    assert answers(offloading.run()) == {"first": plain(LONG), "second": plain(LONG)}
    assert offloading.blocks_loaded() == 10


def test_the_follower_loads_itself_when_the_first_is_aborted(
    offloading: Engine, copies: Copies, plain
) -> None:
    store(offloading, LONG)
    copies.hold(Direction.LOAD)
    offloading.add("first", LONG)
    offloading.add("second", LONG)
    offloading.step()
    offloading.abort("first")
    copies.release()
    assert answers(offloading.run()) == {"second": plain(LONG)}
    offloading.settle()
    assert offloading.blocks_loaded() == 20


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6])
def test_abort_at_any_step_of_the_first_computation(offloading: Engine, plain, steps: int) -> None:
    """Waiting, in the middle of a chunked prefill, with stores queued, running and reported."""
    offloading.add("gone", LONG)
    for _ in range(steps):
        offloading.step()
    offloading.abort("gone")
    assert offloading.generate([LONG]) == [plain(LONG)]
    offloading.reset_gpu_cache()
    assert offloading.generate([LONG]) == [plain(LONG)]
    assert offloading.blocks_loaded() == 10


@pytest.mark.parametrize("direction", Direction)
def test_abort_while_a_copy_runs(
    offloading: Engine, copies: Copies, plain, direction: Direction
) -> None:
    """The blocks of the gone request stay its own until the copy has ended."""
    if direction is Direction.LOAD:
        store(offloading, LONG)
    copies.hold(direction)
    offloading.add("gone", LONG)
    for _ in range(5):
        offloading.step()
    offloading.abort("gone")
    free = offloading.pool.get_num_free_blocks()
    other = prompts_with_shared_prefix(seed=1)[0]
    offloading.add("other", other)
    for _ in range(3):
        offloading.step()
    assert offloading.pool.get_num_free_blocks() <= free
    assert offloading.rank.transfer.in_flight > 0
    copies.release()
    assert answers(offloading.run()) == {"other": plain(other)}
    offloading.settle()
    offloading.reset_gpu_cache()
    assert offloading.generate([LONG]) == [plain(LONG)]


def test_reset_without_the_connector_keeps_host_memory(offloading: Engine, plain) -> None:
    offloading.generate([LONG], max_tokens=1)
    assert offloading.offload.has_pending_stores, "the test must reset with a store under way"
    assert offloading.llm.reset_prefix_cache() is True
    assert not offloading.offload.has_pending_stores
    assert offloading.generate([LONG]) == [plain(LONG)]
    assert offloading.blocks_loaded() == 10


def test_reset_with_the_connector_empties_host_memory(offloading: Engine, plain) -> None:
    offloading.generate([LONG], max_tokens=1)
    assert offloading.llm.reset_prefix_cache(reset_connector=True) is True
    assert offloading.offload.manager.slots_in_use == 0
    assert offloading.generate([LONG]) == [plain(LONG)]
    assert offloading.blocks_loaded() == 0


def test_reset_of_running_requests_recomputes_them(offloading: Engine, plain) -> None:
    offloading.add("running", LONG)
    for _ in range(4):
        offloading.step()
    assert offloading.core.reset_prefix_cache(reset_running_requests=True) is True
    assert answers(offloading.run()) == {"running": plain(LONG)}


def test_reset_gives_up_a_store_that_does_not_end(
    offloading: Engine, copies: Copies, plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What such a store copies is never served, and its slots stay taken until it ends."""
    monkeypatch.setattr("kv_offload.worker.worker.DRAIN_SECONDS", 0.2)
    copies.hold(Direction.STORE)
    offloading.generate([LONG], max_tokens=1)
    assert offloading.llm.reset_prefix_cache() is True
    assert offloading.offload.manager.slots_in_use == 10
    assert offloading.generate([LONG]) == [plain(LONG)]
    assert offloading.blocks_loaded() == 0
    copies.release()
    offloading.settle()


def test_pausing_as_sleep_does_drains_first(offloading: Engine, plain) -> None:
    """`sleep` resets through the same method, and raises where a pinned block is left."""
    offloading.generate([LONG], max_tokens=1)
    assert offloading.offload.has_pending_stores
    offloading.core.pause_scheduler(mode="abort", clear_cache=True)
    offloading.core.resume_scheduler()
    assert not offloading.offload.has_pending_stores
    assert offloading.generate([LONG]) == [plain(LONG)]


def test_empty_steps_submit_and_report_the_last_stores(offloading: Engine) -> None:
    offloading.add("only", LONG, max_tokens=1)
    while offloading.llm.llm_engine.has_unfinished_requests():
        offloading.step()
    assert offloading.offload.has_pending_stores
    assert offloading.scheduler.has_requests(), "an engine that idles here would keep the pins"
    offloading.settle()
    assert offloading.blocks_stored() == 10
    assert not offloading.offload.has_pending_stores


def test_a_request_that_skips_the_cache_loads_nothing(offloading: Engine) -> None:
    store(offloading, LONG)
    offloading.add("logprobs", LONG, max_tokens=2, prompt_logprobs=1)
    offloading.run()
    assert offloading.blocks_loaded() == 0


def test_stores_are_submitted_one_step_late(offloading: Engine, copies: Copies) -> None:
    """The deferral that keeps a store from delaying the tokens of the step that computed it."""
    copies.hold(Direction.STORE)
    offloading.add("only", LONG[: 3 * BLOCK_TOKENS + 1], max_tokens=4)
    offloading.step()
    assert offloading.offload.has_pending_stores
    assert offloading.rank.transfer.in_flight == 0
    offloading.step()
    assert offloading.rank.transfer.in_flight == 1
    copies.release()
    offloading.run()
