"""Host memory and sleep on a real engine in a separate process.

usage: python -m tests.engine.test_sleep MODELS_FOLDER ARGUMENTS_AS_JSON

The CPU engine keeps its KV cache and weights during a sleep, but everything before that is as on a
GPU: requests end, caches are reset, and the level reaches the plugin. `tests/gpu` runs `main`, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM

from tests.engine.harness import engine_settings, greedy
from tests.engine.multiprocess_run import ask, plain_answers
from tests.support.inputs import random_tokens, transfer_config
from tests.support.processes import be_run, run_module, shut_down
from tests.support.totals import figures


def test_host_memory_outlives_a_sleep_of_level_1_and_nothing_else(model_folder, forks):
    result = run_module("tests.engine.test_sleep", model_folder, {}, forks=forks)
    expected, from_cache = result.pop("expected")
    assert expected == from_cache
    for event, (answers, _) in result.items():
        assert answers == expected, event
    hits = {event: tokens for event, (_, tokens) in result.items()}
    assert hits["sleep 1"] >= 300
    assert hits["sleep 1 again"] >= 300
    # The engine's own cache is empty after each event, so only the model gave these.
    assert (hits["start"], hits["reload"], hits["sleep 2"]) == (0, 0, 0)


def main(models: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the answers without the plugin, computed and from the engine's own cache.

    Also those after each event, with the number of prompt tokens from host memory. Prompts are
    answered one at a time, because on a GPU rounding depends on the batch.
    """
    # None shares a prefix with another: each is computed whole, or loaded except its last block.
    prompts = [random_tokens(200 + 37 * i, seed=i) for i in range(3)]
    settings = engine_settings(Path(models), "qwen3", disable_log_stats=False, **arguments)

    (expected,) = plain_answers(settings, [prompts], greedy(8))
    result: dict[str, Any] = {"expected": expected}
    llm = LLM(**settings, kv_transfer_config=transfer_config({"keep_on_sleep": True}))

    def after(event: Callable[[], Any]) -> tuple[dict[str, Any], float]:
        event()
        before = figures(llm).get("hit_tokens", 0)
        return ask(llm, prompts, greedy(8)), figures(llm).get("hit_tokens", 0) - before

    def sleep(level: int) -> None:
        llm.sleep(level=level)
        if level == 1:
            llm.wake_up()
        else:  # the weights are gone
            llm.wake_up(tags=["weights"])
            llm.collective_rpc("reload_weights")
            llm.wake_up(tags=["kv_cache"])

    def reload() -> None:
        llm.collective_rpc("reload_weights")
        assert llm.reset_prefix_cache()

    result["start"] = after(lambda: None)
    result["sleep 1"] = after(lambda: sleep(1))
    result["reload"] = after(reload)
    result["sleep 1 again"] = after(lambda: sleep(1))
    result["sleep 2"] = after(lambda: sleep(2))
    shut_down(llm)
    return result


if __name__ == "__main__":
    be_run(main)  # in processes, because keep_on_sleep is refused without
