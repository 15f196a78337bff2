"""Ranks that hold different layers: stages of a pipeline, with one model and a KV cache each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.multiprocess_run import run_engine


@pytest.mark.parametrize(
    ("kind", "partition"), [("qwen3", "1,1"), ("gemma3", "2,2"), ("gemma3", "3,1")]
)
def test_stages_of_a_pipeline(model_folder: Path, kind: str, partition: str) -> None:
    """With `3,1` the stages' blocks have different sizes, and so have their slots."""
    arguments = {
        "pipeline_parallel_size": 2,
        # A later stage of vLLM's CPU engine has no buffer for its input unless a warm-up made it.
        "enforce_eager": False,
        "compilation_config": {"mode": 1, "backend": "eager"},
    }
    result = run_engine(model_folder, kind, arguments, VLLM_PP_LAYER_PARTITION=partition)
    expected = result["expected"]
    assert result["computed"] == expected
    assert result["reset"] is True
    assert result["reloaded"] == expected
    assert result["metrics"]["vllm:host_kv_cache_loaded_bytes"] > 0
    assert result["metrics"]["vllm:host_kv_cache_failed_loads"] == 0
    assert sorted(result["ranks"]) == [0, 1]
    assert all(a != b for a, b in zip(result["corrupted"], expected, strict=True))
    assert result["after_sleep"] == expected
    assert result["reset_with_connector"] is True
