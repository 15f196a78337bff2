"""Host memory and sleep on a real engine.

The CPU engine keeps its KV cache and its weights in a sleep, but everything before that is as on a
GPU: requests end, caches are reset, and the level reaches the plugin.
"""

from __future__ import annotations

from pathlib import Path

from kv_swap.engine import Direction

from tests.engine.copies import Copies
from tests.engine.harness import offloading, prompts_with_shared_prefix, refusal
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


def test_keeping_is_refused_in_the_process_of_the_user(model_folder: Path) -> None:
    message = refusal(model_folder, Exception, plugin={"keep_on_sleep": True})
    assert "set VLLM_ENABLE_V1_MULTIPROCESSING=1" in message


def test_sleep_right_after_a_load_was_aborted(model_folder: Path, copies: Copies) -> None:
    prompts = prompts_with_shared_prefix(seed=3)
    with offloading(model_folder) as ours:
        expected = ours.generate(prompts)
        ours.forget()
        copies.hold(Direction.LOAD)
        ours.add("gone", prompts[0])
        for _ in range(3):
            ours.step()
        ours.abort("gone")
        assert ours.offload.abandoned_requests()
        copies.release()
        ours.llm.sleep(level=1)
        ours.llm.wake_up()
        assert ours.offload.manager.slots_in_use == 0
        ours.totals.clear()
        assert ours.generate(prompts) == expected
        assert ours.totals["hit_tokens"] == 0
