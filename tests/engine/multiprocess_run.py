"""Run in a separate process: an engine whose core and ranks have their own processes.

usage: python -m tests.engine.multiprocess_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

`arguments` are `LLM`'s, and `plugin`, `prompt_tokens`, `sleep`, `logprobs` and `beside`: whether
ours is the first of two members of a MultiConnector. Returns the input of `check`.

Prompts fill some blocks and have one token more, and are answered one at a time. So a reloaded
prompt computes exactly what an engine without the plugin computes when its own cache has the
prompt; on a GPU, rounding depends on the rest of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM

from tests.engine import rank_calls
from tests.engine.harness import all_differ, engine_settings, greedy
from tests.support.inputs import Tokens, random_tokens, transfer_config
from tests.support.latents import cache_prefixes_of_latents
from tests.support.processes import be_run, shut_down
from tests.support.remote_connector import multi_config
from tests.support.totals import figures

PROMPT_TOKENS = (129, 193, 257)
PIPELINE = {
    "pipeline_parallel_size": 2,
    # A later stage of vLLM's CPU engine has an input buffer only after a warm-up.
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
}

LOGPROB_TOLERANCE = 1e-3
"""In nats. Since the shapes are the same, so are most bits; wrong blocks differ by whole nats."""


def check(result: dict[str, Any], ranks: int, sharing: int = 1, *, packs: bool = False) -> None:
    """Check a run of `ranks` ranks; each group of `sharing` ranks keeps the same bytes once."""
    computed, cached = result["expected"]
    assert_same(result["computed"], computed)
    assert result["reset"] is True
    assert_same(result["reloaded"], cached)
    told, stored, loaded, rolled = (result[k] for k in ("ranks", "stored", "loaded", "rolled"))
    assert [rank["rank"] for rank in told] == list(range(ranks))
    for rank in told:
        assert rank["sharing"] == sharing
        assert rank["replica"] == list(range(ranks)), "all ranks can agree before they start"
        assert (rank["slot_bytes"] < 0.9 * rank["block_bytes"]) is packs
        assert rank["slots"] == result["cpu_bytes"] * sharing // ranks // rank["slot_bytes"]
    for before, after, wrong in zip(stored, loaded, rolled, strict=True):
        assert len(after["blocks"]) >= 8
        assert after["blocks"].items() <= before["blocks"].items()
        assert wrong["blocks"] == rolled_blocks(before["blocks"], after["blocks"])
        assert wrong["blocks"] != after["blocks"]
    first = range(0, ranks, sharing)
    for leader in first:
        peers = stored[leader : leader + sharing]
        assert all(peer["blocks"] == peers[0]["blocks"] for peer in peers)
        copied = [peer["copied"] for peer in peers]
        assert sum(copied) == len(peers[0]["blocks"]), "each block is copied to the host once"
        assert min(copied) >= len(peers[0]["blocks"]) // sharing - len(result["prompt_tokens"])
    for a, b in itertools.pairwise(first):
        blocks = zip(stored[a]["blocks"].items(), stored[b]["blocks"].items(), strict=True)
        assert all(mine != other for mine, other in blocks), "digests tell ranks apart"
    block_bytes = sum(rank["block_bytes"] for rank in told)
    blocks = len(loaded[0]["blocks"])
    metrics = result["metrics"]
    assert metrics["slots"] == min(rank["slots"] for rank in told)
    assert metrics["loaded_bytes"] == blocks * block_bytes
    assert metrics["stored_bytes"] >= blocks * block_bytes // sharing
    assert metrics["hit_tokens"] == sum(tokens - 1 for tokens in result["prompt_tokens"])
    assert metrics.get("failed_loads", 0) == 0
    assert (metrics.get("sampled_tiles", 0) > 0) is packs
    assert all_differ(result["corrupted"]["tokens"], computed["tokens"])
    if "after_sleep" in result:
        # Sleeping empties host memory, since the engine may wake up with other weights.
        assert_same(result["after_sleep"], computed)
    assert result["reset_with_connector"] is True


def rolled_blocks(stored: dict[str, str], loaded: Container[str]) -> dict[str, str]:
    """Return what loads find after `rank_calls.roll`, by slots, whose numbers JSON made text."""
    used = sorted(stored, key=int)
    moved = zip(used, np.roll(used, 7).tolist(), strict=True)
    return {slot: stored[other] for slot, other in moved if slot in loaded}


def assert_same(answers: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answers["tokens"] == expected["tokens"]
    for mine, others in zip(answers["logprobs"], expected["logprobs"], strict=True):
        assert mine.keys() == others.keys()
        for token, logprob in mine.items():
            assert abs(logprob - others[token]) <= LOGPROB_TOLERANCE, (token, logprob, others)


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    beside: bool | None = arguments.pop("beside", None)
    logprobs, sleeps = arguments.pop("logprobs", None), arguments.pop("sleep", False)
    cpu_bytes = 8 << 20
    # Otherwise, after a load that a stalled machine made slow, hits would be computed.
    plugin = {"cpu_bytes": cpu_bytes, "load_or_recompute": "always_load"}
    plugin.update(arguments.pop("plugin", {}))
    prompt_tokens = arguments.pop("prompt_tokens", PROMPT_TOKENS)
    cache_prefixes_of_latents()
    settings = engine_settings(Path(models), kind, disable_log_stats=False, **arguments)
    prompts = [random_tokens(count, seed=count) for count in prompt_tokens]

    sampling = greedy(8, logprobs=logprobs)

    def answers(llm: LLM) -> dict[str, Any]:
        return ask(llm, prompts, sampling)

    (expected,) = plain_answers(settings, [prompts], sampling)
    result: dict[str, Any] = {
        "expected": expected,
        "cpu_bytes": cpu_bytes,
        "prompt_tokens": prompt_tokens,
    }
    config = transfer_config(plugin)
    if beside is not None:
        config = multi_config(plugin, first=beside)
    llm = LLM(**settings, kv_transfer_config=config)
    result["ranks"] = llm.collective_rpc(rank_calls.watch)
    result["computed"] = answers(llm)
    result["reset"] = llm.reset_prefix_cache()
    result["stored"] = llm.collective_rpc(rank_calls.digests, args=("stored",))
    llm.collective_rpc(rank_calls.poison)
    result["reloaded"] = answers(llm)
    result["loaded"] = llm.collective_rpc(rank_calls.digests, args=("loaded",))
    result["metrics"] = figures(llm)
    llm.reset_prefix_cache()
    # If ranks share memory, only the first touches it, and the others must see the change.
    shared = result["ranks"][0]["sharing"]
    leaders = [rank["rank"] for rank in result["ranks"][::shared]]
    llm.collective_rpc(rank_calls.roll, args=(leaders,))
    result["corrupted"] = answers(llm)
    result["rolled"] = llm.collective_rpc(rank_calls.digests, args=("loaded",))
    if sleeps:
        # Right after an answer, while its stores are in flight.
        llm.sleep(level=1)
        llm.wake_up()
        result["after_sleep"] = answers(llm)
    result["reset_with_connector"] = llm.reset_prefix_cache(reset_connector=True)
    shut_down(llm)
    return result


def ask(llm: Any, prompts: list[Tokens], sampling: Any) -> dict[str, Any]:
    """Answer prompts one by one."""
    return as_answers(
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        for prompt in prompts
    )


def as_answers(outputs: Iterable[Any]) -> dict[str, Any]:
    """Return the tokens of each of vLLM's outputs, and all log-probabilities."""
    best = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(answer.token_ids) for answer in best],
        "logprobs": [
            {token: found.logprob for token, found in top.items()}
            for answer in best
            for top in answer.logprobs or ()
        ],
    }


def plain_answers(
    settings: dict[str, Any], prompts: list[list[Tokens]], sampling: Any
) -> list[list[dict[str, Any]]]:
    """Return the answers of an engine without the plugin to each list of prompts, asked twice.

    The first time it computes them; the second time they are in its own cache.
    """
    llm = LLM(**settings)
    answers = [[ask(llm, asked, sampling) for _ in range(2)] for asked in prompts]
    shut_down(llm)
    return answers


if __name__ == "__main__":
    be_run(main)
