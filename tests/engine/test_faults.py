"""A failed copy costs a cache entry or a recomputation, not a wrong token or the engine."""

from __future__ import annotations

import pytest
from kv_swap.engine import Direction

from tests.engine.harness import (
    BLOCK_TOKENS,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
)

PROMPTS = [*prompts_with_shared_prefix(seed=7), random_tokens(3 * BLOCK_TOKENS, seed=3)]
"""The last one ends with a block, so that all of it is loaded."""


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_failed_load_is_recomputed(model_folder, copies, kind):
    """With one cache group and with two."""
    expected = plain_answers(model_folder, PROMPTS, kind)
    with offloading(model_folder, kind) as ours:
        ours.generate(PROMPTS)
        ours.forget()
        copies.fail(Direction.LOAD)
        zero, zeroed = ours.rank.transfer.zero_blocks, 0

        def watch(blocks: list[int]) -> None:
            nonlocal zeroed
            zero(blocks)
            zeroed += len(blocks)
            assert not any(tensor[blocks].any() for tensor in ours.kv_tensors)

        ours.rank.transfer.zero_blocks = watch
        assert ours.generate(PROMPTS) == expected
        assert ours.blocks_loaded() == 0
        assert ours.totals["failed_loads"] > 0
        assert zeroed > 0, "what a failed load wrote must not be read"
        copies.release()
        assert ours.reload(PROMPTS) == expected


def test_a_failed_synchronous_load_is_copied_at_once(model_folder, copies):
    """Its request runs in the step whose load failed, so the step waits for another copy."""
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, synchronous_loads=True, async_scheduling=True) as ours:
        assert ours.generate(PROMPTS) == expected
        copies.fail(Direction.LOAD, every=2)
        assert ours.reload(PROMPTS) == expected
        assert ours.totals["repaired_loads"] > 0
        assert ours.totals["lost_requests"] == 0


def test_a_synchronous_load_that_nothing_can_bring_ends_its_requests_alone(model_folder, copies):
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, synchronous_loads=True, async_scheduling=True) as ours:
        assert ours.generate(PROMPTS) == expected
        ours.forget()
        copies.fail(Direction.LOAD)
        ours.add("fails", PROMPTS[0])
        ours.add("runs", random_tokens(40, seed=5))
        finished = ours.run()
        assert finished["fails"].outputs[0].finish_reason == "error"
        assert finished["fails"].outputs[0].token_ids == []
        assert finished["runs"].outputs[0].finish_reason == "length"
        assert ours.blocks_loaded() == 0
        assert ours.totals["lost_requests"] == 1
        copies.release()
        # Neither the engine's cache nor host memory keeps anything that was computed.
        assert ours.generate(PROMPTS) == expected
        assert ours.blocks_loaded() > 0
        assert ours.reload(PROMPTS) == expected
