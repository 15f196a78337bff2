"""Blocks that were computed once are loaded from host memory, and the answers stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.harness import (
    BLOCK_TOKENS,
    all_differ,
    engine,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
    transfer_config,
)

PROMPTS = prompts_with_shared_prefix()


@pytest.mark.parametrize(
    ("kind", "plugin", "synchronous"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"store_blocks": "prompt"}, True),
        # Loads of several groups, as gemma3 has them, are never synchronous.
        ("gemma3", {"eviction_policy": "lru"}, False),
    ],
)
def test_reloaded_prompts_give_the_same_tokens(model_folder, kind, plugin, synchronous):
    """Ends with the control of every comparison here: it must be able to fail."""
    expected = plain_answers(model_folder, PROMPTS, kind)
    with offloading(model_folder, kind, plugin, synchronous_loads=synchronous) as ours:
        assert ours.generate(PROMPTS) == expected
        assert ours.reload(PROMPTS) == expected
        # All of a prompt but its last block, at most, came from host memory or from a neighbour.
        for prompt, cached in zip(PROMPTS, ours.cached_tokens, strict=True):
            assert cached >= (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        ours.settle()
        # The answers are the same, so they end in blocks that are already stored.
        assert ours.blocks_stored() == 0
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"scheduling_policy": "priority"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
        {"kv_transfer_config": transfer_config({}, "kv_producer")},
    ],
    ids=["synchronous", "asynchronous", "priority", "whole prompts", "kv_producer"],
)
def test_ways_of_scheduling(model_folder, arguments):
    """Also in the role in which vLLM accepts no embeddings. With a control."""
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, **arguments) as ours:
        assert ours.generate(PROMPTS) == expected
        assert ours.reload(PROMPTS) == expected
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)


def test_an_embedding_model(model_folder):
    """Its prompts are loaded as well, and pooled to the same vectors. With a control."""
    arguments = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    with engine(model_folder, plugin={}, **arguments) as ours:

        def embed() -> Any:
            asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            found = ours.llm.embed(asked, use_tqdm=False)
            ours.settle()
            return np.array([one.outputs.embedding for one in found])

        computed = embed()
        ours.forget()
        reloaded = embed()
        assert ours.blocks_loaded() >= 300 // BLOCK_TOKENS
        assert np.allclose(reloaded, computed, atol=1e-4)
        ours.forget()
        ours.slots[:] ^= 0x40
        assert not np.isclose(embed(), computed, atol=1e-4).all(axis=1).any()


@pytest.mark.parametrize(
    ("kind", "synchronous", "asynchronous"),
    [("qwen3", False, False), ("qwen3", True, True), ("gemma3", False, True)],
)
def test_prompts_that_end_with_a_block_come_back_whole(
    model_folder, kind, synchronous, asynchronous, monkeypatch
):
    """Only the last token is recomputed, unless some layers read a window. With a control."""
    monkeypatch.setattr("kv_offload.scheduler.loads.decision.WHOLE_SECONDS", float("inf"))
    prompts = [random_tokens(count * BLOCK_TOKENS, seed=count) for count in (2, 5, 9)]
    left = 1 if kind == "qwen3" else BLOCK_TOKENS
    steps = {"async_scheduling": asynchronous}
    expected = plain_answers(model_folder, prompts, kind, one_by_one=True, **steps)
    with offloading(model_folder, kind, synchronous_loads=synchronous, **steps) as ours:
        assert ours.generate_each(prompts) == expected
        assert ours.reload(prompts, one_by_one=True) == expected
        # vLLM counts all tokens of an asynchronous load as cached, including the last.
        allowed = {left} if synchronous or left > 1 else {0, left}
        counted = zip(prompts, ours.cached_tokens, strict=True)
        assert {len(prompt) - cached for prompt, cached in counted} <= allowed
        if kind == "qwen3":
            assert ours.blocks_loaded() == 2 + 5 + 9
        assert bool(ours.totals["synchronous_loads"]) == synchronous
        ours.settle()
        assert ours.blocks_stored() == 0
        # Answered from the engine's own cache now: what was computed after the loads is right, too.
        assert ours.generate_each(prompts) == expected
        assert all_differ(ours.reload(prompts, one_by_one=True, corrupted=True), expected)
