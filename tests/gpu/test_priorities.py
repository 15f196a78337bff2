"""Requests of many priorities share a small GPU cache and preempt each other: no wrong token."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs a vLLM engine, which is not installed")

SEEDS = [1, 2, 3, 4]


@pytest.mark.filterwarnings("default")
def test_requests_that_are_preempted_get_the_same_tokens(run_in_every_mode):
    result = run_in_every_mode(
        "tests.gpu.priority_run", requests=428, seeds=SEEDS, blocks=72, max_model_len=1024
    )
    assert result["first"] == result["again"] == [0] * len(SEEDS)
    assert result["preemptions"] > 0
    assert result["blocks_loaded"] > 0
    assert result["hook_errors"] == 0
    assert sum(result["control"]) > 0, "wrong KV must change tokens"
