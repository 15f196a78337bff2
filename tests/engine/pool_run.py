"""Run in a separate process: ranks with a host pool are killed and restarted.

usage: python -m tests.engine.pool_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON [READY]

Core and ranks have their own processes. With READY it computes prompts and waits, so that all of
them can be killed; without, it starts an engine afterwards and returns the input of `check`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM

from tests.engine import rank_calls
from tests.engine.harness import PATIENCE_SECONDS, all_differ, engine_settings, greedy
from tests.engine.multiprocess_run import ask, assert_same, plain_answers
from tests.support.inputs import Tokens, random_tokens, transfer_config
from tests.support.latents import cache_prefixes_of_latents
from tests.support.processes import be_run, shut_down, stay
from tests.support.totals import figures

PROMPTS = [random_tokens(count, seed=count) for count in (129, 193, 257)]
BLOCKS = sum((len(prompt) - 1) // 32 for prompt in PROMPTS)


def check(result: dict[str, Any], ranks: int, sharing: int = 1, *, from_peers: bool) -> None:
    """Check that every rank loaded what it was left or what a peer has; ends with the control."""
    computed, cached = result["expected"]
    assert_same(result["restarted"], cached)
    assert [rank["rank"] for rank in result["ranks"]] == list(range(ranks))
    assert all(rank["sharing"] == sharing for rank in result["ranks"])
    assert (result["figures"]["adopted_slots"] >= BLOCKS) is not from_peers
    assert (result["figures"].get("peers_read_bytes", 0) > 0) is from_peers
    assert all(len(rank["blocks"]) >= BLOCKS for rank in result["loaded"])
    assert all_differ(result["corrupted"]["tokens"], computed["tokens"])


def make_settings(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    cache_prefixes_of_latents()
    arguments = {name: value for name, value in arguments.items() if name != "plugin"}
    return engine_settings(Path(models), kind, disable_log_stats=False, **arguments)


def compute_and_stay(models: str, kind: str, arguments: dict[str, Any], ready: str) -> None:
    settings = make_settings(models, kind, arguments)
    llm = LLM(**settings, kv_transfer_config=transfer_config(arguments["plugin"]))
    ask(llm, PROMPTS, greedy(8))
    until = time.monotonic() + PATIENCE_SECONDS
    while figures(llm).get("stored_slots", 0) < BLOCKS:
        assert time.monotonic() < until, figures(llm)
        ask(llm, [random_tokens(3, seed=0)], greedy(1))
    stay(ready)


def start_again(settings: dict[str, Any], prompts: list[Tokens]) -> dict[str, Any]:
    """Query restarted ranks; return their answers and loads, and those of the control."""
    llm = LLM(**settings)
    result: dict[str, Any] = {"ranks": llm.collective_rpc(rank_calls.watch)}
    result["restarted"] = ask(llm, prompts, greedy(8))
    result["loaded"] = llm.collective_rpc(rank_calls.digests, args=("loaded",))
    result["figures"] = figures(llm)
    llm.reset_prefix_cache()
    leaders = [rank["rank"] for rank in result["ranks"][:: result["ranks"][0]["sharing"]]]
    llm.collective_rpc(rank_calls.roll, args=(leaders, "loaded"))
    result["corrupted"] = ask(llm, prompts, greedy(8))
    shut_down(llm)
    return result


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    settings = make_settings(models, kind, arguments)
    (expected,) = plain_answers(settings, [PROMPTS], greedy(8))
    settings["kv_transfer_config"] = transfer_config(arguments["plugin"])
    return {"expected": expected, **start_again(settings, PROMPTS)}


if __name__ == "__main__":
    if len(sys.argv) > 4:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        compute_and_stay(*sys.argv[1:3], json.loads(sys.argv[3]), sys.argv[4])
    else:
        be_run(main)
