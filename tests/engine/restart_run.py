"""Run by `run_module` in a process of its own: ranks with a disk end, and start again.

usage: python -m tests.engine.restart_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

`arguments` are `LLM`'s, `plugin` and `prompt_tokens`. Hands back what `check` checks. Core and
ranks have processes of their own; only the disk tells the second engine what the first has had.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from tests.engine import rank_calls
from tests.engine.harness import all_differ, engine_settings, greedy
from tests.engine.multiprocess_run import ask, assert_same, plain_answers
from tests.support.inputs import Tokens, random_tokens, transfer_config
from tests.support.patience import be_patient
from tests.support.processes import be_run, shut_down
from tests.support.totals import figures
from tests.support.waiting import wait_until


def check(result: dict[str, Any], ranks: int) -> None:
    """Check that every rank loaded packed blocks from its disk; ends with the control."""
    computed, cached = result["expected"]
    assert_same(result["computed"], computed)
    assert_same(result["restarted"], cached)
    assert [rank["rank"] for rank in result["ranks"]] == list(range(ranks))
    for rank in result["ranks"]:
        assert rank["slot_bytes"] < 0.9 * rank["block_bytes"]
    assert len({len(rank["blocks"]) for rank in result["loaded"]}) == 1
    blocks = len(result["loaded"][0]["blocks"])
    assert blocks >= 8
    assert result["figures"]["promoted_slots"] == result["written"] >= blocks
    assert result["figures"]["tier_mismatches"] == 0
    assert all_differ(result["corrupted"]["tokens"], computed["tokens"])


def wait_until_written(llm: Any, sampling: Any, blocks: int) -> int:
    """Have the engine step until its disk has so many blocks; return how many it has."""

    def is_written() -> bool:
        ask(llm, [random_tokens(3, seed=0)], sampling)
        told = figures(llm)
        return told.get("tier_slots_in_use", 0) >= blocks and not told.get("demoting_slots")

    wait_until(is_written, lambda: figures(llm))
    return int(figures(llm)["tier_slots_in_use"])


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # However busy the machine is. The engines' processes, which are forked, have it from here.
    be_patient(pytest.MonkeyPatch())
    plugin, prompt_tokens = arguments.pop("plugin"), arguments.pop("prompt_tokens")
    settings = engine_settings(Path(models), kind, disable_log_stats=False, **arguments)
    prompts: list[Tokens] = [random_tokens(count, seed=count) for count in prompt_tokens]
    blocks = sum((count - 1) // settings["block_size"] for count in prompt_tokens)
    sampling = greedy(8)
    (expected,) = plain_answers(settings, [prompts], sampling)
    settings["kv_transfer_config"] = transfer_config(plugin)
    result: dict[str, Any] = {"expected": expected}
    llm = LLM(**settings)
    result["computed"] = ask(llm, prompts, sampling)
    result["written"] = wait_until_written(llm, sampling, blocks)
    shut_down(llm)
    llm = LLM(**settings)
    result["ranks"] = llm.collective_rpc(rank_calls.watch)
    result["restarted"] = ask(llm, prompts, sampling)
    result["loaded"] = llm.collective_rpc(rank_calls.digests, args=("loaded",))
    result["figures"] = figures(llm)
    llm.reset_prefix_cache()
    ranks = [rank["rank"] for rank in result["ranks"]]
    llm.collective_rpc(rank_calls.roll, args=(ranks, "loaded"))
    result["corrupted"] = ask(llm, prompts, sampling)
    shut_down(llm)
    return result


if __name__ == "__main__":
    be_run(main)
