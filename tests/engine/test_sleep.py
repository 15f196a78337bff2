"""Host memory and sleep on a real engine.

The CPU engine keeps its KV cache and its weights in a sleep, but everything before that is as on a
GPU: requests end, caches are reset, and the level reaches the plugin.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run_module


def test_host_memory_outlives_a_sleep_of_level_1_and_nothing_else(
    model_folder: Path, forks: bool
) -> None:
    result = run_module("tests.engine.sleep_run", model_folder, {}, forks=forks)
    expected, from_cache = result.pop("expected")
    assert expected == from_cache
    for event, (answers, _) in result.items():
        assert answers == expected, event
    hits = {event: tokens for event, (_, tokens) in result.items()}
    assert hits["sleep 1"] >= 300
    assert hits["sleep 1 again"] >= 300
    # The engine's own cache is empty after each event, so these came from nowhere but the model.
    assert (hits["start"], hits["reload"], hits["sleep 2"]) == (0, 0, 0)
