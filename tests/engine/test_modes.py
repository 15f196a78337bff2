"""Modes of the engine that change what is computed together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import (
    all_differ,
    offloading,
    plain_answers,
    prompts_with_shared_prefix,
    transfer_config,
)

PROMPTS = prompts_with_shared_prefix()


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
