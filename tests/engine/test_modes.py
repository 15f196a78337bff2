"""Modes of the engine that change what is computed, or what may be shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import (
    all_differ,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    random_tokens,
    transfer_config,
)

PROMPTS = prompts_with_shared_prefix()


def test_salts_share_nothing(model_folder: Path) -> None:
    prompts = [random_tokens(200, seed=32)]
    with offloading(model_folder) as ours:
        answers = ours.generate(prompts, cache_salt="one")
        assert ours.cached_tokens == [0]
        ours.forget()
        assert ours.generate(prompts, cache_salt="two") == answers
        assert ours.cached_tokens == [0]
        assert ours.blocks_loaded() == 0
        assert ours.reload(prompts, cache_salt="one") == answers
        assert ours.cached_tokens == [192]
        assert ours.blocks_loaded() == 6


PRODUCER = {**transfer_config({}), "kv_role": "kv_producer"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False},
        {"async_scheduling": True},
        {"scheduling_policy": "priority"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
        {"kv_transfer_config": PRODUCER},
    ],
    ids=["synchronous", "asynchronous", "priority", "whole prompts", "kv_producer"],
)
def test_ways_of_scheduling(model_folder: Path, arguments: dict[str, Any]) -> None:
    """And the role in which vLLM accepts no embeddings. With a control."""
    expected = plain_answers(model_folder, PROMPTS)
    with offloading(model_folder, **arguments) as ours:
        assert ours.generate(PROMPTS) == expected
        assert ours.reload(PROMPTS) == expected
        assert all_differ(ours.reload(PROMPTS, corrupted=True), expected)


def test_an_urgent_request_takes_blocks_of_one_that_stores(model_folder: Path) -> None:
    """The one that came first is preempted; both answers stay right."""
    prompts = [random_tokens(230, seed=seed) for seed in (34, 35)]
    expected = plain_answers(model_folder, prompts, max_tokens=130, one_by_one=True)
    arguments = {"scheduling_policy": "priority", "blocks": 17, "max_model_len": 480}
    with offloading(model_folder, **arguments) as ours:
        ours.add("slow", prompts[0], 130, priority=5)
        for _ in range(6):
            ours.step()
        ours.add("urgent", prompts[1], 130, priority=0)
        finished = ours.run()
        assert ours.preemptions > 0
        tokens = [list(finished[name].outputs[0].token_ids) for name in ("slow", "urgent")]
        assert tokens == expected
        assert ours.blocks_loaded() > 0, "the preempted request came back from host memory"
