"""The engine core in a process of its own, and ranks in processes of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.multiprocess_run import run_engine


@pytest.mark.parametrize("ranks", [1, 2])
def test_round_trip_reset_and_sleep(model_folder: Path, ranks: int) -> None:
    result = run_engine(model_folder, "qwen3", {"tensor_parallel_size": ranks})
    expected = result["expected"]
    assert result["computed"] == expected
    assert result["reset"] is True
    assert result["reloaded"] == expected
    metrics = result["metrics"]
    assert metrics["vllm:host_kv_cache_loaded_bytes"] > 0
    assert metrics["vllm:host_kv_cache_stored_bytes"] >= metrics["vllm:host_kv_cache_loaded_bytes"]
    assert metrics["vllm:host_kv_cache_hit_tokens"] > 0
    assert sorted(result["ranks"]) == list(range(ranks))
    assert all(a != b for a, b in zip(result["corrupted"], expected, strict=True))
    # Sleeping empties host memory, since the engine may wake up with other weights.
    assert result["after_sleep"] == expected
    assert result["reset_with_connector"] is True
