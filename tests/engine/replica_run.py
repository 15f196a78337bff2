"""Run in a separate process: two data-parallel replicas behind one front end.

usage: python -m tests.engine.replica_run MODELS_FOLDER KIND ARGUMENTS_AS_JSON

Returns the input of `check`. Each replica gets its own prompts, one at a time; its answers are
compared with those of a single engine without the plugin. With `store`, the address of a master, or
`host_pool`, a folder, among the arguments, they share a store or a pool, and `check_shared` checks
the rest.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from kv_offload.config.host_memory import read_host_memory
from kv_offload.config.sizes import parse_size
from kv_offload.engines.vllm.plugin import register
from tests.engine import rank_calls
from tests.engine.harness import all_differ, engine_settings, greedy, patiently
from tests.engine.multiprocess_run import (
    PROMPT_TOKENS,
    as_answers,
    assert_same,
    plain_answers,
    rolled_blocks,
)
from tests.support.inputs import Tokens, random_tokens, transfer_config
from tests.support.latents import cache_prefixes_of_latents
from tests.support.mooncake import require_mooncake
from tests.support.patience import be_patient
from tests.support.processes import be_run
from tests.support.totals import totals_by_replica

REPLICAS = 2
TOLD = ("lookup_tokens", "hit_tokens", "lost_tier_slots", "late_lookups", "late_promotions")
"""Totals to show when a check fails."""


def check(result: dict[str, Any]) -> None:
    """Check that each replica serves from its part of host memory, and nothing of the other's."""
    for (rank,) in result["ranks"]:
        assert rank["replica"] == [0], "no rank of the other replica"
        assert rank["slots"] == result["host_bytes"] // REPLICAS // rank["slot_bytes"]
    for replica, (computed, cached) in enumerate(result["expected"]):
        assert_same(result["computed"][replica], computed)
        assert_same(result["reloaded"][replica], cached)
        (stored,), (loaded,) = result["stored"][replica], result["loaded"][replica]
        assert len(loaded["blocks"]) >= 8
        assert loaded["blocks"].items() <= stored["blocks"].items()
    # Corruption of the first replica's host memory affects its answers and no others.
    (computed, _), (_, cached) = result["expected"]
    check_rolled(result, computed, cached)
    (mixed,), (intact,) = result["loaded_rolled"]
    (before,), _ = result["stored"]
    assert mixed["blocks"] == rolled_blocks(before["blocks"], mixed["blocks"])
    assert intact == result["loaded"][1][0]
    # Neither replica has the other's prompts: they are computed, and nothing is loaded.
    for replica, (computed, _) in enumerate(result["expected"]):
        assert_same(result["swapped"][1 - replica], computed)
    assert [ranks[0]["blocks"] for ranks in result["loaded_swapped"]] == [{}, {}]


def check_shared(result: dict[str, Any]) -> None:
    """Check that each replica serves what the other has computed, through the store or pool."""
    for replica, (computed, cached) in enumerate(result["expected"]):
        other = 1 - replica
        assert_same(result["computed"][replica], computed)
        assert_same(result["swapped"][other], cached)
        blocks = len(result["stored"][replica][0]["blocks"])
        assert result["demoted"][replica] == blocks, (result["demoted"], result["totals"])
        # One replica loads the bytes that the other stored, in whichever slots.
        (stored,), (loaded,) = result["stored"][replica], result["loaded_swapped"][other]
        if "promoted" in result:
            assert result["promoted"][other] == blocks, result["totals"]
        else:  # straight from the other's memory
            nbytes = len(loaded["blocks"]) * result["ranks"][other][0]["block_bytes"]
            assert result["read"][other] == nbytes, result["totals"]
        assert loaded["blocks"]
        assert set(loaded["blocks"].values()) <= set(stored["blocks"].values())
    # Corruption of blocks from the store in the first replica's host memory affects its answers.
    (_, cached), (computed, _) = result["expected"]
    check_rolled(result, computed, cached)


def check_rolled(result: dict[str, Any], wrong: dict[str, Any], right: dict[str, Any]) -> None:
    """Check that the first replica's answers all differ from `wrong`'s; the other's are right."""
    first, other = result["rolled"]
    assert all_differ(first["tokens"], wrong["tokens"])
    assert_same(other, right)


