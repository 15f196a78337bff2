"""Requests that come, wait, are cut short and go; what is moved, and what is never moved twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kv_swap.engine import Direction

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


def test_chunked_prefill_stores_each_block_once(ours: Engine, plain: Answer) -> None:
    assert ours.generate([LONG]) == [plain(LONG)]
    ours.settle()
    assert ours.blocks_stored() == 10
    assert ours.offload.manager.slots_in_use == 10
    assert ours.reload([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == 10
    assert ours.cached_tokens == [10 * BLOCK_TOKENS]


def test_only_what_the_engines_own_cache_lacks_is_loaded(ours: Engine, plain: Answer) -> None:
    """Four blocks lie there; six are loaded, and the rest of a longer prompt is computed."""
    store(ours, LONG)
    ours.generate([LONG[: 4 * BLOCK_TOKENS + 1]], max_tokens=1)
    assert ours.blocks_loaded() == 4
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


@pytest.mark.parametrize("with_connector", [False, True])
def test_a_reset_forgets_host_memory_only_where_it_is_asked_to(
    ours: Engine, plain: Answer, with_connector: bool
) -> None:
    ours.generate([LONG], max_tokens=1)
    assert ours.offload.has_pending_stores, "the test must reset with a store under way"
    assert ours.llm.reset_prefix_cache(reset_connector=with_connector) is True
    assert not ours.offload.has_pending_stores
    assert ours.generate([LONG]) == [plain(LONG)]
    assert ours.blocks_loaded() == (0 if with_connector else 10)


def test_a_request_that_skips_the_cache_loads_nothing(ours: Engine) -> None:
    store(ours, LONG)
    ours.add("logprobs", LONG, max_tokens=2, prompt_logprobs=1)
    ours.run()
    assert ours.blocks_loaded() == 0