def main(models: str, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    register()  # as vLLM does if the package is installed, not just checked out
    logprobs = arguments.pop("logprobs", None)
    store: dict[str, Any] | None = None
    if (folder := arguments.pop("host_pool", None)) is not None:
        store = {"host_pool": "chat", "host_pool_path": folder}
        store["load_or_recompute"] = "always_load"
    if (master := arguments.pop("store", None)) is not None:
        require_mooncake()
        store = {"remote": {"kind": "mooncake", "address": master, "bytes": "16MiB"}}
        store["load_or_recompute"] = "always_load"  # a small model computes faster
        be_patient(pytest.MonkeyPatch())
    cache_prefixes_of_latents()
    settings = engine_settings(
        Path(models), kind, max_model_len=1024, disable_log_stats=store is None, **arguments
    )
    prompts = [
        [random_tokens(count, seed=1000 * replica + count) for count in PROMPT_TOKENS]
        for replica in range(REPLICAS)
    ]
    sampling = greedy(8, logprobs=logprobs)

    expected = plain_answers(settings, prompts, sampling)
    # A part of the host's memory, which the replicas divide.
    host_bytes = REPLICAS * (8 << 20)
    percent = f"{100 * host_bytes / read_host_memory().size_bytes:.10f}%"
    host_bytes = parse_size(percent, read_host_memory().size_bytes)
    config = transfer_config({"cpu_bytes": percent, **(store or {})})
    settings["kv_transfer_config"] = KVTransferConfig(**config)
    return {
        "expected": expected,
        "host_bytes": host_bytes,
        **asyncio.run(run(settings, prompts, sampling, shares=store is not None)),
    }


async def run(
    settings: dict[str, Any], prompts: list[list[Tokens]], sampling: Any, *, shares: bool
) -> dict[str, Any]:
    """Start the replicas, ask them, and return their answers and contents, by replica.

    With a store, each is also asked the other's prompts once the store has them.
    """
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(data_parallel_size=REPLICAS, **settings))
    asked = 0

    async def ask(replica: int, own: list[Tokens]) -> dict[str, Any]:
        nonlocal asked
        outputs = []
        for prompt in own:
            asked += 1
            request = llm.generate(
                {"prompt_token_ids": prompt},
                sampling,
                request_id=f"request-{asked}",
                data_parallel_rank=replica,
            )
            async for output in request:
                last = output
            outputs.append(last)
        return as_answers(outputs)

    async def ask_each(order: list[list[Tokens]]) -> list[dict[str, Any]]:
        """Ask all replicas at the same time; only the last output of an answer is complete."""
        return list(await asyncio.gather(*[ask(i, own) for i, own in enumerate(order)]))

    async def call(function: Any, *arguments: Any, replicas: int = REPLICAS) -> list[Any]:
        """Return the answers of the ranks of each of the first replicas."""
        client = llm.engine_core
        words = ("collective_rpc", function, None, arguments, {})
        return [
            await client._call_utility_async(*words, engine=engine)
            for engine in client.core_engines[:replicas]
        ]

    async def swap() -> None:
        """Ask each replica the other's prompts."""
        await call(rank_calls.watch)
        result["swapped"] = await ask_each(prompts[::-1])
        result["loaded_swapped"] = await call(rank_calls.digests, "loaded")

    try:
        result: dict[str, Any] = {"ranks": await call(rank_calls.watch)}
        result["computed"] = await ask_each(prompts)
        if shares:
            assert await llm.reset_prefix_cache() is not False
            result["stored"] = await call(rank_calls.digests, "stored")
            blocks = [len(ranks[0]["blocks"]) for ranks in result["stored"]]
            in_pool = "host_pool" in settings["kv_transfer_config"].kv_connector_extra_config
            written = "stored" if in_pool else "demoted"
            for turn in patiently(0):
                demoted = totals_by_replica(f"{written}_slots", REPLICAS)
                peers = totals_by_replica("peers", REPLICAS)
                if demoted == blocks and peers == [int(in_pool)] * REPLICAS:
                    break
                await asyncio.sleep(0.05)
                if turn % 100 == 99:
                    # On a machine that stalls, a store may not answer in time. An idle engine would
                    # then not use it again: make it step.
                    await ask_each([[[1, 2, 3]]] * REPLICAS)
            result["demoted"] = demoted
            await swap()
            if in_pool:
                result["read"] = totals_by_replica("peers_read_bytes", REPLICAS)
            else:
                result["promoted"] = totals_by_replica("promoted_slots", REPLICAS)
            result["totals"] = {name: totals_by_replica(name, REPLICAS) for name in TOLD}
            assert await llm.reset_prefix_cache() is not False
            await call(rank_calls.roll, [0], "loaded", replicas=1)
            result["rolled"] = await ask_each(prompts[::-1])
            return result
        assert await llm.reset_prefix_cache() is not False
        result["stored"] = await call(rank_calls.digests, "stored")
        await call(rank_calls.poison)
        result["reloaded"] = await ask_each(prompts)
        result["loaded"] = await call(rank_calls.digests, "loaded")
        await llm.reset_prefix_cache()
        await call(rank_calls.roll, [0], replicas=1)
        result["rolled"] = await ask_each(prompts)
        result["loaded_rolled"] = await call(rank_calls.digests, "loaded")
        await llm.reset_prefix_cache()
        await swap()
        return result
    finally:
        llm.shutdown()


if __name__ == "__main__":
    be_run(main)
